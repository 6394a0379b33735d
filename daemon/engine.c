#include "engine.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "alloc.h"
#include "engine_commands.h"
#include "engine_govern.h"
#include "engine_load.h"
#include "engine_machine.h"
#include "engine_retry.h"
#include "engine_run.h"
#include "engine_shown.h"
#include "engine_status.h"
#include "fault.h"
#include "log.h"

enum {
    IDLE_MS = 1000,
    RESIDENT_EVERY_NS = 1000000000
};
#define UNREAD_NS (UINT64_C(60) * 1000000000) /* how long a failed read is told of */

struct engine {
    struct engine_config config;
    pthread_t thread;
    struct engine_mail mail;
    struct queue *submitted; /* struct engine_job, loop to engine */
    struct engine_commands commands;
    _Atomic bool stop, load_again;
    _Atomic bool starved; /* the engine waits for events to come back */
    _Atomic uint64_t heartbeat;

    /* loop thread */
    struct list open; /* struct engine_job.open */
    _Atomic uint32_t n_open;
    uint64_t n_orders;

    struct engine_shown shown;

    /* engine thread */
    struct engine_run run;
    struct engine_load load;
    struct engine_govern govern;
    struct engine_retry retry; /* of a GPU that is not used though it may be */
    bool gpu_dropped;          /* it failed, or others fill it: the CPU serves */
    bool gpu_lost;             /* and this process should end */
    struct err unread;         /* the last read for a request that failed, */
    uint64_t unread_ns;        /* and when; 0: none did */
    uint64_t started_ns, resident_ns;
    int statm; /* /proc/self/statm, or -1 */
};

/* ---- facts and snapshot ---- */

static void take_snapshot(struct engine *g)
{
    const uint64_t now = ticks_ns(g->config.ticks);
    struct proto_status *c = &g->run.count;
    if (g->resident_ns == 0 || now - g->resident_ns >= RESIDENT_EVERY_NS) {
        g->resident_ns = now;
        c->resident_bytes = engine_machine_resident(g->statm);
    }
    c->version = PROTO_STATUS_VERSION;
    c->uptime_ms = (now - g->started_ns) / 1000000u;
    engine_status_count(&g->run);
    engine_govern_count(&g->govern, &g->run, c);
    const bool unread = g->unread_ns != 0 && now - g->unread_ns < UNREAD_NS;
    engine_shown_set_unread(&g->shown, unread ? g->unread.text : "");
    engine_shown_set_figures(&g->shown, &g->run, now);
}

void engine_get_facts(struct engine *g, struct engine_facts *ret)
{
    engine_shown_get_facts(&g->shown, ret);
}

void engine_get_snapshot(struct engine *g, struct engine_snapshot *ret)
{
    engine_shown_get_snapshot(&g->shown, ret);
}

/* ---- loading ---- */

static void on_progress(void *context, unsigned percent)
{
    struct engine *g = context;
    engine_shown_set_progress(&g->shown, percent);
}

static void take_submitted(struct engine *g)
{
    struct engine_job *job;
    while ((job = queue_pop(g->submitted)) != NULL) {
        list_append(&g->run.waiting, &job->waiting);
        g->run.count.requests_total++;
    }
}

static bool on_piece(void *context)
{
    struct engine *g = context;
    atomic_fetch_add(&g->heartbeat, 1);
    take_submitted(g); /* a request that waits for the model can be cancelled at once */
    engine_run_sweep(&g->run);
    engine_mail_flush(&g->mail);
    engine_commands_take(&g->commands);
    engine_commands_flush(&g->commands);
    return atomic_load(&g->stop);
}

/* Gives up the model and the devices. Sequences that run stay, and wait. */
static void unload(struct engine *g)
{
    engine_govern_stop(&g->govern);
    engine_shown_set_pause(&g->shown, false, "no GPU whose memory would rise");
    engine_commands_leave(&g->commands);
    engine_load_leave(&g->load);
}

static enum err_code load_on(struct engine *g, bool gpu, struct err *e)
{
    const enum err_code code = engine_load_on(&g->load, gpu, e);
    if (code != ERR_OK)
        return code;
    engine_shown_set_model(&g->shown, &g->run, &g->load.devices);
    if (gpu)
        engine_govern_start(&g->govern, &g->config, &g->run, g->load.devices.gpu);
    return ERR_OK;
}

/* Without the GPU after all. A machine that has none is as good as it can be. What a device that
 * was opened says itself of its failure is told too. */
static void give_up_gpu(struct engine *g, struct err *why)
{
    struct k_device *gpu = g->load.devices.gpu;
    const bool none = why->code == ERR_UNSUPPORTED && gpu == NULL;
    struct err first = {.code = ERR_OK};
    if (gpu != NULL && why->code == ERR_DEVICE && k_ops(gpu)->lost != NULL)
        (void)k_ops(gpu)->lost(gpu, &first);
    if (first.code != ERR_OK && strstr(why->text, first.text) == NULL)
        (void)err_wrap(why, "%.100s", first.text);
    if (none)
        log_info("engine", "no_gpu", "reason=\"%s\"", why->text);
    else
        log_warn("engine", "no_gpu", "reason=\"%s\" action=\"continuing: the CPU computes\"",
                 why->text);
    engine_shown_set_degraded(&g->shown, none ? "" : why->text);
    unload(g);
}

static bool wants_gpu(const struct engine *g)
{
    return g->config.gpu != ENGINE_GPU_OFF && g->config.open_gpu != NULL;
}

/* insists: that the GPU cannot be had is an error. */
static enum err_code load(struct engine *g, bool insists, struct err *e)
{
    const struct engine_config *c = &g->config;
    const bool gpu = wants_gpu(g) && !g->gpu_dropped;
    struct err why = {.code = ERR_OK};
    if (c->trouble != NULL)
        return err_set(e, ERR_ARGUMENT, "%s", c->trouble);
    if (!gpu && insists && !g->gpu_dropped)
        return err_set(e, ERR_UNSUPPORTED, "compute.gpu = on: this program has no GPU kernels");
    if (!gpu)
        return load_on(g, false, e);
    const enum err_code code = load_on(g, true, &why);
    const bool about_gpu =
        code == ERR_UNSUPPORTED || code == ERR_NOMEM || code == ERR_LIMIT || code == ERR_DEVICE;
    if (code == ERR_OK || !about_gpu || insists) {
        *e = why;
        return code;
    }
    give_up_gpu(g, &why);
    return load_on(g, false, e);
}

static void load_model(struct engine *g)
{
    struct err e = {.code = ERR_OK};
    on_progress(g, 0);
    engine_shown_set_state(&g->shown, PROTO_LOADING, "");
    g->unread_ns = 0;
    if (!g->gpu_dropped)
        engine_shown_set_degraded(&g->shown, ""); /* why an earlier try did without the GPU */
    if (load(g, g->config.gpu == ENGINE_GPU_ON, &e) == ERR_OK) {
        on_progress(g, 100);
        engine_shown_set_state(&g->shown, PROTO_SERVING, "");
        log_info("engine", "serving",
                 "model=%s context=%u kv_pages=%u weights_bytes=%llu backend=%s threads=%u",
                 g->load.model->shape.name, g->run.n_ctx, g->run.pages.n,
                 (unsigned long long)g->load.model->weights_bytes, g->shown.snapshot.backend,
                 k_threads(g->load.devices.cpu));
        engine_status_log(&g->run, &g->load.devices);
        if (!g->run.gpu && wants_gpu(g))
            engine_retry_wait(&g->retry, ticks_ns(g->config.ticks));
        return;
    }
    unload(g);
    if (e.code == ERR_CANCELLED)
        return;
    engine_shown_set_state(&g->shown, PROTO_FAILED, e.text);
}

/* On other devices than before. What runs is computed again, with the same bits. What was served is
 * served on: by the CPU, where the GPU cannot be had after all. */
static void load_anew(struct engine *g)
{
    struct err e = {.code = ERR_OK};
    unload(g);
    if (load(g, false, &e) == ERR_OK) {
        on_progress(g, 100);
        engine_status_log(&g->run, &g->load.devices);
        return;
    }
    unload(g);
    engine_run_fail_all(&g->run, &e);
    if (e.code != ERR_CANCELLED)
        engine_shown_set_state(&g->shown, PROTO_FAILED, e.text);
}

/* The GPU failed. What runs is computed again by the CPU, with the same bits; where the process can
 * never use the GPU again, it ends instead, and whoever waits is answered by the next one. */
static void drop_gpu(struct engine *g)
{
    const struct k_ops *ops = k_ops(g->load.devices.gpu);
    struct err why = {.code = ERR_OK};
    g->gpu_dropped = true;
    engine_retry_on_loss(&g->retry, true);
    g->gpu_lost = ops->lost != NULL && ops->lost(g->load.devices.gpu, &why);
    log_error("engine", "gpu_failed", "reason=\"%s\" action=\"%s\"",
              why.code != ERR_OK ? why.text : "a step failed",
              g->gpu_lost ? "this process ends" : "continuing: the CPU computes all of it again");
    engine_shown_set_degraded(&g->shown, why.code != ERR_OK ? why.text : "the GPU failed");
    if (g->gpu_lost) {
        engine_shown_set_gpu_lost(&g->shown);
        return;
    }
    load_anew(g);
    engine_retry_wait(&g->retry, ticks_ns(g->config.ticks));
}

/* Other programs fill the GPU, and no island is left to give back. */
static void leave_gpu(struct engine *g)
{
    const struct governor *v = &g->govern.governor;
    g->gpu_dropped = true;
    engine_retry_on_loss(&g->retry, false);
    log_error("governor", "gpu_given_up",
              "used_bytes=%llu total_bytes=%llu limit_percent=%u "
              "action=\"continuing: the CPU computes all of it again; the GPU is looked at again\"",
              (unsigned long long)v->used, (unsigned long long)v->total,
              v->limits.critical_percent);
    engine_shown_set_degraded(&g->shown,
                              "other programs fill the GPU's memory: the CPU computes alone");
    load_anew(g);
    engine_retry_wait(&g->retry, ticks_ns(g->config.ticks));
}

static void govern(struct engine *g)
{
    struct engine_govern *v = &g->govern;
    if (!engine_govern_turn(v, &g->run, ticks_ns(g->config.ticks)))
        return;
    if (v->actions.drop) {
        leave_gpu(g);
        return;
    }
    engine_shown_set_degraded(&g->shown, v->why_slower);
    engine_shown_set_pause(&g->shown, v->actions.pause,
                           v->actions.pause ? v->why_slower : "the GPU's memory rises no more");
}

/* A GPU that the CPU does without may be there by now: it is looked for while nobody asks. */
static void look_for_gpu(struct engine *g)
{
    struct err why = {.code = ERR_OK};
    if (g->run.gpu || !engine_retry_is_due(&g->retry, ticks_ns(g->config.ticks)) ||
        !engine_run_is_idle(&g->run) || atomic_load(&g->shown.drain))
        return;
    if (engine_load_try_gpu(&g->load, &why) != ERR_OK) {
        log_debug("engine", "still_no_gpu", "reason=\"%s\"", why.text);
        engine_retry_wait(&g->retry, ticks_ns(g->config.ticks));
        return;
    }
    log_info("engine", "gpu_found", "action=\"the model is loaded again, on both\"");
    g->gpu_dropped = false;
    engine_shown_set_degraded(&g->shown, "");
    load_anew(g);
    if (g->run.gpu || g->load.model == NULL)
        return;
    engine_retry_on_loss(&g->retry, false);
    engine_retry_wait(&g->retry, ticks_ns(g->config.ticks));
}

/* ---- the thread ---- */

static enum err_code say_draining(struct err *e)
{
    return err_set(e, ERR_BUSY, "the worker is draining and takes nothing new");
}

/* Commands go between steps; the process that a drain ends needs no experts any more. */
static bool turn_commands(struct engine *g, bool idle)
{
    const struct engine_commands_tiers tiers = {.experts = g->run.experts,
                                                .islands = g->run.gpu ? &g->run.islands : NULL};
    enum err_code code = ERR_OK;
    if (atomic_load(&g->shown.drain)) {
        struct err e = {.code = ERR_OK};
        (void)say_draining(&e);
        engine_commands_refuse(&g->commands, &e);
    }
    const bool more = engine_commands_turn(&g->commands, &tiers, idle, &code);
    g->run.gpu_failed |= code != ERR_OK;
    return more;
}

/* Requests failed in this step: the status tells of it for a while. */
static void note_unread(struct engine *g)
{
    if (!g->run.experts->any_failed)
        return;
    g->unread = g->run.experts->error;
    g->unread_ns = ticks_ns(g->config.ticks);
}

/* One turn. Returns whether there may be more to do at once. */
static bool turn(struct engine *g)
{
    take_submitted(g);
    engine_commands_take(&g->commands);
    engine_run_sweep(&g->run);
    if (g->gpu_lost) /* the loop ends the process */
        return false;
    if (g->load.model == NULL) {
        struct err e = {.code = ERR_OK};
        (void)err_set(&e, ERR_BUSY, "the model is not loaded");
        engine_run_fail_all(&g->run, &e);
        engine_commands_refuse(&g->commands, &e);
        return false;
    }
    engine_run_check_waiting(&g->run);
    atomic_store(&g->starved, true); /* first, so that an event that comes back now wakes us */
    if (engine_mail_room(&g->mail) < engine_run_events(&g->config))
        return false;
    atomic_store(&g->starved, false);
    const bool stepped = engine_run_step(&g->run);
    if (stepped)
        note_unread(g);
    const bool commanded = !g->run.gpu_failed && turn_commands(g, !stepped);
    const bool more = stepped || commanded || (!g->run.gpu_failed && engine_run_idle(&g->run));
    govern(g);
    if (g->run.gpu_failed)
        drop_gpu(g);
    if (!more && g->load.model != NULL)
        look_for_gpu(g);
    return more;
}

/* Processes before this one lost it: it is left alone at first. */
static void rest_gpu(struct engine *g)
{
    g->gpu_dropped = true;
    log_warn("engine", "gpu_rests", "for_ms=%u action=\"continuing: the CPU computes alone\"",
             g->retry.rest_ms);
    engine_shown_set_degraded(&g->shown,
                              "the GPU was lost again and again: it rests, the CPU computes alone");
}

static void *engine_main(void *argument)
{
    struct engine *g = argument;
    pthread_setname_np(pthread_self(), "engine");
    atomic_store(&g->load_again, true);
    while (!atomic_load(&g->stop)) {
        if (atomic_exchange(&g->load_again, false) && g->load.model == NULL) {
            g->gpu_dropped = false; /* the CPU alone cannot serve it */
            if (g->retry.rest_ms != 0 && wants_gpu(g))
                rest_gpu(g);
            load_model(g);
            g->retry.rest_ms = 0;
        }
        const bool more = turn(g);
        atomic_fetch_add(&g->heartbeat, 1);
        take_snapshot(g);
        engine_mail_flush(&g->mail);
        engine_commands_flush(&g->commands);
        if (!more && !atomic_load(&g->stop))
            queue_wait(g->submitted, IDLE_MS);
    }
    unload(g);
    engine_run_done(&g->run);
    engine_mail_flush(&g->mail);
    return NULL;
}

/* ---- the loop's side ---- */

static void free_engine(struct engine *g)
{
    list_each_safe(it, &g->open)
        engine_request_free(&list_entry(it, struct engine_job, open)->request);
    engine_mail_done(&g->mail);
    engine_commands_done(&g->commands);
    queue_free(g->submitted);
    engine_shown_done(&g->shown);
    if (g->statm >= 0)
        close(g->statm);
    alloc_free(g);
}

static enum err_code start_thread(struct engine *g, struct err *e)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the loop's */
    const int failed = pthread_create(&g->thread, NULL, engine_main, g);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed == 0 ? ERR_OK : err_set_os(e, ERR_IO, failed, "the engine's thread");
}

enum err_code engine_start(const struct engine_config *config, struct engine **ret, struct err *e)
{
    struct engine *g = alloc_zero(ALLOC_MISC, 1, sizeof(*g));
    if (g == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the engine");
    g->config = *config;
    list_init(&g->open);
    list_init(&g->run.waiting);
    engine_shown_start(&g->shown, &g->mail);
    g->run.config = &g->config;
    g->run.mail = &g->mail;
    g->load = (struct engine_load){.config = &g->config,
                                   .run = &g->run,
                                   .heartbeat = &g->heartbeat,
                                   .progress = on_progress,
                                   .stopped = on_piece,
                                   .context = g};
    engine_retry_start(&g->retry, config->gpu_retry_ms, config->gpu_rest_ms);
    g->mail.notify = config->notify;
    g->mail.notify_context = config->notify_context;
    g->shown.facts.max_sequences = config->max_sequences;
    g->shown.facts.prefill_chunk = config->prefill_chunk;
    g->started_ns = ticks_ns(config->ticks);
    g->statm = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
    const size_t n_open = (size_t)config->max_waiting + config->max_sequences;
    g->submitted = queue_new(n_open);
    enum err_code code = ERR_OK;
    if (g->submitted == NULL)
        code = err_set(e, ERR_NOMEM, "no memory for %zu requests", n_open);
    if (code == ERR_OK)
        code = engine_mail_start(&g->mail, 4 * engine_run_events(config), n_open, e);
    if (code == ERR_OK)
        code = engine_commands_start(&g->commands, config->notify, config->notify_context, e);
    if (code == ERR_OK)
        code = start_thread(g, e);
    if (code == ERR_OK)
        *ret = g;
    else
        free_engine(g);
    return code;
}

void engine_stop(struct engine *g)
{
    if (g == NULL)
        return;
    atomic_store(&g->stop, true);
    queue_wake(g->submitted);
    pthread_join(g->thread, NULL);
    free_engine(g);
}

void engine_load_again(struct engine *g)
{
    if (engine_shown_state(&g->shown) != PROTO_FAILED)
        return;
    atomic_store(&g->load_again, true);
    queue_wake(g->submitted);
}

void engine_drain(struct engine *g)
{
    atomic_store(&g->shown.drain, true);
    if (engine_shown_state(&g->shown) == PROTO_SERVING) /* else when the model is loaded */
        engine_shown_set_state(&g->shown, PROTO_DRAINING, "");
}

/* Does it take anything now? */
static enum err_code check_open(struct engine *g, const struct engine_facts *facts, struct err *e)
{
    if (atomic_load(&g->shown.drain))
        return say_draining(e);
    if (facts->state == PROTO_FAILED)
        return err_set(e, ERR_BUSY, "the model is not loaded: %s", facts->reason);
    return ERR_OK;
}

enum err_code engine_submit_command(struct engine *g, struct engine_command *command, struct err *e)
{
    struct engine_facts facts;
    engine_get_facts(g, &facts);
    enum err_code code = check_open(g, &facts, e);
    if (code == ERR_OK)
        code = engine_commands_submit(&g->commands, command, e);
    if (code == ERR_OK)
        queue_wake(g->submitted);
    return code;
}

void engine_cancel_command(struct engine *g, struct engine_command *command)
{
    engine_commands_cancel(&g->commands, command);
    queue_wake(g->submitted);
}

struct engine_command *engine_next_command(struct engine *g)
{
    return engine_commands_next(&g->commands);
}

enum err_code engine_submit(struct engine *g, struct engine_request *request, struct err *e)
{
    struct engine_job *job = engine_request_job(request);
    struct engine_facts facts;
    engine_get_facts(g, &facts);
    enum err_code code = check_open(g, &facts, e);
    if (code == ERR_OK)
        code = engine_request_check_run(&request->run, e);
    if (code == ERR_OK && facts.n_ctx != 0)
        code = engine_request_check_model(&request->run, facts.n_vocab, facts.n_ctx, e);
    if (code != ERR_OK)
        return code;
    const uint32_t limit = g->config.max_waiting + g->config.max_sequences;
    if (atomic_load(&g->n_open) >= limit)
        return err_set(e, ERR_BUSY, "%u requests run or wait; the limit is %u",
                       atomic_load(&g->n_open), limit);
    if (fault_hit(FAULT_WORKER_ADMIT))
        return err_set(e, ERR_BUSY, "a fault was asked for");
    job->checked_ctx = facts.n_ctx;
    job->order = g->n_orders++;
    job->submitted_ns = ticks_ns(g->config.ticks);
    list_append(&g->open, &job->open);
    atomic_fetch_add(&g->n_open, 1);
    (void)queue_push(g->submitted, job); /* holds as many as may be open */
    return ERR_OK;
}

void engine_cancel(struct engine *g, uint64_t handle)
{
    list_each(it, &g->open) {
        struct engine_job *job = list_entry(it, struct engine_job, open);
        if (job->request.handle != handle)
            continue;
        atomic_store(&job->cancelled, true);
        queue_wake(g->submitted);
        return;
    }
}

static bool is_last(const struct engine_event *event)
{
    return event->kind == ENGINE_DONE || event->kind == ENGINE_ERROR;
}

struct engine_event *engine_next_event(struct engine *g)
{
    return engine_mail_next(&g->mail);
}

void engine_event_return(struct engine *g, struct engine_event *event)
{
    engine_mail_return(&g->mail, event);
    if (is_last(event)) {
        struct engine_job *job = list_entry(event, struct engine_job, last);
        list_remove(&job->open);
        atomic_fetch_sub(&g->n_open, 1);
        engine_request_free(&job->request);
    } else if (atomic_exchange(&g->starved, false)) {
        queue_wake(g->submitted);
    }
}

uint64_t engine_heartbeat(const struct engine *g)
{
    return atomic_load(&g->heartbeat) + engine_load_pulse(&g->load);
}
