#include "tier_read.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include <liburing.h>

#include "alloc.h"

/* The kernel takes at most 1 GiB as one registered buffer: buffer i is the arena's i-th GiB. */
#define URING_PIECE (UINT64_C(1) << 30)

struct uring {
    struct tier_read read; /* first: the interface is the object */
    struct io_uring ring;
    uint8_t *arena;
    bool buffers; /* the arena is registered */
};

static void uring_start(struct tier_read *r, const struct tier_read_op *ops, uint32_t n)
{
    struct uring *u = (struct uring *)r;
    for (uint32_t i = 0; i < n; i++) {
        const struct tier_read_op *op = &ops[i];
        struct io_uring_sqe *sqe = io_uring_get_sqe(&u->ring); /* depth reads at most: never NULL */
        const uint64_t at = (uint64_t)((uint8_t *)op->to - u->arena);
        const bool inside = at / URING_PIECE == (at + op->bytes - 1) / URING_PIECE;
        if (u->buffers && inside)
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

/* The arena's pages stay pinned while they are registered, which counts against RLIMIT_MEMLOCK: a
 * refusal costs some processor time a read and is said, not more. Returns 0 or an errno. */
static int uring_register_arena(struct uring *u, uint64_t bytes)
{
    const uint64_t n = (bytes + URING_PIECE - 1) / URING_PIECE;
    struct iovec *pieces = alloc_zero(ALLOC_MISC, (size_t)n, sizeof(*pieces));
    if (pieces == NULL)
        return ENOMEM;
    for (uint64_t i = 0; i < n; i++) {
        const uint64_t left = bytes - i * URING_PIECE;
        pieces[i].iov_base = u->arena + i * URING_PIECE;
        pieces[i].iov_len = (size_t)(left < URING_PIECE ? left : URING_PIECE);
    }
    const int failed = io_uring_register_buffers(&u->ring, pieces, (unsigned)n);
    alloc_free(pieces);
    return -failed;
}

enum err_code tier_read_uring_open(const struct tier_read_setup *setup, struct tier_read **ret,
                                   struct err *e)
{
    struct uring *u = alloc_zero(ALLOC_WEIGHTS, 1, sizeof(*u));
    if (u == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the reader of the model file");
    u->read = (struct tier_read){.start = uring_start, .take = uring_take, .close = uring_close};
    u->arena = setup->arena;

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
    failed = uring_register_arena(u, setup->arena_bytes);
    u->buffers = failed == 0;
    if (u->buffers)
        snprintf(u->read.about, sizeof(u->read.about), "io_uring");
    else
        snprintf(u->read.about, sizeof(u->read.about),
                 "io_uring without registered buffers (%s; LimitMEMLOCK)", strerror(failed));
    *ret = &u->read;
    return ERR_OK;
}
