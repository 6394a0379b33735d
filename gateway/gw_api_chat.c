#include "gw_api_chat.h"

#include <string.h>
#include <time.h>

#include "alloc.h"
#include "gw_api.h"
#include "gw_exchange.h"
#include "gw_intake.h"
#include "gw_json_out.h"
#include "gw_model.h"
#include "gw_service.h"
#include "gw_template.h"

enum {
    MAX_BODY = 1 << 30
};

/* Variables of the template: reasoning_effort is an offer, chat_template_kwargs win. Gives a new
 * object. */
static json_t *kwargs_make(const struct gw_chat_request *q, const struct gw_template_facts *facts)
{
    json_t *kwargs = json_object();
    bool off = q->reasoning_effort == GW_CHAT_REQUEST_EFFORT_NONE && facts->thinking_switch;
    int bad = 0;
    if (off)
        bad |= json_object_set_new(kwargs, "enable_thinking", json_false());
    else if (q->reasoning_effort != GW_CHAT_REQUEST_EFFORT_ABSENT)
        bad |= json_object_set_new(kwargs, "reasoning_effort",
                                   json_string(gw_chat_request_effort_name(q->reasoning_effort)));
    if (q->kwargs)
        bad |= json_object_update(kwargs, q->kwargs);
    if (bad == 0)
        return kwargs;
    json_decref(kwargs);
    return NULL;
}

/* Gives *ret, the rendered prompt. */
static bool prompt_render(const struct gw_service *s, const struct gw_chat_request *q, char **ret,
                          size_t *ret_n, struct gw_refusal *refusal)
{
    const struct gw_template *template = s->model->template;
    struct err e = {0};
    if (!template)
        return gw_refusal_set(refusal, GW_ERROR_UNSUPPORTED_CONTENT, "messages",
                              "%s; /v1/completions can be used", s->model->template_trouble);
    json_t *kwargs = kwargs_make(q, gw_template_get_facts(template));
    if (!kwargs)
        return gw_refusal_set(refusal, GW_ERROR_OVERLOADED, NULL, "no memory for the request");
    struct gw_template_input input = {
        .messages = q->messages,
        .kwargs = kwargs,
        .add_generation_prompt = q->add_generation_prompt,
        .continue_final_message = q->continue_final_message,
        .now_s = time(NULL),
    };
    enum err_code code = gw_template_render(template, &input, ret, ret_n, &e);
    json_decref(kwargs);
    if (code == ERR_OK)
        return true;
    if (code == ERR_NOMEM)
        return gw_refusal_set(refusal, GW_ERROR_OVERLOADED, NULL, "%s", e.text);
    return gw_refusal_set(refusal, GW_ERROR_UNSUPPORTED_CONTENT, "messages", "%s", e.text);
}

void gw_api_chat_post(struct gw_exchange *x, const struct gw_http_request *r, void *context)
{
    struct gw_service *s = context;
    struct gw_chat_request q;
    struct gw_refusal refusal;
    char *prompt = NULL;
    size_t n = 0;
    if (!gw_api_ask(s, x, r, GW_CHAT_REQUEST_CHAT, &q))
        return;
    if (!prompt_render(s, &q, &prompt, &n, &refusal)) {
        gw_chat_request_done(&q);
        gw_refusal_send(&refusal, x);
        return;
    }
    json_decref(q.messages); /* the prompt is all that is needed from here on */
    q.messages = NULL;
    gw_intake_start(s, x, &q, prompt, n);
}

void gw_api_chat_template(struct gw_exchange *x, const struct gw_http_request *r, void *context)
{
    struct gw_service *s = context;
    struct gw_chat_request q;
    struct gw_refusal refusal;
    struct buf out = BUF_INIT(MAX_BODY);
    char *prompt = NULL;
    size_t n = 0;
    if (!gw_api_ask(s, x, r, GW_CHAT_REQUEST_CHAT, &q))
        return;
    bool ok = prompt_render(s, &q, &prompt, &n, &refusal);
    gw_chat_request_done(&q);
    if (!ok) {
        gw_refusal_send(&refusal, x);
        return;
    }
    buf_text(&out, "{\"prompt\":");
    gw_json_out_string(&out, prompt, n);
    buf_byte(&out, '}');
    alloc_free(prompt);
    gw_api_respond(x, 200, &out);
}
