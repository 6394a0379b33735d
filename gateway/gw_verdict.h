/* What the head of a request leads to, before its body is read: a handler, an answer to OPTIONS, or
 * a refusal. Decisions in the order of the contract; the first failure wins. No I/O. */
#ifndef ISLET_GW_VERDICT_H
#define ISLET_GW_VERDICT_H

#include <stdbool.h>

#include "gw_auth.h"
#include "gw_error.h"
#include "gw_route.h"

struct gw_conn_shared;

/* Must stay where it is: refusal.message may point into text. */
struct gw_verdict {
    const struct gw_route *route; /* of the path; NULL: not looked for, or not found */
    bool refused;                 /* no handler gets it: options, or refusal says why */
    bool options, preflight; /* an answer to OPTIONS; to a browser's question before a request */
    struct gw_error refusal;
    const char *allow; /* the answer's Allow, or NULL */
    char text[192];    /* of the refusal, where it names the path */
};

/* Fills *v, and in r the key that was shown and what {id} of the path stands for. */
void gw_verdict_decide(struct gw_verdict *v, const struct gw_conn_shared *shared,
                       const struct gw_auth_listener *listener, struct gw_http_request *r);

#endif
