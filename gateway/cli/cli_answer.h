/* One streamed answer: the request as JSON, its events as text and figures. */
#ifndef ISLET_CLI_ANSWER_H
#define ISLET_CLI_ANSWER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#include "err.h"

struct cli_options;
struct cli_server;

/* A piece of the answer, valid UTF-8. */
typedef void cli_answer_text_fn(void *context, const char *text, size_t n, bool is_reasoning);

struct cli_answer {
    uint64_t prompt_tokens, tokens;
    uint64_t first_ns, total_ns; /* from the request on; first_ns 0: no text came */
    unsigned resumed;            /* workers lost on the way */
    char finish[16];             /* "stop", "length" or "" */
    char seed[24];
};

/* Gives a request body for messages (borrowed) or, if that is NULL, the raw prompt, with the
 * sampling options of o. NULL: no memory. */
json_t *cli_answer_body(const struct cli_options *o, json_t *messages, const char *prompt);

/* Asks and streams. stop_fd as in cli_http. On failure *ret holds what had come. */
enum err_code cli_answer_ask(const struct cli_server *server, json_t *body, int stop_fd,
                             cli_answer_text_fn *on_text, void *context, struct cli_answer *ret,
                             struct err *e) __attribute__((warn_unused_result));
/* One line: tokens, time from the request to its end, answer tokens per second of it, seed. */
void cli_answer_figures(const struct cli_answer *a, char *ret, size_t n);

#endif
