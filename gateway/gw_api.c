#include "gw_api.h"

#include "gw_api_chat.h"
#include "gw_api_completions.h"
#include "gw_api_health.h"
#include "gw_api_models.h"
#include "gw_api_requests.h"
#include "gw_api_tokenize.h"
#include "gw_exchange.h"
#include "gw_service.h"

enum {
    GET = GW_ROUTE_GET,
    POST = GW_ROUTE_POST
};

static void root(struct gw_exchange *x, const struct gw_http_request *r, void *context)
{
    static const char text[] = "islet " ISLET_VERSION;
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

void gw_api_respond(struct gw_exchange *x, unsigned status, struct buf *out)
{
    struct gw_exchange_head head = {.status = status};
    if (buf_failed(out))
        gw_exchange_fail_text(x, GW_ERROR_OVERLOADED, NULL, "no memory for the answer");
    else
        gw_exchange_respond_buf(x, &head, out);
    buf_done(out);
}
