#include "gw_api_chat.h"

#include "alloc.h"
#include "gw_exchange.h"
#include "gw_intake.h"
#include "gw_job.h"
#include "gw_json_out.h"
#include "gw_prompt.h"

void gw_api_chat_post(struct gw_exchange *x, const struct gw_http_request *r, void *context)
{
    (void)r;
    gw_intake_start(context, x, GW_CHAT_REQUEST_CHAT);
}

/* ---- /apply-template ---- */

struct job {
    struct gw_job job;
    struct gw_prompt prompt;
};

static bool job_run(struct gw_job *j, const json_t *body, struct gw_refusal *refusal)
{
    struct gw_prompt *p = &((struct job *)(void *)j)->prompt;
    if (!gw_prompt_read(p, body, refusal))
        return false;
    buf_text(&j->out, "{\"prompt\":");
    gw_json_out_string(&j->out, p->chat, p->n_chat);
    buf_byte(&j->out, '}');
    return true;
}

static void job_done(struct gw_job *j)
{
    gw_prompt_done(&((struct job *)(void *)j)->prompt);
}

void gw_api_chat_template(struct gw_exchange *x, const struct gw_http_request *r, void *context)
{
    static const struct gw_job_kind kind = {.run = job_run, .done = job_done};
    struct job *job = gw_job_new(sizeof *job, &kind, context, x);
    (void)r;
    if (!job)
        return;
    if (!gw_intake_prompt(context, GW_CHAT_REQUEST_CHAT, &job->prompt)) {
        alloc_free(job);
        gw_exchange_fail_text(x, GW_ERROR_OVERLOADED, NULL, "no memory for the request");
        return;
    }
    gw_job_start(&job->job);
}
