/* One client's view of one generation: renders it to the exchange, as JSON when it is whole or as a
 * stream of events while it grows, no faster than the client takes it; comments and white space
 * keep slow answers alive. Frees itself when the exchange ends; when the last view of a running
 * generation goes, the generation is cancelled. Thread: loop. */
#ifndef ISLET_GW_ANSWER_H
#define ISLET_GW_ANSWER_H

#include <stdint.h>
#include <uv.h>

#include "gw_exchange.h"
#include "gw_request.h"
#include "ticks.h"

struct gw_dispatch;
struct gw_model;

struct gw_answer_context { /* lives as long as the service */
    uv_loop_t *loop;
    struct ticks ticks;
    const struct gw_model *model;
    struct gw_dispatch *dispatch;
    int64_t json_pad_after_ms, sse_ping_interval_ms; /* SETTING_TIME_OFF: never */
};

/* Takes the exchange, which it will end. Keeps the request by a reference of its own. The head of a
 * stream goes out now; a request that has failed already is answered with its status. */
void gw_answer_start(const struct gw_answer_context *context, struct gw_request *q,
                     struct gw_exchange *x);

#endif
