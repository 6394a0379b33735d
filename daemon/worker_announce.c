#include "worker_announce.h"

#include <string.h>

#include "kernels.h"

static void encode_welcome(struct worker_peers *set, struct buf *out)
{
    struct engine_facts facts = {0};
    engine_get_facts(set->engine, &facts);
    struct proto_welcome m = {
        .version = PROTO_VERSION,
        .state = (uint8_t)facts.state,
        .progress = facts.progress,
        .reason = proto_text_of(facts.reason),
        .model = proto_text_of(facts.model),
        .build = proto_text_of(ISLET_VERSION),
        .arithmetic = K_ARITHMETIC_VERSION,
        .incarnation = set->incarnation,
        .n_ctx = facts.n_ctx,
        .n_vocab = facts.n_vocab,
        .max_sequences = facts.max_sequences,
        .prefill_chunk = facts.prefill_chunk,
        .max_frame = set->max_frame,
        .n_layer = facts.n_layer,
        .n_expert = facts.n_expert,
        .n_expert_used = facts.n_expert_used,
    };
    memcpy(m.file_digest, facts.file_digest, sizeof m.file_digest);
    memcpy(m.shape_digest, facts.shape_digest, sizeof m.shape_digest);
    proto_encode_welcome(out, &m);
}

void worker_announce_welcome(struct worker_peers *set)
{
    struct buf frame = BUF_INIT(64 << 10);
    encode_welcome(set, &frame);
    if (buf_failed(&frame) || (frame.size == set->welcome.size &&
                               memcmp(frame.data, set->welcome.data, frame.size) == 0)) {
        buf_done(&frame);
        return;
    }
    buf_done(&set->welcome);
    set->welcome = frame;
    for (uint32_t i = 0; i < WORKER_PEER_MAX; i++) {
        struct worker_peer *p = set->slots[i];
        if (p == NULL || !p->greeted || p->ending)
            continue;
        buf_append(&p->out, frame.data, frame.size);
        worker_peer_queued(p);
    }
}

static void send_notice(struct worker_peer *p, const struct engine_facts *facts)
{
    const struct proto_notice m = {.action =
                                       facts->paused ? PROTO_NOTICE_PAUSE : PROTO_NOTICE_RESUME,
                                   .text = proto_text_of(facts->pause_reason)};
    proto_encode_notice(&p->out, &m);
    worker_peer_queued(p);
}

void worker_announce_notice(struct worker_peers *set)
{
    struct engine_facts facts = {0};
    engine_get_facts(set->engine, &facts);
    if (facts.paused == set->paused)
        return;
    set->paused = facts.paused;
    for (uint32_t i = 0; i < WORKER_PEER_MAX; i++)
        if (set->slots[i] != NULL && set->slots[i]->greeted && !set->slots[i]->ending)
            send_notice(set->slots[i], &facts);
}

void worker_announce_hello(struct worker_peer *p)
{
    struct worker_peers *set = p->set;
    /* The others first: what this one is told is then what all were told last, and a state that
     * comes back to that is told again. */
    worker_announce_welcome(set);
    p->greeted = true;
    buf_append(&p->out, set->welcome.data, set->welcome.size);
    if (set->welcome.size == 0)
        p->lost = "no memory for welcome";
    worker_peer_queued(p);
    if (set->paused) {
        struct engine_facts facts = {0};
        engine_get_facts(set->engine, &facts);
        send_notice(p, &facts);
    }
}

void worker_announce_drained(struct worker_peers *set)
{
    const bool idle = set->n_requests == 0 && set->n_commands == 0;
    for (uint32_t i = 0; i < WORKER_PEER_MAX && idle; i++) {
        struct worker_peer *p = set->slots[i];
        if (p == NULL || !p->drains)
            continue;
        p->drains = false;
        proto_encode_empty(&p->out, PROTO_DRAINED, 0);
        worker_peer_queued(p);
    }
}
