/* One generation: the checked request, its prompts as ids, and for each choice every token that
 * came so far. It knows nothing of HTTP or sockets; views (gw_answer) render it, as often as it is
 * asked for, and gw_dispatch has it worked on. Kept by counting: who holds a pointer has called
 * gw_request_keep. Thread: loop. */
#ifndef ISLET_GW_REQUEST_H
#define ISLET_GW_REQUEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "err.h"
#include "gw_admit.h"
#include "gw_chat_request.h"
#include "gw_resume.h"
#include "list.h"
#include "proto_message.h"

struct gw_tokenizer;

enum {
    GW_REQUEST_MAX_CHOICES = GW_CHAT_REQUEST_MAX_PROMPTS * GW_CHAT_REQUEST_MAX_N,
    GW_REQUEST_ID_BYTES = 25 /* 24 letters and digits, NUL */
};

struct gw_request_prompt {
    uint32_t *ids;
    uint32_t n;
    bool bos_added; /* ids[0] is not part of the client's text */
};

enum gw_request_state {
    GW_REQUEST_IDLE,    /* nobody waits for it */
    GW_REQUEST_WAITING, /* for a place at the worker */
    GW_REQUEST_RUNNING,
    GW_REQUEST_DONE,
    GW_REQUEST_FAILED
};

/* Logprobs of one token: `logprob`, then n_top pairs; stride gw_request_lp_stride. */
struct gw_request_lp {
    float logprob;
    uint32_t n_top;
    struct proto_top top[];
};

struct gw_request;

struct gw_request_choice {
    struct gw_request *request;
    struct list link; /* of gw_dispatch while WAITING */
    uint32_t index, prompt;
    uint64_t seed;
    enum gw_request_state state;
    uint64_t run_id; /* while RUNNING */
    struct gw_resume resume;
    uint64_t not_before_ns; /* WAITING: the worker was busy, ask again then */
    uint64_t busy_since_ns; /* it has been busy since then; 0: it is not */
    struct gw_refusal failure;

    uint32_t *ids; /* [n_ids] the answer so far */
    uint32_t n_ids, capacity;
    uint8_t *lps;        /* [n_ids] records, where asked for */
    uint8_t *prompt_lps; /* [n_prompt_lps] records of the prompt's tokens */
    uint32_t n_prompt_lps;

    enum proto_finish finish;            /* DONE */
    bool stopped;                        /* DONE, by a stop string that the view found */
    struct proto_usage usage;            /* sums over all runs; prompt and generated are not used */
    bool cached_known;                   /* `usage.cached` is that of the first run */
    uint64_t sent_ns, first_ns, last_ns; /* first run sent; first and last token */
};

struct gw_request_listener {
    struct list link;
    /* New tokens, done, failed. May drop the listener, and with it the request. */
    void (*changed)(void *user, struct gw_request_choice *c);
    void *user;
};

struct gw_request {
    unsigned references;
    struct gw_chat_request ask;
    char id[GW_REQUEST_ID_BYTES];        /* of the answer, without "chatcmpl-" */
    char client_id[PROTO_MAX_TRACE + 1]; /* x-request-id */
    int64_t created_s;
    uint64_t arrived_ns, started_ns; /* started: the first choice was sent; 0: not yet */
    uint64_t seed;                   /* of choice 0 */
    uint32_t arithmetic;             /* of the worker that began it; 0: none yet */
    uint32_t end_ids[PROTO_MAX_END];
    uint8_t n_end;
    bool opens_thoughts, opens_bare; /* the prompt ends inside thoughts, with the marker itself */
    struct gw_request_prompt prompts[GW_CHAT_REQUEST_MAX_PROMPTS];
    unsigned n_prompts;
    struct gw_request_choice *choices; /* [n_choices], index = prompt * n + i */
    unsigned n_choices;
    size_t lp_stride;
    struct list listeners;
    struct gw_admit_ticket ticket;
};

/* Takes *ask (zeroed) and the prompts' ids. Gives a request with one reference; NULL: no memory,
 * nothing was taken. */
struct gw_request *gw_request_new(struct gw_chat_request *ask, struct gw_request_prompt *prompts,
                                  unsigned n_prompts, const struct gw_tokenizer *tokenizer);
struct gw_request *gw_request_keep(struct gw_request *q);
void gw_request_drop(struct gw_request *q); /* NULL is fine */

/* The run that continues a choice; `scratch` holds the ids and biases, and must live as long as
 * *ret. */
bool gw_request_run(const struct gw_request_choice *c, struct buf *scratch, struct proto_run *ret);

/* Keeps tokens of a frame; those that are known already are skipped. False: no memory, or a gap (a
 * fault of the worker). */
bool gw_request_on_tokens(struct gw_request_choice *c, const struct proto_tokens *m,
                          uint64_t now_ns);
void gw_request_on_progress(struct gw_request_choice *c, const struct proto_progress *m);
void gw_request_on_done(struct gw_request_choice *c, const struct proto_done *m);
/* Tells all listeners. The caller holds a reference. */
void gw_request_notify(struct gw_request_choice *c);

const struct gw_request_lp *gw_request_lp_at(const struct gw_request *q, const uint8_t *records,
                                             uint32_t i);
bool gw_request_is_end(const struct gw_request *q, uint32_t id);
/* All choices are DONE or FAILED. */
bool gw_request_over(const struct gw_request *q);
/* The first failed choice, or NULL. */
const struct gw_request_choice *gw_request_failed(const struct gw_request *q);
size_t gw_request_bytes(const struct gw_request *q); /* memory that it holds, about */

#endif
