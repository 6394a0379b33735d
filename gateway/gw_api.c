#include "gw_api.h"

#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "gw_api_chat.h"
#include "gw_api_completions.h"
#include "gw_api_health.h"
#include "gw_api_models.h"
#include "gw_api_requests.h"
#include "gw_api_tokenize.h"
#include "gw_dispatch.h"
#include "gw_exchange.h"
#include "gw_json_in.h"
#include "gw_model.h"
#include "gw_service.h"
#include "gw_tokenizer.h"

enum {
    GET = GW_ROUTE_GET,
    POST = GW_ROUTE_POST
};

static void root(struct gw_exchange *x, const struct gw_http_request *r, void *context)
{
    static const char text[] = "islet " ISLET_VERSION "\n";
    static const struct gw_exchange_head head = {.content_type = "text/plain"};
    (void)r;
    (void)context;
    gw_exchange_respond(x, &head, text, sizeof text - 1);
}

static const struct gw_route rows[] = {
    {"/v1/chat/completions", POST, true, gw_api_chat_post},
    {"/chat/completions", POST, true, gw_api_chat_post},
    {"/v1/completions", POST, true, gw_api_completions_post},
    {"/v1/models", GET, true, gw_api_models_list},
    {"/models", GET, true, gw_api_models_list},
    {"/v1/models/{id}", GET, true, gw_api_models_one},
    {"/v1/requests/{id}", GET, true, gw_api_requests_get},
    {"/tokenize", POST, true, gw_api_tokenize_post},
    {"/detokenize", POST, true, gw_api_tokenize_back},
    {"/apply-template", POST, true, gw_api_chat_template},
    {"/livez", GET, false, gw_api_health_livez},
    {"/readyz", GET, false, gw_api_health_readyz},
    {"/health", GET, false, gw_api_health_readyz},
    {"/v1/health", GET, false, gw_api_health_readyz},
    {"/metrics", GET, true, gw_api_health_metrics},
    {"/status", GET, true, gw_api_health_status},
    {"/", GET, false, root},
};

struct gw_routes gw_api_routes(struct gw_service *service)
{
    return (struct gw_routes){rows, sizeof rows / sizeof *rows, service};
}

bool gw_api_ready(struct gw_service *s, struct gw_exchange *x)
{
    if (s->dispatch)
        return true;
    struct gw_error error = {
        .code = s->draining ? GW_ERROR_OVERLOADED : GW_ERROR_CONFIGURATION,
        .message = s->draining ? "the server is stopping" : s->trouble,
        .retry_after_s = 30,
    };
    gw_exchange_fail(x, &error);
    return false;
}

json_t *gw_api_body(struct gw_exchange *x, const struct gw_http_request *r)
{
    json_t *root_value = NULL;
    struct err e = {0};
    if (gw_json_in_parse(r->body, r->body_bytes, &root_value, &e) == ERR_OK)
        return root_value;
    gw_exchange_fail_text(x, e.code == ERR_NOMEM ? GW_ERROR_OVERLOADED : GW_ERROR_INVALID_JSON,
                          NULL, "%s", e.text);
    return NULL;
}

static bool model_check(struct gw_service *s, const char *name, struct gw_refusal *refusal)
{
    char names[256];
    const char *aliases = gw_service_aliases(s);
    if (!name || gw_model_named(s->model, aliases, name, strlen(name)))
        return true;
    snprintf(names, sizeof names, "%s", s->model->id);
    for (size_t i = 0;; i++) {
        struct gw_model_alias alias = gw_model_alias_at(aliases, i);
        size_t used = strlen(names);
        if (alias.n == 0)
            break;
        snprintf(names + used, sizeof names - used, ", %.*s", (int)alias.n, alias.text);
    }
    return gw_refusal_set(refusal, GW_ERROR_MODEL_NOT_FOUND, "model",
                          "the model \"%.100s\" is not served here; served: %s", name, names);
}

/* A good x-islet-session wins over the body's session key. */
static bool session_set(const struct gw_http_request *r, struct gw_chat_request *q)
{
    static const char allowed[] =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._:-";
    struct gw_http_text session = gw_http_field(r, "x-islet-session");
    if (session.n < 1 || session.n > 128)
        return true;
    for (size_t i = 0; i < session.n; i++)
        if (session.p[i] == '\0' || !strchr(allowed, session.p[i]))
            return true;
    alloc_free(q->session);
    q->session = alloc_text(ALLOC_REQUEST, session.p, session.n);
    return q->session != NULL;
}

bool gw_api_ask(struct gw_service *s, struct gw_exchange *x, const struct gw_http_request *r,
                enum gw_chat_request_kind kind, struct gw_chat_request *ret)
{
    struct gw_refusal refusal;
    if (!gw_api_ready(s, x))
        return false;
    struct gw_chat_request_limits limits = {
        .n_ctx = gw_dispatch_n_ctx(s->dispatch),
        .n_vocab = gw_tokenizer_n_vocab(s->model->tokenizer),
        .max_sequences = gw_dispatch_max_sequences(s->dispatch),
    };
    json_t *body = gw_api_body(x, r);
    if (!body)
        return false;
    bool ok = gw_chat_request_parse(body, kind, &limits, ret, &refusal);
    json_decref(body);
    if (ok && !model_check(s, ret->model, &refusal)) {
        gw_chat_request_done(ret);
        ok = false;
    }
    if (ok && !session_set(r, ret)) {
        gw_chat_request_done(ret);
        ok = gw_refusal_set(&refusal, GW_ERROR_OVERLOADED, NULL, "no memory for the request");
    }
    if (!ok)
        gw_refusal_send(&refusal, x);
    return ok;
}

void gw_api_respond(struct gw_exchange *x, unsigned status, struct buf *out)
{
    struct gw_exchange_head head = {.status = status};
    if (buf_failed(out))
        gw_exchange_fail_text(x, GW_ERROR_OVERLOADED, NULL, "no memory for the answer");
    else
        gw_exchange_respond(x, &head, out->data, out->size);
    buf_done(out);
}
