#include "gw_api_completions.h"

#include "gw_api.h"
#include "gw_intake.h"

void gw_api_completions_post(struct gw_exchange *x, const struct gw_http_request *r, void *context)
{
    struct gw_chat_request q;
    if (gw_api_ask(context, x, r, GW_CHAT_REQUEST_COMPLETION, &q))
        gw_intake_start(context, x, &q, NULL, 0);
}
