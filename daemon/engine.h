/* The engine thread and its two bounded queues. It alone touches model state: weights, KV pages,
 * sequences, the compute device. The loop thread submits requests and cancels, and takes events;
 * nothing else is shared.
 *
 * Thread: all functions here are the loop thread's, unless said otherwise. */
#ifndef ISLET_ENGINE_H
#define ISLET_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "err.h"
#include "proto_message.h"
#include "ticks.h"

struct engine;

enum engine_gpu {
    ENGINE_GPU_AUTO,
    ENGINE_GPU_OFF,
    ENGINE_GPU_ON
}; /* order of compute.gpu */

struct governor_source;
struct k_device;
typedef enum err_code engine_open_gpu_fn(void *context, struct k_device **ret, struct err *e);

struct engine_config {
    const char *model_path;       /* borrowed for the engine's life */
    unsigned cpu_level;           /* enum k_level */
    uint32_t threads;             /* 0: one per physical core */
    uint64_t ram_budget;          /* bytes; 0: auto */
    unsigned gpu;                 /* enum engine_gpu */
    engine_open_gpu_fn *open_gpu; /* engine thread; NULL: there is none */
    void *open_gpu_context;
    uint32_t gpu_rest_ms;   /* it was lost again and again: not used at first, for so long; or 0 */
    uint32_t gpu_retry_ms;  /* a GPU that is not used is looked for again after; 0: a minute */
    uint64_t vram_budget;   /* bytes; 0: auto */
    unsigned placement;     /* enum engine_placement: what a bench compares */
    uint64_t kv_budget;     /* bytes; 0: auto */
    unsigned ssd_io;        /* enum tier_ssd_io */
    uint32_t ssd_depth;     /* reads in flight */
    const char *trace_path; /* where routes are written; NULL or empty: nowhere. Borrowed */
    unsigned kv_type;       /* enum k_kv_type */
    uint32_t context;       /* 0: what the model and kv_budget allow */
    uint32_t max_sequences; /* 1..32 */
    uint32_t prefill_chunk; /* 1..4096 */
    uint32_t max_waiting;   /* requests accepted but not yet running; more are refused BUSY */
    struct ticks ticks;
    void (*notify)(
        void *
            context); /* called on the engine thread when events or commands wait; must only wake the loop */
    void *notify_context;
    const struct governor_source *sensors;     /* of the GPU; NULL: none. Borrowed */
    uint32_t governor_period_ms;               /* of readings; 0: a second */
    uint32_t governor_warn, governor_critical; /* percent of the GPU's memory; 0: never */
    uint32_t governor_temp_high, governor_temp_low;
    const char *trouble; /* nothing is loaded: FAILED for this reason; NULL: none. Borrowed */
};

/* A request as the loop hands it over: one heap block (engine_request_new) that owns copies of the
 * run's arrays. */
struct engine_request {
    uint64_t handle;      /* unique for the process' life; the loop's name for (peer, request id) */
    struct proto_run run; /* pointers into this block */
    char client[64];      /* name from hello, NUL-terminated */
};
struct engine_request *engine_request_new(uint64_t handle, const struct proto_run *run,
                                          const char *client);
void engine_request_free(struct engine_request *r);

enum engine_event_kind {
    ENGINE_STATE,    /* state, progress or reason changed: ask engine_facts */
    ENGINE_PROGRESS, /* prompt tokens prefilled */
    ENGINE_TOKENS,
    ENGINE_DONE,  /* last event of a handle */
    ENGINE_ERROR, /* last event of a handle */
};

enum {
    ENGINE_EVENT_TOKENS = 8
};

struct engine_event {
    enum engine_event_kind kind;
    uint64_t handle;
    union {
        struct proto_progress progress;
        struct {
            uint32_t first_index; /* as struct proto_tokens */
            uint16_t n;
            struct proto_token tokens[ENGINE_EVENT_TOKENS];
        } tokens;
        struct proto_done done;
        struct err error;
    };
};

/* What welcome says. Filled under a lock; text fields are copies. */
struct engine_facts {
    enum proto_state state;
    uint8_t progress; /* percent loaded */
    char reason[240]; /* why failed */
    bool gpu_lost;    /* this process can never use its GPU again: it should end */
    bool paused;      /* nothing new should be admitted, memory of the GPU runs out */
    char pause_reason[240];
    char model[128];
    uint8_t file_digest[16], shape_digest[16];
    uint32_t n_ctx, n_vocab, max_sequences, prefill_chunk, n_layer, n_expert, n_expert_used;
};

enum {
    ENGINE_MAX_SEQUENCES = 32,
    ENGINE_MAX_LISTED = 64
};
struct engine_snapshot {
    uint64_t taken_ns;          /* by config.ticks */
    struct proto_status status; /* sequences points to the array below; client texts to names */
    struct proto_sequence sequences[ENGINE_MAX_LISTED]; /* request_id holds the handle */
    char clients[ENGINE_MAX_LISTED][64];
    char backend[64], degraded[240];
    char unread[240]; /* what of the file could not be read in the last minute; or "" */
    char storage[PROTO_MAX_TEXT + 1];
};

/* Starts the thread, which loads the model at once (state LOADING, then SERVING or FAILED with the
 * reason; events tell). Gives *ret; end with engine_stop. ERR_NOMEM, ERR_IO (thread). */
enum err_code engine_start(const struct engine_config *config, struct engine **ret, struct err *e)
    __attribute__((warn_unused_result));
/* Cancels everything, joins the thread, frees. NULL is fine. */
void engine_stop(struct engine *g);
/* Tries to load again after FAILED (no effect in other states). */
void engine_load_again(struct engine *g);
/* No new requests from now on (state DRAINING). */
void engine_drain(struct engine *g);

/* Takes the request on success. Exactly one DONE or ERROR event follows for its handle. ERR_BUSY:
 * too many wait, or draining; ERR_ARGUMENT: ids outside the vocabulary, prompt as long as the
 * context, n_prompt 0, ...: the text names value and limit. While LOADING requests are accepted and
 * wait. */
enum err_code engine_submit(struct engine *g, struct engine_request *request, struct err *e)
    __attribute__((warn_unused_result));
/* Ends the handle with DONE/cancelled, at once when it waits, else after the running step. Unknown:
 * ignored. */
void engine_cancel(struct engine *g, uint64_t handle);

/* A command about an expert: engine_commands.h. Takes it on success; engine_next_command gives it
 * back with its answer, and the caller frees it. ERR_BUSY: too many wait, draining, or no model.
 * While LOADING commands are accepted and wait. */
struct engine_command;
enum err_code engine_submit_command(struct engine *g, struct engine_command *command, struct err *e)
    __attribute__((warn_unused_result));
void engine_cancel_command(struct engine *g, struct engine_command *command);
struct engine_command *engine_next_command(struct engine *g); /* NULL: none */

/* Next event, or NULL. Lent until engine_event_return. */
struct engine_event *engine_next_event(struct engine *g);
void engine_event_return(struct engine *g, struct engine_event *event);

void engine_get_facts(struct engine *g, struct engine_facts *ret);
/* The snapshot after the last step (copied under a lock; ret's inner pointers point into ret). */
void engine_get_snapshot(struct engine *g, struct engine_snapshot *ret);
/* Counts up with every layer of a step, with reads of experts that end, every piece of a load, and
 * once a second while idle: what the watchdog looks at. */
uint64_t engine_heartbeat(const struct engine *g);

#endif
