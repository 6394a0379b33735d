#include "fake_read.h"

#include <errno.h>
#include <unistd.h>

#include "alloc.h"

struct fake_reader {
    struct tier_read read; /* first */
    struct fake_read *f;
    struct tier_read_setup setup;
    uint32_t n_ops;
    struct tier_read_op ops[]; /* [depth] */
};

static void fake_start(struct tier_read *r, const struct tier_read_op *ops, uint32_t n)
{
    struct fake_reader *k = (struct fake_reader *)r;
    for (uint32_t i = 0; i < n; i++) {
        const uint64_t at = (uint64_t)((uint8_t *)ops[i].to - (uint8_t *)k->setup.arena);
        if (at > k->setup.arena_bytes || ops[i].bytes > k->setup.arena_bytes - at)
            k->f->misplaced = true;
        if (k->n_ops == k->setup.depth)
            k->f->too_many = true;
        else
            k->ops[k->n_ops++] = ops[i];
    }
    k->f->n_open = k->n_ops;
    if (k->n_ops > k->f->most_open)
        k->f->most_open = k->n_ops;
}

static uint32_t fake_draw(struct fake_read *f, uint32_t n)
{
    f->seed = f->seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(f->seed >> 33) % n;
}

static int32_t fake_result(struct fake_reader *k, const struct tier_read_op *op)
{
    struct fake_read *f = k->f;
    f->n_reads++;
    if (f->fail_nth > 0 && --f->fail_nth == 0) {
        f->fail_nth = f->fail_forever ? 1 : 0;
        f->n_faults++;
        return -f->fail_errno;
    }
    const bool is_short = f->short_nth > 0 && --f->short_nth == 0;
    if (is_short && f->short_forever)
        f->short_nth = 1;
    ssize_t got = pread(k->setup.fds[op->file], op->to, op->bytes, (off_t)op->offset);
    if (got < 0)
        return -errno;
    if (is_short && got > (ssize_t)f->short_bytes)
        got = (ssize_t)f->short_bytes;
    return (int32_t)got;
}

static uint32_t fake_take(struct tier_read *r, bool wait, struct tier_read_end *ret, uint32_t n)
{
    struct fake_reader *k = (struct fake_reader *)r;
    (void)wait;
    if (k->f->idle_takes > 0) {
        k->f->idle_takes--;
        return 0;
    }
    /* At least one, and with a seed not all, so that reads of several calls mix. */
    uint32_t taken = 0, some = n < k->n_ops ? n : k->n_ops;
    if (k->f->seed != 0 && some > 1)
        some = 1 + fake_draw(k->f, some);
    while (taken < some) {
        const uint32_t i = k->f->seed != 0 ? fake_draw(k->f, k->n_ops) : 0;
        const struct tier_read_op op = k->ops[i];
        k->n_ops--;
        for (uint32_t j = i; j < k->n_ops; j++)
            k->ops[j] = k->ops[j + 1];
        ret[taken++] = (struct tier_read_end){op.token, fake_result(k, &op)};
    }
    k->f->n_open = k->n_ops;
    return taken;
}

static void fake_close(struct tier_read *r)
{
    struct fake_reader *k = (struct fake_reader *)r;
    k->f->n_closed++;
    alloc_free(k);
}

static enum err_code fake_open(void *context, const struct tier_read_setup *setup,
                               struct tier_read **ret, struct err *e)
{
    struct fake_reader *k =
        alloc_zero(ALLOC_MISC, 1, sizeof(*k) + setup->depth * sizeof(k->ops[0]));
    if (k == NULL)
        return err_set(e, ERR_NOMEM, "no memory for a reader that misbehaves");
    k->read = (struct tier_read){
        .start = fake_start, .take = fake_take, .close = fake_close, .about = "misbehaving reader"};
    k->f = context;
    k->setup = *setup;
    *ret = &k->read;
    return ERR_OK;
}

void fake_read_init(struct fake_read *f)
{
    *f = (struct fake_read){.source = {fake_open, f}};
}
