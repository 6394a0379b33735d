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
#include "engine_plan.h"
#include "engine_run.h"
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
    _Atomic bool stop, load_again, drain;
    _Atomic bool starved; /* the engine waits for events to come back */
    _Atomic uint64_t heartbeat;

    /* loop thread */
    struct list open; /* struct engine_job.open */
    _Atomic uint32_t n_open;
    uint64_t n_orders;

    /* under `lock` */
    pthread_mutex_t lock;
    struct engine_facts facts;
    struct engine_snapshot snapshot;

    /* engine thread */
    struct engine_run run;
    struct engine_run_devices devices;
    struct engine_govern govern;
    bool gpu_dropped; /* it failed: it is not tried again while the CPU serves */
    bool gpu_lost;    /* and this process should end */
    struct model *model;
    struct err unread;  /* the last read for a request that failed, */
    uint64_t unread_ns; /* and when; 0: none did */
    uint64_t started_ns, resident_ns;
    int statm; /* /proc/self/statm, or -1 */
};

/* ---- facts and snapshot ---- */

/* SERVING becomes DRAINING when that was asked for, however late. */
static void set_state(struct engine *g, enum proto_state state, const char *reason)
{
    pthread_mutex_lock(&g->lock);
    const bool drains = state == PROTO_SERVING && atomic_load(&g->drain);
    g->facts.state = drains ? PROTO_DRAINING : state;
    snprintf(g->facts.reason, sizeof(g->facts.reason), "%s", reason);
    pthread_mutex_unlock(&g->lock);
    engine_mail_send_state(&g->mail);
}

static enum proto_state state_of(struct engine *g)
{
    pthread_mutex_lock(&g->lock);
    const enum proto_state state = g->facts.state;
    pthread_mutex_unlock(&g->lock);
    return state;
}

static void read_resident(struct engine *g, uint64_t now)
{
    char text[64];
    if (g->statm < 0 || (g->resident_ns != 0 && now - g->resident_ns < RESIDENT_EVERY_NS))
        return;
    g->resident_ns = now;
    const ssize_t n = pread(g->statm, text, sizeof(text) - 1, 0);
    unsigned long long size, resident;
    if (n <= 0)
        return;
    text[n] = '\0';
    if (sscanf(text, "%llu %llu", &size, &resident) == 2)
        g->run.count.resident_bytes = resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

static void take_snapshot(struct engine *g)
{
    const uint64_t now = ticks_ns(g->config.ticks);
    struct proto_status *c = &g->run.count;
    read_resident(g, now);
    c->version = PROTO_STATUS_VERSION;
    c->uptime_ms = (now - g->started_ns) / 1000000u;
    engine_status_count(&g->run);
    engine_govern_count(&g->govern, &g->run, c);
    pthread_mutex_lock(&g->lock);
    struct engine_snapshot *s = &g->snapshot;
    s->taken_ns = now;
    s->status = *c;
    s->status.state = (uint8_t)g->facts.state;
    engine_status_sequences(&g->run, now, s);
    const bool unread = g->unread_ns != 0 && now - g->unread_ns < UNREAD_NS;
    snprintf(s->unread, sizeof(s->unread), "%s", unread ? g->unread.text : "");
    pthread_mutex_unlock(&g->lock);
}

void engine_get_facts(struct engine *g, struct engine_facts *ret)
{
    pthread_mutex_lock(&g->lock);
    *ret = g->facts;
    pthread_mutex_unlock(&g->lock);
}

void engine_get_snapshot(struct engine *g, struct engine_snapshot *ret)
{
    pthread_mutex_lock(&g->lock);
    *ret = g->snapshot;
    pthread_mutex_unlock(&g->lock);
    ret->status.sequences = ret->sequences;
    ret->status.backend = proto_text_of(ret->backend);
    ret->status.degraded = proto_text_of(ret->degraded[0] != '\0' ? ret->degraded : ret->unread);
    ret->status.storage = proto_text_of(ret->storage);
    for (uint16_t i = 0; i < ret->status.n_sequences; i++)
        ret->sequences[i].client = proto_text_of(ret->clients[i]);
}

/* ---- loading ---- */

static void on_progress(void *context, unsigned percent)
{
    struct engine *g = context;
    pthread_mutex_lock(&g->lock);
    g->facts.progress = (uint8_t)percent;
    pthread_mutex_unlock(&g->lock);
    engine_mail_send_state(&g->mail);
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

/* Whether anything new should be admitted, to those who ask. */
static void set_pause(struct engine *g, bool pause)
{
    pthread_mutex_lock(&g->lock);
    const bool changed = g->facts.paused != pause;
    g->facts.paused = pause;
    snprintf(g->facts.pause_reason, sizeof(g->facts.pause_reason), "%s",
             pause ? g->govern.why_slower : "the GPU's memory rises no more");
    pthread_mutex_unlock(&g->lock);
    if (changed)
        engine_mail_send_state(&g->mail);
}

/* Gives up the model and the devices. Sequences that run stay, and wait. */
static void unload(struct engine *g)
{
    struct engine_run_devices *d = &g->devices;
    engine_govern_stop(&g->govern);
    set_pause(g, false);
    engine_commands_leave(&g->commands);
    engine_run_leave(&g->run);
    model_close(g->model);
    g->model = NULL;
    if (d->gpu_stream != NULL)
        k_ops(d->gpu)->stream_free(d->gpu_stream);
    k_close(d->gpu);
    if (d->cpu_stream != NULL)
        k_ops(d->cpu)->stream_free(d->cpu_stream);
    k_close(d->cpu);
    *d = (struct engine_run_devices){.cpu = NULL};
}

/* Why answers are slower than they could be, or "". */
static void set_degraded(struct engine *g, const char *reason)
{
    pthread_mutex_lock(&g->lock);
    snprintf(g->snapshot.degraded, sizeof(g->snapshot.degraded), "%s", reason);
    pthread_mutex_unlock(&g->lock);
}

static void know_model(struct engine *g)
{
    const struct model_shape *shape = &g->model->shape;
    const struct engine_run_devices *d = &g->devices;
    pthread_mutex_lock(&g->lock);
    struct engine_facts *f = &g->facts;
    snprintf(f->model, sizeof(f->model), "%s", shape->name);
    memcpy(f->file_digest, g->model->file_digest, sizeof(f->file_digest));
    memcpy(f->shape_digest, g->model->shape_digest, sizeof(f->shape_digest));
    f->n_layer = shape->n_layer;
    f->n_expert = shape->n_expert;
    f->n_expert_used = shape->n_expert_used;
    f->n_vocab = shape->n_vocab;
    f->n_ctx = g->run.n_ctx;
    snprintf(g->snapshot.backend, sizeof(g->snapshot.backend), "%s%s%s",
             d->gpu != NULL ? k_ops(d->gpu)->name : "", d->gpu != NULL ? "+" : "",
             k_ops(d->cpu)->name);
    snprintf(g->snapshot.storage, sizeof(g->snapshot.storage), "%s",
             tier_ssd_about(g->run.experts->ssd));
    pthread_mutex_unlock(&g->lock);
}

/* The dense weights, and a small model's experts too: it is then ready at full speed, and a damaged
 * file is found now. A large one's are read when they are needed, or while nobody asks. */
static enum err_code read_weights(struct engine *g, struct model_loading *loading, struct err *e)
{
    struct engine_run *run = &g->run;
    const uint64_t experts = g->model->experts_bytes;
    const bool fill = engine_plan_fills_at_start(&run->budget, experts);
    loading->ssd = run->experts->ssd;
    loading->arena = run->experts->ram.arena;
    loading->arena_bytes = run->experts->ram.bytes;
    loading->total_bytes = g->model->weights_bytes + (fill ? experts : 0);
    if (run->gpu)
        loading->staging = (struct k_span){run->islands.vram.memory, 0};
    enum err_code code = model_load(g->model, loading, e);
    if (code == ERR_OK && fill && run->experts->all_fit)
        code = engine_experts_fill(run->experts, loading, e);
    if (code == ERR_OK && fill && run->gpu)
        code = engine_islands_fill(&run->islands, loading, e);
    return code;
}

static enum err_code open_devices(struct engine *g, bool gpu, struct err *e)
{
    struct engine_run_devices *d = &g->devices;
    enum err_code code = k_open((enum k_level)g->config.cpu_level, g->config.threads, &d->cpu, e);
    if (code == ERR_OK)
        code = k_ops(d->cpu)->stream_new(d->cpu, &d->cpu_stream, e);
    if (code == ERR_OK && gpu)
        code = g->config.open_gpu(g->config.open_gpu_context, &d->gpu, e);
    if (code == ERR_OK && gpu)
        code = k_ops(d->gpu)->stream_new(d->gpu, &d->gpu_stream, e);
    return code;
}

static enum err_code load_on(struct engine *g, bool gpu, struct err *e)
{
    struct engine_run_devices *d = &g->devices;
    struct model_loading loading = {
        .path = g->config.model_path, .progress = on_progress, .stopped = on_piece, .context = g};
    enum err_code code = open_devices(g, gpu, e);
    loading.device = gpu ? d->gpu : d->cpu;
    loading.stream = gpu ? d->gpu_stream : d->cpu_stream;
    loading.host = d->cpu;
    if (code == ERR_OK)
        code = model_open(&loading, &g->model, e);
    if (code == ERR_OK)
        code = engine_run_start(&g->run, d, g->model, e);
    if (code == ERR_OK)
        code = read_weights(g, &loading, e);
    if (code == ERR_OK)
        code = engine_forward_record(g->run.forward, e);
    if (code == ERR_OK) {
        g->run.forward->heartbeat = g->run.experts->heartbeat = &g->heartbeat;
        g->run.count.cpu_threads = k_threads(d->cpu);
        know_model(g);
        if (gpu)
            engine_govern_start(&g->govern, &g->config, &g->run, d->gpu);
    }
    return code;
}

/* Without the GPU after all. A machine that has none is as good as it can be. */
static void give_up_gpu(struct engine *g, const struct err *why)
{
    const bool none = why->code == ERR_UNSUPPORTED;
    if (none)
        log_info("engine", "no_gpu", "reason=\"%s\"", why->text);
    else
        log_warn("engine", "no_gpu", "reason=\"%s\" action=\"continuing: the CPU computes\"",
                 why->text);
    set_degraded(g, none ? "" : why->text);
    unload(g);
}

static enum err_code load(struct engine *g, struct err *e)
{
    const struct engine_config *c = &g->config;
    const bool gpu = c->gpu != ENGINE_GPU_OFF && c->open_gpu != NULL && !g->gpu_dropped;
    struct err why = {.code = ERR_OK};
    if (c->trouble != NULL)
        return err_set(e, ERR_ARGUMENT, "%s", c->trouble);
    if (!gpu && c->gpu == ENGINE_GPU_ON && !g->gpu_dropped)
        return err_set(e, ERR_UNSUPPORTED, "compute.gpu = on: this program has no GPU kernels");
    if (!gpu)
        return load_on(g, false, e);
    const enum err_code code = load_on(g, true, &why);
    const bool about_gpu =
        code == ERR_UNSUPPORTED || code == ERR_NOMEM || code == ERR_LIMIT || code == ERR_DEVICE;
    if (code == ERR_OK || !about_gpu || c->gpu == ENGINE_GPU_ON) {
        *e = why;
        return code;
    }
    give_up_gpu(g, &why);
    return load_on(g, false, e);
}

/* Those that came while the model loaded were not checked against it; those that came before a GPU
 * failed were against the context that it had room for. */
static void check_waiting(struct engine *g)
{
    list_each_safe(it, &g->run.waiting) {
        struct engine_job *job = list_entry(it, struct engine_job, waiting);
        struct err e = {.code = ERR_OK};
        if (job->checked_ctx == g->run.n_ctx)
            continue;
        job->checked_ctx = g->run.n_ctx;
        if (engine_request_check_model(&job->request.run, g->model->shape.n_vocab, g->run.n_ctx,
                                       &e) != ERR_OK)
            engine_run_fail_job(&g->run, job, &e);
    }
}

static const char *gpu_name(const struct engine *g)
{
    const struct k_ops *ops = k_ops(g->devices.gpu);
    return ops->describe != NULL ? ops->describe(g->devices.gpu) : ops->name;
}

static void log_tiers(const struct engine *g)
{
    const struct engine_experts *x = g->run.experts;
    log_info("engine", "tiers",
             "ram_budget=%llu slots_bytes=%llu experts=%u experts_bytes=%llu all_fit=%d locked=%d "
             "ssd=\"%s\"",
             (unsigned long long)g->run.budget.total, (unsigned long long)x->ram.bytes,
             x->n_experts, (unsigned long long)g->model->experts_bytes, x->all_fit, x->ram.locked,
             tier_ssd_about(x->ssd));
    if (g->run.gpu) {
        const struct engine_split_rates *r = &g->run.hybrid.rates;
        log_info("engine", "gpu",
                 "device=\"%s\" vram_budget=%llu islands_bytes=%llu all_fit=%d pinned=%d "
                 "link_mb_s=%.0f gpu_mb_s=%.0f cpu_mb_s=%.0f sync_us=%.1f",
                 gpu_name(g), (unsigned long long)g->run.vram.total,
                 (unsigned long long)g->run.vram.islands, g->run.vram.all_resident,
                 g->run.islands.pinned, r->link / 1e6, r->gpu / 1e6, r->cpu / 1e6,
                 r->sync_ns / 1e3);
    }
    if (!x->ram.locked)
        log_warn("engine", "not_locked", "reason=\"%s\" hint=\"the system may swap experts out\"",
                 x->ram.refusal);
}

static void load_model(struct engine *g)
{
    struct err e = {.code = ERR_OK};
    on_progress(g, 0);
    set_state(g, PROTO_LOADING, "");
    g->unread_ns = 0;
    if (!g->gpu_dropped)
        set_degraded(g, ""); /* why an earlier try did without the GPU */
    if (load(g, &e) == ERR_OK) {
        on_progress(g, 100);
        set_state(g, PROTO_SERVING, "");
        log_info("engine", "serving",
                 "model=%s context=%u kv_pages=%u weights_bytes=%llu backend=%s threads=%u",
                 g->model->shape.name, g->run.n_ctx, g->run.pages.n,
                 (unsigned long long)g->model->weights_bytes, g->snapshot.backend,
                 k_threads(g->devices.cpu));
        log_tiers(g);
        if (g->run.n_ctx < g->config.context)
            log_warn("engine", "context_smaller", "context=%u asked=%u model=%u kv_pages=%u",
                     g->run.n_ctx, g->config.context, g->model->shape.n_ctx_train, g->run.pages.n);
        return;
    }
    unload(g);
    if (e.code == ERR_CANCELLED)
        return;
    set_state(g, PROTO_FAILED, e.text);
}

/* What runs is computed again by the CPU, with the same bits. */
static void go_on_without_gpu(struct engine *g)
{
    struct err e = {.code = ERR_OK};
    unload(g);
    if (load(g, &e) == ERR_OK) {
        on_progress(g, 100);
        log_tiers(g);
        return;
    }
    unload(g);
    engine_run_fail_all(&g->run, &e);
    if (e.code != ERR_CANCELLED)
        set_state(g, PROTO_FAILED, e.text);
}

/* The GPU failed. What runs is computed again by the CPU, with the same bits; where the process can
 * never use the GPU again, it ends instead, and whoever waits is answered by the next one. */
static void drop_gpu(struct engine *g)
{
    const struct k_ops *ops = k_ops(g->devices.gpu);
    struct err why = {.code = ERR_OK};
    g->gpu_dropped = true;
    g->gpu_lost = ops->lost != NULL && ops->lost(g->devices.gpu, &why);
    log_error("engine", "gpu_failed", "reason=\"%s\" action=\"%s\"",
              why.code != ERR_OK ? why.text : "a step failed",
              g->gpu_lost ? "this process ends" : "continuing: the CPU computes all of it again");
    set_degraded(g, why.code != ERR_OK ? why.text : "the GPU failed");
    if (g->gpu_lost) {
        pthread_mutex_lock(&g->lock);
        g->facts.gpu_lost = true;
        pthread_mutex_unlock(&g->lock);
        engine_mail_send_state(&g->mail);
        return;
    }
    go_on_without_gpu(g);
}

/* Other programs fill the GPU, and no island is left to give back. */
static void leave_gpu(struct engine *g)
{
    const struct governor *v = &g->govern.governor;
    g->gpu_dropped = true;
    log_error("governor", "gpu_given_up",
              "used_bytes=%llu total_bytes=%llu limit_percent=%u "
              "action=\"continuing: the CPU computes all of it again, until isletd is restarted\"",
              (unsigned long long)v->used, (unsigned long long)v->total,
              v->limits.critical_percent);
    set_degraded(g, "other programs fill the GPU's memory: the CPU computes alone");
    go_on_without_gpu(g);
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
    set_degraded(g, v->why_slower);
    set_pause(g, v->actions.pause);
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
    if (atomic_load(&g->drain)) {
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
    if (g->model == NULL) {
        struct err e = {.code = ERR_OK};
        (void)err_set(&e, ERR_BUSY, "the model is not loaded");
        engine_run_fail_all(&g->run, &e);
        engine_commands_refuse(&g->commands, &e);
        return false;
    }
    check_waiting(g);
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
    return more;
}

static void *engine_main(void *argument)
{
    struct engine *g = argument;
    pthread_setname_np(pthread_self(), "engine");
    atomic_store(&g->load_again, true);
    while (!atomic_load(&g->stop)) {
        if (atomic_exchange(&g->load_again, false) && g->model == NULL) {
            g->gpu_dropped = false; /* the CPU alone cannot serve it */
            load_model(g);
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
    pthread_mutex_destroy(&g->lock);
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
    pthread_mutex_init(&g->lock, NULL);
    g->run.config = &g->config;
    g->run.mail = &g->mail;
    g->mail.notify = config->notify;
    g->mail.notify_context = config->notify_context;
    g->facts.max_sequences = config->max_sequences;
    g->facts.prefill_chunk = config->prefill_chunk;
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
    if (state_of(g) != PROTO_FAILED)
        return;
    atomic_store(&g->load_again, true);
    queue_wake(g->submitted);
}

void engine_drain(struct engine *g)
{
    atomic_store(&g->drain, true);
    if (state_of(g) == PROTO_SERVING) /* else when the model is loaded */
        set_state(g, PROTO_DRAINING, "");
}

/* Does it take anything now? */
static enum err_code check_open(struct engine *g, const struct engine_facts *facts, struct err *e)
{
    if (atomic_load(&g->drain))
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
    return atomic_load(&g->heartbeat);
}
