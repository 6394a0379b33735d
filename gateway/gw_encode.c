#include "gw_encode.h"

static void run(struct gw_encode *e)
{
    e->code = ERR_OK;
    for (unsigned i = 0; i < e->n_texts && e->code == ERR_OK; i++)
        if (e->texts[i].text)
            e->code = gw_tokenizer_encode(e->tokenizer, e->texts[i].text, e->texts[i].n,
                                          e->parse_special, e->add_bos, &e->ids[i], &e->error);
}

static void on_work(uv_work_t *work)
{
    run(work->data);
}

static void on_worked(uv_work_t *work, int status)
{
    struct gw_encode *e = work->data;
    (void)status; /* never cancelled */
    e->done(e);
}

void gw_encode_start(struct gw_encode *e, uv_loop_t *loop)
{
    size_t n = 0;
    for (unsigned i = 0; i < e->n_texts; i++)
        n += e->texts[i].text ? e->texts[i].n : 0;
    e->work.data = e;
    if (n > GW_ENCODE_INLINE_BYTES && uv_queue_work(loop, &e->work, on_work, on_worked) == 0)
        return;
    run(e);
    e->done(e);
}
