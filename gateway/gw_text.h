/* One choice as a client sees it: its tokens become text (thoughts split off, stop strings found)
 * and logprob entries, in order and each once. A function of the tokens alone, so a second reading
 * of the same generation gives the same text.
 * Thread: loop, except where said. */
#ifndef ISLET_GW_TEXT_H
#define ISLET_GW_TEXT_H

#include <stdbool.h>
#include <stdint.h>

#include "err.h"
#include "gw_openai.h"
#include "gw_request.h"
#include "gw_stop.h"

struct gw_template_facts;
struct gw_tokenizer;

struct gw_text {
    const struct gw_request_choice *choice; /* borrowed */
    const struct gw_tokenizer *tokenizer;   /* borrowed */
    struct gw_stop *stop;
    bool collects; /* logprobs or token ids are asked for */
    bool echoed, flushed, matched;
    uint32_t n_prompt_lps; /* of the choice, when the echo began */
    size_t match;          /* index of the stop string */

    uint32_t pushed, reported; /* tokens */
    struct buf ends;         /* uint64_t for each token of reported..pushed: bytes pushed with it */
    uint64_t bytes;          /* pushed in all */
    uint64_t reported_bytes; /* of the reported tokens */
    uint64_t points;         /* code points that began so far, echo included */
    struct buf starts;       /* uint64_t likewise: points in front of it */
    uint32_t reasoning;      /* tokens */

    /* Entries of the tokens reported so far; whoever sends them clears them. */
    struct buf logprobs; /* chat: objects, separated by commas */
    struct gw_openai_columns columns;
    struct buf ids; /* separated by commas */
    bool has_entries;
};

/* One piece of text on its way out. The entries of the tokens that belong to it are in the
 * gw_text. */
typedef void gw_text_emit(void *user, enum gw_stop_kind kind, const char *text, size_t n);

enum err_code gw_text_init(struct gw_text *t, const struct gw_request_choice *c,
                           const struct gw_tokenizer *tokenizer,
                           const struct gw_template_facts *facts, struct err *e)
    __attribute__((warn_unused_result));
void gw_text_done(struct gw_text *t);

/* The prompt in front of a completion is due: it is asked for, and the worker is past it. */
bool gw_text_echo_is_due(struct gw_text *t);
/* Does that step alone. Any thread: it reads what no longer changes; nobody else may use t. */
enum err_code gw_text_echo(struct gw_text *t, gw_text_emit *emit, void *user, struct err *e)
    __attribute__((warn_unused_result));
/* Goes one step further: the echo, the next token, or the end. *ret_more: call again. On the loop,
 * or where the choice is DONE on any thread. */
enum err_code gw_text_step(struct gw_text *t, gw_text_emit *emit, void *user, bool *ret_more,
                           struct err *e) __attribute__((warn_unused_result));
/* All text and entries of the whole choice are out. */
static inline bool gw_text_is_over(const struct gw_text *t)
{
    return t->flushed;
}
void gw_text_clear_entries(struct gw_text *t);

#endif
