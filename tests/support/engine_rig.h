/* An engine with a loop thread's manners, for tests: submits runs, collects what comes back. */
#ifndef ISLET_ENGINE_RIG_H
#define ISLET_ENGINE_RIG_H

#include <semaphore.h>

#include "engine.h"

enum {
    ENGINE_RIG_MAX = 64
};

struct engine_rig_answer {
    bool ended, failed;
    struct proto_token *prompt, *tokens; /* as they came; each event is checked to follow on */
    uint32_t n_prompt, n_tokens, n_progress;
    struct proto_progress progress; /* the last one */
    struct proto_done done;
    struct err error;
};

struct engine_rig {
    struct engine_config config;
    struct engine *engine;
    sem_t events;
    uint32_t n;
    struct engine_rig_answer answers[ENGINE_RIG_MAX]; /* by handle - 1 */
};

/* A configuration for small tests of the model at `path`. */
struct engine_config engine_rig_config(const char *path);
/* Greedy, everything else neutral, up to 32 tokens. Lends tokens. */
struct proto_run engine_rig_run(const uint32_t *tokens, uint32_t n);
/* Ends the program with a message when the engine cannot start. */
void engine_rig_start(struct engine_rig *rig, const struct engine_config *config);
void engine_rig_stop(struct engine_rig *rig);
/* Waits until the state is neither loading. */
enum proto_state engine_rig_wait_loaded(struct engine_rig *rig);
/* Returns the answer's index. A refused request is an answer that failed. */
uint32_t engine_rig_submit(struct engine_rig *rig, const struct proto_run *run);
void engine_rig_cancel(struct engine_rig *rig, uint32_t index);
/* Takes what waits; blocks for one event at least, 60 s at most. */
void engine_rig_pump(struct engine_rig *rig);
/* Pumps until every answer has ended. */
void engine_rig_finish(struct engine_rig *rig);
/* Forgets all answers, which have ended. */
void engine_rig_forget(struct engine_rig *rig);

#endif
