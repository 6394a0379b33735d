#include "gw_job.h"

#include <malloc.h>

#include "alloc.h"
#include "gw_api.h"
#include "gw_exchange.h"
#include "gw_json_in.h"
#include "gw_service.h"

enum {
    MAX_ANSWER = 1 << 30,
    TRIM_BYTES = 1 << 20 /* a body beyond this leaves much free memory behind */
};

void *gw_job_new(size_t bytes, const struct gw_job_kind *kind, struct gw_service *s,
                 struct gw_exchange *x)
{
    if (!gw_api_ready(s, x))
        return NULL;
    struct gw_job *j = alloc_zero(ALLOC_REQUEST, 1, bytes);
    if (!j) {
        gw_exchange_fail_text(x, GW_ERROR_OVERLOADED, NULL, "no memory for the request");
        return NULL;
    }
    j->kind = kind;
    j->service = s;
    j->model = s->model;
    j->x = x;
    j->out = BUF_INIT(MAX_ANSWER);
    return j;
}

static void job_free(struct gw_job *j)
{
    if (j->kind->done)
        j->kind->done(j);
    buf_done(&j->body);
    buf_done(&j->out);
    alloc_free(j);
}

static void run(struct gw_job *j)
{
    json_t *root = NULL;
    struct err e = {0};
    enum err_code code = gw_json_in_parse((char *)j->body.data, j->body.size, &root, &e);
    buf_done(&j->body);
    if (code == ERR_OK)
        j->accepted = j->kind->run(j, root, &j->refusal);
    else
        gw_refusal_set(&j->refusal, code == ERR_NOMEM ? GW_ERROR_OVERLOADED : GW_ERROR_INVALID_JSON,
                       NULL, "%s", e.text);
    json_decref(root);
    if (j->body_bytes > TRIM_BYTES)
        malloc_trim(0);
}

/* The client may have gone, and the job with it been withdrawn before it ran. */
static void finish(struct gw_job *j)
{
    if (j->x && !j->accepted)
        gw_refusal_send(&j->refusal, j->x);
    else if (j->x && j->kind->finish)
        j->kind->finish(j);
    else if (j->x)
        gw_api_respond(j->x, 200, &j->out);
    job_free(j);
}

static void on_work(uv_work_t *work)
{
    run(work->data);
}

static void on_worked(uv_work_t *work, int status)
{
    (void)status; /* withdrawn only where the client is gone */
    finish(work->data);
}

static void on_cancel(void *user)
{
    struct gw_job *j = user;
    j->x = NULL;
    (void)uv_cancel((uv_req_t *)&j->work); /* where it runs already, it runs to its end */
}

void gw_job_start(struct gw_job *j)
{
    static const struct gw_exchange_events events = {.cancel = on_cancel};
    j->body = gw_exchange_take_body(j->x);
    j->body_bytes = j->body.size;
    if (j->body.size > GW_JOB_INLINE_BYTES) {
        j->work.data = j;
        gw_exchange_watch(j->x, &events, j);
        if (uv_queue_work(gw_loop_uv(j->service->loop), &j->work, on_work, on_worked) == 0)
            return;
    }
    run(j);
    finish(j);
}
