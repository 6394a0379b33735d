/* What the engine thread shows to other threads: facts for welcome and the snapshot for status,
 * both behind one lock. Changes of facts are told by mail. */
#ifndef ISLET_ENGINE_SHOWN_H
#define ISLET_ENGINE_SHOWN_H

#include <pthread.h>
#include <stdatomic.h>

#include "engine.h"
#include "engine_mail.h"
#include "engine_run.h"

struct engine_shown {
    pthread_mutex_t lock;
    struct engine_mail *mail; /* borrowed */
    _Atomic bool drain;       /* SERVING is DRAINING from now on */
    struct engine_facts facts;
    struct engine_snapshot snapshot;
};

void engine_shown_start(struct engine_shown *s, struct engine_mail *mail);
void engine_shown_done(struct engine_shown *s);

/* SERVING becomes DRAINING when that was asked for, however late. */
void engine_shown_set_state(struct engine_shown *s, enum proto_state state, const char *reason);
enum proto_state engine_shown_state(struct engine_shown *s);
void engine_shown_set_progress(struct engine_shown *s, unsigned percent);
/* Whether anything new should be admitted, to those who ask. */
void engine_shown_set_pause(struct engine_shown *s, bool pause, const char *reason);
/* Why answers are slower than they could be, or "". */
void engine_shown_set_degraded(struct engine_shown *s, const char *reason);
/* What of the file could not be read of late, or "". */
void engine_shown_set_unread(struct engine_shown *s, const char *reason);
void engine_shown_set_gpu_lost(struct engine_shown *s);
/* The run has a model, and it is on these devices. */
void engine_shown_set_model(struct engine_shown *s, const struct engine_run *run,
                            const struct engine_run_devices *devices);
void engine_shown_set_figures(struct engine_shown *s, const struct engine_run *run,
                              uint64_t now_ns);

void engine_shown_get_facts(struct engine_shown *s, struct engine_facts *ret);
void engine_shown_get_snapshot(struct engine_shown *s, struct engine_snapshot *ret);

#endif
