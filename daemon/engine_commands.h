/* Commands about single experts, load_expert and unload_expert: from the loop thread to the engine
 * thread, which carries them out between steps, and back with their answers. A few reads and copies
 * are under way at a time, as for an expert that is read ahead of its need; the others wait in
 * order. Commands for the same expert are carried out in the order in which they came. */
#ifndef ISLET_ENGINE_COMMANDS_H
#define ISLET_ENGINE_COMMANDS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "err.h"
#include "list.h"
#include "proto_message.h"
#include "queue.h"

enum {
    ENGINE_COMMANDS_MAX = 4096,   /* accepted and not yet taken back */
    ENGINE_COMMANDS_UNDER_WAY = 4 /* that wait for a read or a copy */
};

struct engine_experts;
struct engine_islands;

/* One heap block (ALLOC_REQUEST), made and freed by the loop thread. */
struct engine_command {
    uint32_t slot; /* the loop's: of the connection that it came by */
    bool unload;
    struct proto_load_expert expert; /* of an unload: any type, any size */
    /* The answer, once it came back. */
    struct err error; /* .code ERR_OK: it was carried out */
    uint8_t tier;     /* enum proto_tier where the expert lies now */

    struct list link;       /* engine thread: waiting, or done */
    bool begun;             /* engine thread: a read was begun for it */
    _Atomic bool cancelled; /* loop to engine */
};

struct engine_commands {
    struct queue *submitted, *ended; /* struct engine_command: loop to engine, engine to loop */
    void (*notify)(void *context);   /* wakes the loop */
    void *notify_context;
    _Atomic bool any_cancelled;
    uint32_t n_open; /* loop thread: accepted and not yet taken back */

    /* engine thread */
    struct list waiting, done; /* done: until the flush, so that the snapshot shows it */
    struct engine_command *active[ENGINE_COMMANDS_UNDER_WAY]; /* in the order in which they came */
    uint32_t n_active;
};

/* Where experts may be. */
struct engine_commands_tiers {
    struct engine_experts *experts;
    struct engine_islands *islands; /* NULL: no GPU */
};

/* ERR_NOMEM. */
enum err_code engine_commands_start(struct engine_commands *c, void (*notify)(void *context),
                                    void *notify_context, struct err *e)
    __attribute__((warn_unused_result));
/* Both threads have come together again: frees what was not taken back. A cleared one is fine. */
void engine_commands_done(struct engine_commands *c);

/* Loop thread. Takes the command on success: engine_commands_next gives it back, with its answer.
 * ERR_BUSY: ENGINE_COMMANDS_MAX are open. */
enum err_code engine_commands_submit(struct engine_commands *c, struct engine_command *m,
                                     struct err *e) __attribute__((warn_unused_result));
/* Nobody wants its answer any more: it comes back soon, with ERR_CANCELLED unless it was carried
 * out. */
void engine_commands_cancel(struct engine_commands *c, struct engine_command *m);
/* Gives the next command that has ended; the caller frees it. NULL: none. */
struct engine_command *engine_commands_next(struct engine_commands *c);

/* Engine thread. */
/* Takes in what was submitted, and ends what was cancelled. */
void engine_commands_take(struct engine_commands *c);
/* Between steps: carries out what can be. `idle`: no sequence has anything to compute, so this may
 * wait for a read or for copies. True: it did something, call it again; false: nothing more can be
 * done for now. *ret_code: ERR_DEVICE: the GPU failed. */
bool engine_commands_turn(struct engine_commands *c, const struct engine_commands_tiers *tiers,
                          bool idle, enum err_code *ret_code);
/* The tiers go, and what was begun in them is lost: it waits again, first, for the next ones. */
void engine_commands_leave(struct engine_commands *c);
/* Ends all but those that are under way with the error. */
void engine_commands_refuse(struct engine_commands *c, const struct err *cause);
/* Hands the ended ones to the loop. */
void engine_commands_flush(struct engine_commands *c);

#endif
