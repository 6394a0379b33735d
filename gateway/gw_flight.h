/* The runs that the worker has, and whether what it says of them follows the protocol: exactly one
 * end each, tokens in order and inside the vocabulary, and counts that agree. What does not follow
 * is the fault of the link or of the worker, never of the request. Pure. Thread: loop. */
#ifndef ISLET_GW_FLIGHT_H
#define ISLET_GW_FLIGHT_H

#include <stdbool.h>
#include <stdint.h>

#include "err.h"
#include "proto_message.h"

struct gw_request_choice;

enum {
    GW_FLIGHT_MOST = 256,
    GW_FLIGHT_MISSES = 3 /* so many status records in a row do not know it: it is lost */
};

struct gw_flight {
    uint64_t id;
    struct gw_request_choice *choice; /* NULL: cancelled, its place is free when it ends */
    uint32_t n_prompt, first_index;   /* of the run */
    uint32_t n_told;                  /* tokens that the worker has sent of it */
    uint32_t n_prompt_told;           /* prompt tokens, with their logprobs */
    uint32_t max_new, flags;          /* of the run */
    bool cancelled;                   /* the worker may leave out the rest */
    uint64_t sent_ns;
    uint64_t missed_us; /* of the worker's clock: the last record that did not know it */
    unsigned missed;    /* such records in a row */
};

struct gw_flights {
    struct gw_flight list[GW_FLIGHT_MOST];
    unsigned n;
    uint64_t last_id; /* ids are never used again */
    uint32_t n_vocab;
};

/* There is room: n < GW_FLIGHT_MOST. Lends the flight until the next begin or end. */
struct gw_flight *gw_flight_begin(struct gw_flights *fs, struct gw_request_choice *choice,
                                  const struct proto_run *run, uint64_t now_ns);
struct gw_flight *gw_flight_find(struct gw_flights *fs, uint64_t id); /* NULL: none */
void gw_flight_end(struct gw_flights *fs, struct gw_flight *f);

/* ERR_PROTOCOL, and *e says how the frame breaks the protocol; else *ret is lent as above, and
 * counts what was told. */
enum err_code gw_flight_tokens(struct gw_flights *fs, uint64_t id, const struct proto_tokens *m,
                               struct gw_flight **ret, struct err *e)
    __attribute__((warn_unused_result));
enum err_code gw_flight_progress(struct gw_flights *fs, uint64_t id, const struct proto_progress *m,
                                 struct gw_flight **ret, struct err *e)
    __attribute__((warn_unused_result));
enum err_code gw_flight_done(struct gw_flights *fs, uint64_t id, const struct proto_done *m,
                             struct gw_flight **ret, struct err *e)
    __attribute__((warn_unused_result));
enum err_code gw_flight_error(struct gw_flights *fs, uint64_t id, struct gw_flight **ret,
                              struct err *e) __attribute__((warn_unused_result));
/* A status record that lists every sequence of the worker, asked for at asked_ns of our clock; it
 * tells how things were at taken_us of the worker's. */
enum err_code gw_flight_status(struct gw_flights *fs, const struct proto_sequence *sequences,
                               unsigned n, uint64_t asked_ns, uint64_t taken_us, struct err *e)
    __attribute__((warn_unused_result));

#endif
