/* One connection of the worker's socket: frames in, requests to the engine, frames out by a
 * bounded queue. Does no I/O: the loop hands it bytes and sends what waits, so that a test needs
 * no socket. Thread: loop. */
#ifndef ISLET_WORKER_PEER_H
#define ISLET_WORKER_PEER_H

#include "engine.h"
#include "list.h"
#include "proto_message.h"
#include "ticks.h"

enum {
    WORKER_PEER_MAX = 256,             /* connections */
    WORKER_PEER_MAX_REQUESTS = 1024,   /* of one connection */
    WORKER_PEER_MAX_COMMANDS = 2048,   /* about experts, of one connection */
    WORKER_PEER_QUEUE_BYTES = 8 << 20, /* unsent; a reader slower than that is cut off */
    WORKER_PEER_STALL_MS = 60000       /* so is one that takes nothing for so long */
};

struct worker_peer;

/* All connections of one engine. Owned by the loop. */
struct worker_peers {
    struct engine *engine; /* borrowed */
    struct worker_peer *slots[WORKER_PEER_MAX];
    uint32_t n_requests; /* of all peers, that have not ended */
    uint32_t n_commands; /* about experts, the same */
    uint64_t serial;     /* of the last handle */
    uint32_t max_frame;
    uint64_t incarnation, start_ns;
    struct ticks ticks;
    struct proto_scratch scratch;
    struct engine_snapshot snapshot;
    struct buf welcome; /* the frame that was sent to all last */
    bool paused;        /* what all were told last */
    bool drain_asked;   /* by a client; the loop ends when nothing runs any more */
};

struct worker_peer {
    struct worker_peers *set;
    uint32_t slot;
    char client[64];   /* name from hello */
    bool greeted;      /* hello came */
    bool drains;       /* waits for drained */
    bool ending;       /* no more input; to be closed once everything is sent */
    const char *lost;  /* why to close at once, or NULL */
    uint64_t moved_ms; /* when the queue was last empty or taken from */
    struct proto_reader reader;
    struct buf out;
    size_t out_sent;
    struct list requests; /* the ones that send come first */
    uint32_t n_requests;
    struct list commands; /* in the order in which they came */
    uint32_t n_commands;
    void *io; /* the loop's */
};

void worker_peer_set_init(struct worker_peers *set, struct engine *engine, uint32_t max_frame,
                          struct ticks ticks);
void worker_peer_set_done(struct worker_peers *set); /* closes all peers */

/* Gives *ret; end with worker_peer_close. ERR_LIMIT: too many connections; ERR_NOMEM. */
enum err_code worker_peer_open(struct worker_peers *set, struct worker_peer **ret, struct err *e)
    __attribute__((warn_unused_result));
/* Cancels the peer's requests and frees it. */
void worker_peer_close(struct worker_peer *p);

/* Takes in what the client sent; answers are queued. Afterwards look at `ending` and `lost`. */
void worker_peer_on_bytes(struct worker_peer *p, const void *bytes, size_t n);

/* Lends the bytes to send; *ret_n may be 0. worker_peer_sent says how many went. */
const uint8_t *worker_peer_unsent(const struct worker_peer *p, size_t *ret_n);
void worker_peer_sent(struct worker_peer *p, size_t n);
/* Marks a peer lost that has taken nothing for WORKER_PEER_STALL_MS. */
void worker_peer_check_stall(struct worker_peer *p, uint64_t now_ms);

/* Queues the event's frame for its peer and returns that peer, or NULL where nobody waits for it
 * any more. ENGINE_STATE is not for here: see worker_announce. */
struct worker_peer *worker_peer_on_event(struct worker_peers *set,
                                         const struct engine_event *event);
/* The same for a command about an expert that ended. */
struct worker_peer *worker_peer_on_command(struct worker_peers *set,
                                           const struct engine_command *command);
/* For what was encoded to the end of `out`: a queue that is full ends the peer. */
void worker_peer_queued(struct worker_peer *p);

#endif
