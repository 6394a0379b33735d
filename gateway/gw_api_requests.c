#include "gw_api_requests.h"

#include "gw_answer.h"
#include "gw_api.h"
#include "gw_dispatch.h"
#include "gw_exchange.h"
#include "gw_recent.h"
#include "gw_request.h"
#include "gw_service.h"

void gw_api_requests_get(struct gw_exchange *x, const struct gw_http_request *r, void *context)
{
    struct gw_service *s = context;
    struct gw_refusal refusal;
    if (!gw_api_ready(s, x))
        return;
    struct gw_request *q =
        gw_recent_find(&s->recent, r->capture, gw_recent_key(r->key), ticks_ns(s->ticks));
    if (!q) {
        gw_exchange_fail_text(x, GW_ERROR_NOT_FOUND, NULL,
                              "no recent request has this id (the last %d are kept for %d minutes, "
                              "for the key that asked)",
                              GW_RECENT_MAX, GW_RECENT_KEEP_S / 60);
        return;
    }
    gw_request_keep(q);
    if (gw_dispatch_again(s->dispatch, q, &refusal))
        gw_answer_start(&s->answers, q, x);
    else
        gw_refusal_send(&refusal, x);
    gw_request_drop(q);
}
