#include "gw_prompt.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#include "alloc.h"
#include "gw_model.h"
#include "gw_template.h"
#include "gw_tokenizer.h"

void gw_prompt_done(struct gw_prompt *p)
{
    alloc_free(p->aliases);
    gw_chat_request_done(&p->ask);
    alloc_free(p->chat);
    for (unsigned i = 0; i < p->n_prompts; i++)
        alloc_free(p->prompts[i].ids);
    *p = (struct gw_prompt){0};
}

/* ---- fields ---- */

static bool model_check(const struct gw_prompt *p, struct gw_refusal *refusal)
{
    char names[256];
    const char *name = p->ask.model;
    if (!name || gw_model_named(p->model, p->aliases, name, strlen(name)))
        return true;
    gw_model_served(p->model, p->aliases, names, sizeof names);
    return gw_refusal_set(refusal, GW_ERROR_MODEL_NOT_FOUND, "model",
                          "the model \"%.100s\" is not served here; served: %s", name, names);
}

/* ---- the chat ---- */

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

static void thoughts_find(struct gw_prompt *p)
{
    const struct gw_template *template = p->model->template;
    const char *marker = gw_template_get_facts(template)->think_open;
    size_t n = marker ? strlen(marker) : 0;
    if (!marker)
        return;
    p->opens_thoughts = gw_template_prompt_opens(template, p->chat, p->n_chat);
    p->opens_bare =
        p->opens_thoughts && p->n_chat >= n && memcmp(p->chat + p->n_chat - n, marker, n) == 0;
}

static bool chat_render(struct gw_prompt *p, struct gw_refusal *refusal)
{
    const struct gw_template *template = p->model->template;
    struct err e = {0};
    if (!template)
        return gw_refusal_set(refusal, GW_ERROR_UNSUPPORTED_CONTENT, "messages",
                              "%s; /v1/completions can be used", p->model->template_trouble);
    json_t *kwargs = kwargs_make(&p->ask, gw_template_get_facts(template));
    if (!kwargs)
        return gw_refusal_set(refusal, GW_ERROR_OVERLOADED, NULL, "no memory for the request");
    struct gw_template_input input = {
        .messages = p->ask.messages,
        .kwargs = kwargs,
        .add_generation_prompt = p->ask.add_generation_prompt,
        .continue_final_message = p->ask.continue_final_message,
        .now_s = time(NULL),
    };
    enum err_code code = gw_template_render(template, &input, &p->chat, &p->n_chat, &e);
    json_decref(kwargs);
    if (code == ERR_NOMEM)
        return gw_refusal_set(refusal, GW_ERROR_OVERLOADED, NULL, "%s", e.text);
    if (code != ERR_OK)
        return gw_refusal_set(refusal, GW_ERROR_UNSUPPORTED_CONTENT, "messages", "%s", e.text);
    thoughts_find(p);
    json_decref(p->ask.messages);
    p->ask.messages = NULL;
    return true;
}

bool gw_prompt_read(struct gw_prompt *p, const json_t *body, struct gw_refusal *refusal)
{
    struct gw_chat_request ask;
    if (!gw_chat_request_parse(body, p->kind, &p->limits, &ask, refusal))
        return false;
    p->ask = ask;
    return model_check(p, refusal) && (p->kind != GW_CHAT_REQUEST_CHAT || chat_render(p, refusal));
}

/* ---- ids ---- */

static bool text_encode(struct gw_prompt *p, const char *text, size_t n,
                        struct gw_request_prompt *to, struct gw_refusal *refusal)
{
    const struct gw_tokenizer *tokenizer = p->model->tokenizer;
    struct gw_tokenizer_ids ids = {0};
    struct err e = {0};
    uint32_t bos;
    bool add_bos = !p->chat && gw_tokenizer_adds_bos(tokenizer);
    enum err_code code = gw_tokenizer_encode(tokenizer, text, n, true, add_bos, &ids, &e);
    if (code != ERR_OK) {
        gw_tokenizer_ids_done(&ids);
        return gw_refusal_set(refusal, gw_error_of_err(code), NULL, "%s", e.text);
    }
    if (ids.n > UINT32_MAX) {
        gw_tokenizer_ids_done(&ids);
        return gw_refusal_set(refusal, GW_ERROR_INVALID_VALUE, "prompt", "too many tokens");
    }
    *to = (struct gw_request_prompt){
        .ids = ids.ids,
        .n = (uint32_t)ids.n,
        .bos_added = add_bos && ids.n > 0 && gw_tokenizer_bos(tokenizer, &bos),
    };
    return true;
}

/* An empty prompt begins with the token that begins texts. */
static bool never_empty(const struct gw_prompt *p, struct gw_request_prompt *to,
                        struct gw_refusal *refusal)
{
    uint32_t bos;
    if (to->n > 0)
        return true;
    if (!gw_tokenizer_bos(p->model->tokenizer, &bos))
        return gw_refusal_set(refusal, GW_ERROR_INVALID_VALUE, "prompt",
                              "the prompt is empty; at least one token is needed");
    alloc_free(to->ids);
    to->ids = alloc_zero(ALLOC_REQUEST, 1, sizeof *to->ids);
    if (!to->ids)
        return gw_refusal_set(refusal, GW_ERROR_OVERLOADED, NULL, "no memory for the prompt");
    to->ids[0] = bos;
    to->n = 1;
    to->bos_added = true;
    return true;
}

bool gw_prompt_encode(struct gw_prompt *p, struct gw_refusal *refusal)
{
    unsigned n = p->chat ? 1 : p->ask.n_prompts;
    for (unsigned i = 0; i < n; i++) {
        struct gw_chat_request_prompt *from = &p->ask.prompts[i];
        struct gw_request_prompt *to = &p->prompts[p->n_prompts++];
        const char *text = p->chat ? p->chat : from->text;
        if (text) {
            if (!text_encode(p, text, p->chat ? p->n_chat : from->n_text, to, refusal))
                return false;
        } else {
            *to = (struct gw_request_prompt){.ids = from->ids, .n = from->n_ids};
            from->ids = NULL;
        }
        if (!never_empty(p, to, refusal))
            return false;
    }
    return true;
}
