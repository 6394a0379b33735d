#include "gw_api_completions.h"

#include "gw_intake.h"

void gw_api_completions_post(struct gw_exchange *x, const struct gw_http_request *r, void *context)
{
    (void)r;
    gw_intake_start(context, x, GW_CHAT_REQUEST_COMPLETION);
}
