/* What the engine thread owns once a model is loaded: the slots of running sequences, those that
 * wait, pages, and the step over them. Nothing is allocated after engine_run_start. */
#ifndef ISLET_ENGINE_RUN_H
#define ISLET_ENGINE_RUN_H

#include "engine_budget.h"
#include "engine_forward.h"
#include "engine_mail.h"
#include "engine_turns.h"
#include "kv_sequence.h"
#include "route_trace.h"
#include "sample.h"

enum {
    ENGINE_RUN_PROMPT_LOGITS = 32 /* rows of a step that may give logprobs of a prompt */
};

struct engine_slot {
    struct engine_job *job; /* NULL: free */
    struct kv_sequence kv;
    uint32_t *tokens; /* [n_ctx]: prompt and answer */
    uint32_t n_tokens;
    uint32_t n_given;                    /* of them came with the request */
    uint32_t prompt_told;                /* prompt tokens whose logprobs were sent */
    bool paged;                          /* false: waits for pages, at first or after pre-emption */
    uint64_t started_ns, first_token_ns; /* 0: not yet */
    uint64_t served;                     /* number of the last step with rows of it; 0: none */
    struct proto_usage usage;
    /* of the running step */
    uint32_t rows, first_row, first_logit, n_logits, logit_position;
    bool picked; /* the device draws its token */
};

/* What computes; gpu and gpu_stream: NULL: the CPU alone. Borrowed. */
struct engine_run_devices {
    struct k_device *cpu, *gpu;
    struct k_stream *cpu_stream, *gpu_stream;
};

struct engine_run {
    const struct engine_config *config;
    struct engine_mail *mail;
    const struct k_ops *ops; /* of the device that computes all but some experts, as stream */
    struct k_stream *stream;
    struct model *model;
    struct engine_experts *experts;
    bool gpu;        /* a GPU computes: islands and hybrid are there */
    bool gpu_failed; /* it failed in a step, of which nothing may be used */
    struct engine_islands islands;
    struct engine_hybrid hybrid;
    struct engine_forward *forward;
    struct k_buffer *pool;
    struct kv_page pages;
    struct kv_prefix prefix;
    struct sample sample;
    uint32_t n_ctx, max_pages, n_slots;
    struct engine_slot slots[ENGINE_MAX_SEQUENCES];
    uint32_t *slot_arrays; /* tokens and pages of all slots */
    struct list waiting;   /* struct engine_job.waiting */
    uint64_t row_ns;       /* measured; 0: unknown */
    uint32_t batch_limit;  /* sequences of a step; 0: none */
    uint64_t host_ns;      /* of steps with a GPU, but for waiting and for experts */
    struct engine_budget budget;
    struct engine_budget_vram vram; /* of a GPU */
    struct engine_turns turns;
    struct engine_ahead ahead;
    struct route_trace *trace; /* NULL: none */
    struct proto_status count; /* counters and gauges as the snapshot shows them */
    struct proto_status past;  /* its counters when a model was given up last */
};

/* Divides the budgets, sizes pool and context, makes all buffers. The model's weights are loaded
 * later. `run` has config, mail and waiting set. Sequences that engine_run_leave kept go on, but for
 * those that the context no longer holds: they fail. */
enum err_code engine_run_start(struct engine_run *run, const struct engine_run_devices *devices,
                               struct model *model, struct err *e)
    __attribute__((warn_unused_result));
/* Gives up all that lies on devices and everything of the model. The sequences wait, to be computed
 * again from their tokens after the next start. */
void engine_run_leave(struct engine_run *run);
/* As leave, and the sequences are gone too: none has a request. */
void engine_run_done(struct engine_run *run);
/* While there is nothing to compute: fills memory. False: there is nothing to do. */
bool engine_run_idle(struct engine_run *run);

/* Does nothing run or wait? */
bool engine_run_is_idle(const struct engine_run *run);
/* Those that came while the model loaded were not checked against it; those that came before a GPU
 * failed were against the context that it had room for. Ends those that do not fit. */
void engine_run_check_waiting(struct engine_run *run);
/* Ends what was cancelled. */
void engine_run_sweep(struct engine_run *run);
/* Computes one step; the mail has room for engine_run_events. False: there is nothing to do. */
bool engine_run_step(struct engine_run *run);
/* Ends all that wait or run with the error. */
void engine_run_fail_all(struct engine_run *run, const struct err *cause);
/* Events of the pool that a step may need. */
size_t engine_run_events(const struct engine_config *config);

/* Ends a job that has no slot, or a slot. */
void engine_run_finish(struct engine_run *run, struct engine_slot *slot, enum proto_finish finish);
void engine_run_fail(struct engine_run *run, struct engine_slot *slot, const struct err *cause);
void engine_run_fail_job(struct engine_run *run, struct engine_job *job, const struct err *cause);

#endif
