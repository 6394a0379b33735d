#include "engine_shown.h"

#include <stdio.h>
#include <string.h>

#include "engine_status.h"

void engine_shown_start(struct engine_shown *s, struct engine_mail *mail)
{
    pthread_mutex_init(&s->lock, NULL);
    s->mail = mail;
}

void engine_shown_done(struct engine_shown *s)
{
    pthread_mutex_destroy(&s->lock);
}

void engine_shown_set_state(struct engine_shown *s, enum proto_state state, const char *reason)
{
    pthread_mutex_lock(&s->lock);
    const bool drains = state == PROTO_SERVING && atomic_load(&s->drain);
    s->facts.state = drains ? PROTO_DRAINING : state;
    snprintf(s->facts.reason, sizeof(s->facts.reason), "%s", reason);
    pthread_mutex_unlock(&s->lock);
    engine_mail_send_state(s->mail);
}

enum proto_state engine_shown_state(struct engine_shown *s)
{
    pthread_mutex_lock(&s->lock);
    const enum proto_state state = s->facts.state;
    pthread_mutex_unlock(&s->lock);
    return state;
}

void engine_shown_set_progress(struct engine_shown *s, unsigned percent)
{
    pthread_mutex_lock(&s->lock);
    s->facts.progress = (uint8_t)percent;
    pthread_mutex_unlock(&s->lock);
    engine_mail_send_state(s->mail);
}

void engine_shown_set_pause(struct engine_shown *s, bool pause, const char *reason)
{
    pthread_mutex_lock(&s->lock);
    const bool changed = s->facts.paused != pause;
    s->facts.paused = pause;
    snprintf(s->facts.pause_reason, sizeof(s->facts.pause_reason), "%s", reason);
    pthread_mutex_unlock(&s->lock);
    if (changed)
        engine_mail_send_state(s->mail);
}

void engine_shown_set_degraded(struct engine_shown *s, const char *reason)
{
    pthread_mutex_lock(&s->lock);
    snprintf(s->snapshot.degraded, sizeof(s->snapshot.degraded), "%s", reason);
    pthread_mutex_unlock(&s->lock);
}

void engine_shown_set_unread(struct engine_shown *s, const char *reason)
{
    pthread_mutex_lock(&s->lock);
    snprintf(s->snapshot.unread, sizeof(s->snapshot.unread), "%s", reason);
    pthread_mutex_unlock(&s->lock);
}

void engine_shown_set_gpu_lost(struct engine_shown *s)
{
    pthread_mutex_lock(&s->lock);
    s->facts.gpu_lost = true;
    pthread_mutex_unlock(&s->lock);
    engine_mail_send_state(s->mail);
}

void engine_shown_set_model(struct engine_shown *s, const struct engine_run *run,
                            const struct engine_run_devices *devices)
{
    const struct model *model = run->model;
    const struct model_shape *shape = &model->shape;
    const char *gpu = devices->gpu != NULL ? k_ops(devices->gpu)->name : "";
    pthread_mutex_lock(&s->lock);
    struct engine_facts *f = &s->facts;
    snprintf(f->model, sizeof(f->model), "%s", shape->name);
    memcpy(f->file_digest, model->file_digest, sizeof(f->file_digest));
    memcpy(f->shape_digest, model->shape_digest, sizeof(f->shape_digest));
    f->n_layer = shape->n_layer;
    f->n_expert = shape->n_expert;
    f->n_expert_used = shape->n_expert_used;
    f->n_vocab = shape->n_vocab;
    f->n_ctx = run->n_ctx;
    snprintf(s->snapshot.backend, sizeof(s->snapshot.backend), "%s%s%s", gpu,
             devices->gpu != NULL ? "+" : "", k_ops(devices->cpu)->name);
    snprintf(s->snapshot.storage, sizeof(s->snapshot.storage), "%s",
             tier_ssd_about(run->experts->ssd));
    pthread_mutex_unlock(&s->lock);
}

void engine_shown_set_figures(struct engine_shown *s, const struct engine_run *run, uint64_t now_ns)
{
    pthread_mutex_lock(&s->lock);
    s->snapshot.taken_ns = now_ns;
    s->snapshot.status = run->count;
    s->snapshot.status.state = (uint8_t)s->facts.state;
    engine_status_sequences(run, now_ns, &s->snapshot);
    pthread_mutex_unlock(&s->lock);
}

void engine_shown_get_facts(struct engine_shown *s, struct engine_facts *ret)
{
    pthread_mutex_lock(&s->lock);
    *ret = s->facts;
    pthread_mutex_unlock(&s->lock);
}

void engine_shown_get_snapshot(struct engine_shown *s, struct engine_snapshot *ret)
{
    pthread_mutex_lock(&s->lock);
    *ret = s->snapshot;
    pthread_mutex_unlock(&s->lock);
    ret->status.sequences = ret->sequences;
    ret->status.backend = proto_text_of(ret->backend);
    /* that requests fail is told before that they are slow */
    ret->status.degraded = proto_text_of(ret->unread[0] != '\0' ? ret->unread : ret->degraded);
    ret->status.storage = proto_text_of(ret->storage);
    for (uint16_t i = 0; i < ret->status.n_sequences; i++)
        ret->sequences[i].client = proto_text_of(ret->clients[i]);
}
