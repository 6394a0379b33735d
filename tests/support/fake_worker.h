/* A worker without a model: a thread that listens on a Unix socket, speaks the protocol and
 * answers each run_inference from a callback, so that a token depends on what the test says and on
 * nothing else. It can be slow, refuse, lie, lose its connections and die. For a fake in a process
 * of its own, start it there and wait. */
#ifndef ISLET_FAKE_WORKER_H
#define ISLET_FAKE_WORKER_H

#include "proto_message.h"

struct fake_worker;

struct fake_worker_options {
    const char *path;             /* socket; a file that is there is replaced */
    struct proto_welcome welcome; /* borrowed texts must live as long as the worker */
    /* Id of the answer's token at `index`. Worker's thread. NULL: fake_worker_echo. */
    uint32_t (*token)(void *context, const struct proto_run *run, uint32_t index);
    /* Sees each run that arrives, in order. Worker's thread. May be NULL. */
    void (*on_run)(void *context, uint64_t request_id, const struct proto_run *run);
    void *context;
    uint32_t per_frame;   /* tokens of one frame; 0: 1 */
    uint32_t interval_ms; /* between two frames of a run; 0: at once */
    uint64_t die_after;   /* sends so many tokens in all, then dies as by kill -9; 0: never */
    uint64_t lie_after;   /* sends so many tokens in all, then a malformed frame; 0: never */
    enum err_code refuse; /* each run ends with this error; ERR_OK: none does */
    /* Asked when a connection is accepted (frame 0, cmd 0) and before each frame goes out on it
     * (1, 2, ...); connections count from 1. True: what went before is sent, then the connection
     * closes; the listener lives. Worker's thread. NULL: never. */
    bool (*drop)(void *context, uint64_t connection, uint64_t frame, uint8_t cmd);
};

/* Serving, with sizes that fit small tests; digests are zero. */
struct fake_worker_options fake_worker_defaults(const char *path);
/* The default callback: the prompt's ids over and over. */
uint32_t fake_worker_echo(void *context, const struct proto_run *run, uint32_t index);

/* Listens before it returns. Ends the test program on failure. Free with fake_worker_stop. */
struct fake_worker *fake_worker_start(const struct fake_worker_options *options);
/* Closes everything, joins, removes the socket file. NULL is fine. */
void fake_worker_stop(struct fake_worker *w);

/* All from the test's thread, at any time: */
void fake_worker_die(
    struct fake_worker *w); /* as kill -9: connections and listener close, the file stays */
void fake_worker_hold(struct fake_worker *w, bool held); /* while held, no run begins or goes on */
void fake_worker_set_state(struct fake_worker *w, enum proto_state state,
                           const char *reason); /* sends welcome */
void fake_worker_send_raw(struct fake_worker *w, const void *bytes,
                          size_t n); /* to every connection */

struct fake_worker_counts {
    uint64_t connections; /* accepted in all */
    uint64_t connected;   /* open now */
    uint64_t runs, cancels, tokens, done;
    uint64_t open_runs;
    bool dead;
};
struct fake_worker_counts fake_worker_counts(struct fake_worker *w);
/* Waits until ready(counts) or the limit; false: it never was. */
bool fake_worker_wait(struct fake_worker *w, bool (*ready)(const struct fake_worker_counts *c),
                      int limit_ms);

#endif
