#include "tier_read.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include <liburing.h>

#include "alloc.h"
#include "log.h"

/* Registered buffer i is the arena's i-th piece. Pinning a piece takes some milliseconds once its
 * pages are there, seconds a few GiB before: so pieces are registered as they are reserved. */
#define URING_PIECE (UINT64_C(256) << 20)
#define URING_PROBE (UINT64_C(1) << 20)

struct uring {
    struct tier_read read; /* first: the interface is the object */
    struct io_uring ring;
    uint8_t *arena;
    uint64_t arena_bytes;
    uint32_t n_pieces, n_pinned; /* registered: those before n_pinned */
    bool pins;                   /* the kernel takes pieces */
};

static void uring_start(struct tier_read *r, const struct tier_read_op *ops, uint32_t n)
{
    struct uring *u = (struct uring *)r;
    for (uint32_t i = 0; i < n; i++) {
        const struct tier_read_op *op = &ops[i];
        struct io_uring_sqe *sqe = io_uring_get_sqe(&u->ring); /* depth reads at most: never NULL */
        const uint64_t at = (uint64_t)((uint8_t *)op->to - u->arena);
        const bool inside = at / URING_PIECE == (at + op->bytes - 1) / URING_PIECE;
        if (inside && at / URING_PIECE < u->n_pinned)
            io_uring_prep_read_fixed(sqe, (int)op->file, op->to, op->bytes, op->offset,
                                     (int)(at / URING_PIECE));
        else
            io_uring_prep_read(sqe, (int)op->file, op->to, op->bytes, op->offset);
        io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
        io_uring_sqe_set_data64(sqe, op->token);
    }
    /* What the kernel does not take now is offered again by uring_take. */
    (void)io_uring_submit(&u->ring);
}

static uint32_t uring_take(struct tier_read *r, bool wait, struct tier_read_end *ret, uint32_t n)
{
    struct uring *u = (struct uring *)r;
    if (io_uring_sq_ready(&u->ring) > 0)
        (void)io_uring_submit(&u->ring);
    if (wait && io_uring_cq_ready(&u->ring) == 0)
        (void)io_uring_submit_and_wait(&u->ring, 1);
    uint32_t taken = 0;
    struct io_uring_cqe *cqe;
    while (taken < n && io_uring_peek_cqe(&u->ring, &cqe) == 0) {
        ret[taken++] = (struct tier_read_end){(uint32_t)io_uring_cqe_get_data64(cqe), cqe->res};
        io_uring_cqe_seen(&u->ring, cqe);
    }
    return taken;
}

static void uring_close(struct tier_read *r)
{
    struct uring *u = (struct uring *)r;
    io_uring_queue_exit(&u->ring);
    alloc_free(u);
}

static int uring_pin(struct uring *u, uint32_t piece, uint64_t bytes)
{
    struct iovec at = {.iov_base = u->arena + piece * URING_PIECE, .iov_len = (size_t)bytes};
    const __u64 tag = 0;
    const int n = io_uring_register_buffers_update_tag(&u->ring, piece, &at, &tag, 1);
    return n == 1 ? 0 : n < 0 ? -n : EINVAL;
}

static void uring_reserved(struct tier_read *r, uint64_t bytes)
{
    struct uring *u = (struct uring *)r;
    while (u->pins && u->n_pinned < u->n_pieces) {
        const uint64_t start = u->n_pinned * URING_PIECE, left = u->arena_bytes - start;
        const uint64_t n = left < URING_PIECE ? left : URING_PIECE;
        if (start + n > bytes)
            return;
        const int failed = uring_pin(u, u->n_pinned, n);
        u->pins = failed == 0;
        u->n_pinned += u->pins;
        if (!u->pins)
            log_warn("tier_read", "pin_refused",
                     "pinned_bytes=%llu bytes=%llu reason=\"%s\" "
                     "hint=\"continuing: reads beyond cost more processor time; LimitMEMLOCK\"",
                     (unsigned long long)start, (unsigned long long)u->arena_bytes,
                     strerror(failed));
    }
}

/* Pinned pages count against RLIMIT_MEMLOCK: a refusal costs some processor time a read and is
 * said, not more. Returns 0 or an errno. */
static int uring_try_pins(struct uring *u)
{
    const uint64_t pieces = (u->arena_bytes + URING_PIECE - 1) / URING_PIECE;
    u->n_pieces = (uint32_t)(pieces < 16384 ? pieces : 16384); /* the kernel's limit */
    int failed = -io_uring_register_buffers_sparse(&u->ring, u->n_pieces);
    if (failed == 0)
        failed = uring_pin(u, 0, u->arena_bytes < URING_PROBE ? u->arena_bytes : URING_PROBE);
    u->pins = failed == 0;
    return failed;
}

enum err_code tier_read_uring_open(const struct tier_read_setup *setup, struct tier_read **ret,
                                   struct err *e)
{
    struct uring *u = alloc_zero(ALLOC_WEIGHTS, 1, sizeof(*u));
    if (u == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the reader of the model file");
    u->read = (struct tier_read){
        .start = uring_start, .take = uring_take, .reserved = uring_reserved, .close = uring_close};
    u->arena = setup->arena;
    u->arena_bytes = setup->arena_bytes;

    int failed = -io_uring_queue_init(setup->depth, &u->ring, 0);
    if (failed != 0) {
        alloc_free(u);
        return err_set_os(e, ERR_UNSUPPORTED, failed, "io_uring refused");
    }
    failed = -io_uring_register_files(&u->ring, setup->fds, setup->n_fds);
    if (failed != 0) {
        uring_close(&u->read);
        return err_set_os(e, ERR_UNSUPPORTED, failed, "io_uring refused the files");
    }
    failed = uring_try_pins(u);
    if (u->pins)
        snprintf(u->read.about, sizeof(u->read.about), "io_uring");
    else
        snprintf(u->read.about, sizeof(u->read.about),
                 "io_uring without registered buffers (%s; LimitMEMLOCK)", strerror(failed));
    *ret = &u->read;
    return ERR_OK;
}
