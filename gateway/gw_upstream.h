/* The connection to the worker: connects, says hello, sends runs and cancels, hands frames on; when
 * the worker is lost it connects again, after 50 ms doubling to 2 s, for ever. Decides nothing
 * about requests. Thread: loop. */
#ifndef ISLET_GW_UPSTREAM_H
#define ISLET_GW_UPSTREAM_H

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "err.h"
#include "proto_message.h"
#include "ticks.h"

struct gw_upstream;

/* What welcome said last; texts are copies. Valid while connected is true, and as a memory of the
 * last worker else. */
struct gw_upstream_facts {
    bool connected; /* welcome came, and the connection lives */
    bool known;     /* some welcome came since the start */
    enum proto_state state;
    uint8_t progress;
    char reason[PROTO_MAX_TEXT + 1], build[PROTO_MAX_TEXT + 1];
    uint32_t arithmetic;
    uint8_t file_digest[16], shape_digest[16];
    uint64_t incarnation;
    uint32_t n_ctx, max_sequences, max_frame;
};

/* The last status record; `status` is complete but for sequences, which lie in `sequences`. */
enum {
    GW_UPSTREAM_MAX_LISTED = 64
};
struct gw_upstream_status {
    bool known, lists_all; /* lists_all: each sequence of the worker is among `sequences` */
    uint64_t asked_ns, received_ns; /* asked_ns 0: nobody asked */
    struct proto_status status;
    struct proto_sequence sequences[GW_UPSTREAM_MAX_LISTED];
    char clients[GW_UPSTREAM_MAX_LISTED][64];
    char backend[64], degraded[PROTO_MAX_TEXT + 1], storage[PROTO_MAX_TEXT + 1];
};

struct gw_upstream_events {
    void *context;
    void (*state)(void *context); /* facts changed, also by a lost connection */
    void (*lost)(void *context);  /* before `state`: nothing that was sent will be answered */
    /* An error of these, with its text in *e, says that the frame breaks the protocol: the link is
     * dropped, `lost` follows. */
    enum err_code (*tokens)(void *context, uint64_t id, const struct proto_tokens *m,
                            struct err *e);
    enum err_code (*progress)(void *context, uint64_t id, const struct proto_progress *m,
                              struct err *e);
    enum err_code (*done)(void *context, uint64_t id, const struct proto_done *m, struct err *e);
    enum err_code (*error)(void *context, uint64_t id, const struct proto_error *m, struct err *e);
    enum err_code (*status)(void *context, struct err *e); /* gw_upstream_get_status is fresh */
    void (*notice)(void *context, const struct proto_notice *m);
};

/* Starts connecting at the next turn of the loop. path is copied. Gives *ret; end with
 * gw_upstream_close. */
enum err_code gw_upstream_new(uv_loop_t *loop, const char *path, size_t max_frame,
                              struct ticks ticks, const struct gw_upstream_events *events,
                              struct gw_upstream **ret, struct err *e)
    __attribute__((warn_unused_result));
/* Closes its handles and frees itself when they are closed; no event comes any more. NULL is
 * fine. */
void gw_upstream_close(struct gw_upstream *u);

const struct gw_upstream_facts *gw_upstream_get_facts(const struct gw_upstream *u);
const struct gw_upstream_status *gw_upstream_get_status(const struct gw_upstream *u);

/* False: not connected, or no memory for the frame (the connection is then closed as lost). */
bool gw_upstream_send_run(struct gw_upstream *u, uint64_t id, const struct proto_run *run);
void gw_upstream_send_cancel(struct gw_upstream *u, uint64_t id);
/* Asks for the status record, unless an answer is already due. False: not connected. */
bool gw_upstream_ask_status(struct gw_upstream *u);
/* The worker is no good: closes and connects anew. */
void gw_upstream_drop(struct gw_upstream *u, const char *why);
/* When the last byte came from the worker. */
uint64_t gw_upstream_heard_ns(const struct gw_upstream *u);
/* When the status record was asked for that has not come yet; 0: none is due. */
uint64_t gw_upstream_status_due_ns(const struct gw_upstream *u);

#endif
