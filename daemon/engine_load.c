#include "engine_load.h"

#include "engine_plan.h"
#include "engine_status.h"

static void go_deaf(struct engine_load *l, bool deaf)
{
    atomic_store(&l->deaf_ns, deaf ? ticks_ns(l->config->ticks) : 0);
}

uint64_t engine_load_pulse(const struct engine_load *l)
{
    const uint64_t since = atomic_load(&l->deaf_ns), now = ticks_ns(l->config->ticks);
    const uint64_t ms = since == 0 || now < since ? 0 : (now - since) / 1000000u;
    return ms < ENGINE_LOAD_PATIENCE_MS ? ms : ENGINE_LOAD_PATIENCE_MS;
}

/* The dense weights, and a small model's experts too: it is then ready at full speed, and a damaged
 * file is found now. A large one's are read when they are needed, or while nobody asks. */
static enum err_code read_weights(struct engine_load *l, struct model_loading *loading,
                                  struct err *e)
{
    struct engine_run *run = l->run;
    const uint64_t experts = l->model->experts_bytes;
    const bool fill = engine_plan_fills_at_start(&run->budget, experts);
    loading->ssd = run->experts->ssd;
    loading->arena = run->experts->ram.arena;
    loading->arena_bytes = run->experts->ram.bytes;
    loading->total_bytes = l->model->weights_bytes + (fill ? experts : 0);
    if (run->gpu)
        loading->staging = (struct k_span){run->islands.vram.memory, 0};
    enum err_code code = model_load(l->model, loading, e);
    if (code == ERR_OK && fill && run->experts->all_fit)
        code = engine_experts_fill(run->experts, loading, e);
    if (code == ERR_OK && fill && run->gpu)
        code = engine_islands_fill(&run->islands, loading, e);
    return code;
}

static enum err_code open_devices(struct engine_load *l, bool gpu, struct err *e)
{
    const struct engine_config *c = l->config;
    struct engine_run_devices *d = &l->devices;
    enum err_code code = k_open((enum k_level)c->cpu_level, c->threads, &d->cpu, e);
    if (code == ERR_OK)
        code = k_ops(d->cpu)->stream_new(d->cpu, &d->cpu_stream, e);
    if (code == ERR_OK && gpu)
        code = c->open_gpu(c->open_gpu_context, &d->gpu, e);
    if (code == ERR_OK && gpu)
        code = k_ops(d->gpu)->stream_new(d->gpu, &d->gpu_stream, e);
    return code;
}

enum err_code engine_load_on(struct engine_load *l, bool gpu, struct err *e)
{
    struct engine_run_devices *d = &l->devices;
    struct model_loading loading = {.path = l->config->model_path,
                                    .progress = l->progress,
                                    .stopped = l->stopped,
                                    .context = l->context};
    go_deaf(l, gpu);
    enum err_code code = open_devices(l, gpu, e);
    loading.device = gpu ? d->gpu : d->cpu;
    loading.stream = gpu ? d->gpu_stream : d->cpu_stream;
    loading.host = d->cpu;
    if (code == ERR_OK)
        code = model_open(&loading, &l->model, e);
    if (code == ERR_OK)
        code = engine_run_start(l->run, d, l->model, e);
    go_deaf(l, false);
    if (code == ERR_OK)
        code = read_weights(l, &loading, e);
    if (code == ERR_OK)
        code = engine_forward_record(l->run->forward, e);
    if (code != ERR_OK)
        return code;
    l->run->forward->heartbeat = l->run->experts->heartbeat = l->heartbeat;
    l->run->count.cpu_threads = k_threads(d->cpu);
    return ERR_OK;
}

enum err_code engine_load_try_gpu(struct engine_load *l, struct err *e)
{
    const struct engine_config *c = l->config;
    struct engine_plan_machine machine = {.cpu = l->devices.cpu};
    struct k_device *gpu = NULL;
    struct engine_plan plan;
    go_deaf(l, true);
    enum err_code code = c->open_gpu(c->open_gpu_context, &gpu, e);
    machine.gpu = gpu;
    if (code == ERR_OK && k_ops(gpu)->memory != NULL)
        k_ops(gpu)->memory(gpu, &machine.vram_free, &machine.vram_total);
    if (code == ERR_OK) /* what RAM there is, is known once the CPU's weights are gone */
        code = engine_plan_least(c, &machine, l->model, 1, &plan, e);
    k_close(gpu);
    go_deaf(l, false);
    return code;
}

void engine_load_leave(struct engine_load *l)
{
    struct engine_run_devices *d = &l->devices;
    engine_status_keep(l->run);
    engine_run_leave(l->run);
    model_close(l->model);
    l->model = NULL;
    if (d->gpu_stream != NULL)
        k_ops(d->gpu)->stream_free(d->gpu_stream);
    k_close(d->gpu);
    if (d->cpu_stream != NULL)
        k_ops(d->cpu)->stream_free(d->cpu_stream);
    k_close(d->cpu);
    *d = (struct engine_run_devices){.cpu = NULL};
}
