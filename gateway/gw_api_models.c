#include "gw_api_models.h"

#include "gw_api.h"
#include "gw_dispatch.h"
#include "gw_exchange.h"
#include "gw_json_out.h"
#include "gw_model.h"
#include "gw_service.h"

enum {
    MAX_BODY = 1 << 20
};

static void model_write(struct buf *out, const struct gw_service *s)
{
    const struct gw_model *m = s->model;
    uint32_t n_ctx = gw_dispatch_n_ctx(s->dispatch);
    const char *aliases = gw_service_aliases(s);
    buf_text(out, "{\"id\":");
    gw_json_out_text(out, m->id);
    buf_format(out,
               ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"islet\","
               "\"context_length\":%u,\"max_model_len\":%u,\"meta\":{\"n_ctx\":%u,"
               "\"n_ctx_train\":%u,\"n_vocab\":%u,\"n_embd\":%u,\"n_params\":%llu,\"size\":%llu,"
               "\"n_expert\":%u,\"n_expert_used\":%u},\"aliases\":[",
               (long long)m->created_s, n_ctx, n_ctx, n_ctx, m->shape.n_ctx_train, m->shape.n_vocab,
               m->shape.n_embd, (unsigned long long)m->shape.n_params,
               (unsigned long long)m->file_bytes, m->shape.n_expert, m->shape.n_expert_used);
    for (size_t i = 0;; i++) {
        struct gw_model_alias alias = gw_model_alias_at(aliases, i);
        if (alias.n == 0)
            break;
        if (i > 0)
            buf_byte(out, ',');
        gw_json_out_string(out, alias.text, alias.n);
    }
    buf_text(out, "]}");
}

void gw_api_models_list(struct gw_exchange *x, const struct gw_http_request *r, void *context)
{
    struct gw_service *s = context;
    struct buf out = BUF_INIT(MAX_BODY);
    (void)r;
    if (!gw_api_ready(s, x))
        return;
    buf_text(&out, "{\"object\":\"list\",\"data\":[");
    model_write(&out, s);
    buf_text(&out, "]}");
    gw_api_respond(x, 200, &out);
}

void gw_api_models_one(struct gw_exchange *x, const struct gw_http_request *r, void *context)
{
    struct gw_service *s = context;
    struct buf out = BUF_INIT(MAX_BODY);
    char names[256];
    if (!gw_api_ready(s, x))
        return;
    if (!gw_model_named(s->model, gw_service_aliases(s), r->capture.p, r->capture.n)) {
        gw_model_served(s->model, gw_service_aliases(s), names, sizeof names);
        gw_exchange_fail_text(x, GW_ERROR_MODEL_NOT_FOUND, "model",
                              "the model \"%.*s\" is not served here; served: %s",
                              (int)(r->capture.n < 100 ? r->capture.n : 100), r->capture.p, names);
        return;
    }
    model_write(&out, s);
    gw_api_respond(x, 200, &out);
}
