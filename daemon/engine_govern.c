#include "engine_govern.h"

#include <string.h>

#include "kernels.h"
#include "log.h"

enum {
    PATIENCE = 4, /* periods without a fresh reading */
    NEVER_PERCENT = 100,
    NEVER_CELSIUS = 1000
};

static const struct governor_readings nothing = {.temperature = GOVERNOR_UNKNOWN,
                                                 .power_mw = GOVERNOR_UNKNOWN,
                                                 .utilization_percent = GOVERNOR_UNKNOWN};

static void say_no_sensors(struct engine_govern *v, const struct err *why)
{
    if (!v->no_sensors_said)
        log_info("governor", "no_sensors",
                 "reason=\"%s\" hint=\"heat is not known, memory is as the GPU tells it\"",
                 why->text);
    v->no_sensors_said = true;
}

void engine_govern_start(struct engine_govern *v, const struct engine_config *config,
                         const struct engine_run *run, struct k_device *gpu)
{
    const uint32_t asked = config->governor_period_ms;
    const uint32_t period_ms = asked != 0 ? asked : ENGINE_GOVERN_PERIOD_MS;
    const uint32_t warn = config->governor_warn, critical = config->governor_critical;
    const uint32_t high = config->governor_temp_high;
    const struct governor_limits limits = {.warn_percent = warn != 0 ? warn : NEVER_PERCENT,
                                           .critical_percent =
                                               critical != 0 ? critical : NEVER_PERCENT,
                                           .temp_high = high != 0 ? (int32_t)high : NEVER_CELSIUS,
                                           .temp_low = (int32_t)config->governor_temp_low,
                                           .chunk_bytes = K_CHUNK_BYTES};
    struct err why = {.code = ERR_OK};
    *v = (struct engine_govern){.readings = nothing,
                                .active = true,
                                .period_ns = period_ms * 1000000ull,
                                .given_back = v->given_back,
                                .taken_again = v->taken_again,
                                .no_sensors_said = v->no_sensors_said};
    governor_start(&v->governor, &limits);
    if (limits.temp_low > limits.temp_high)
        log_warn("governor", "temp_low_cut", "temp_low=%d temp_high=%d", limits.temp_low,
                 limits.temp_high);
    if (limits.warn_percent > limits.critical_percent)
        log_warn("governor", "warn_cut", "warn=%u critical=%u", limits.warn_percent,
                 limits.critical_percent);
    if (config->sensors == NULL || run->ops->bus_id == NULL)
        return;
    if (governor_sensors_start(config->sensors, run->ops->bus_id(gpu), period_ms, &v->sensors,
                               &why) != ERR_OK)
        say_no_sensors(v, &why);
}

void engine_govern_stop(struct engine_govern *v)
{
    governor_sensors_stop(v->sensors);
    v->sensors = NULL;
    v->active = false;
    v->actions = (struct governor_actions){.batch = 0};
    v->readings = nothing;
    v->why_slower[0] = '\0';
}

/* False: it is not yet time for the next readings. */
static bool take_readings(struct engine_govern *v, struct engine_run *run, struct k_device *gpu,
                          uint64_t now_ns)
{
    struct err why;
    const bool fresh = v->sensors != NULL && governor_sensors_take(v->sensors, &v->readings);
    if (!fresh && now_ns < v->due_ns)
        return false;
    v->due_ns = now_ns + v->period_ns * (fresh ? PATIENCE : 1);
    if (!fresh)
        v->readings = nothing;
    if (v->sensors != NULL && governor_sensors_failed(v->sensors, &why)) {
        say_no_sensors(v, &why);
        governor_sensors_stop(v->sensors);
        v->sensors = NULL;
    }
    if (v->readings.vram_total == 0 && run->ops->memory != NULL)
        run->ops->memory(gpu, &v->readings.vram_free, &v->readings.vram_total);
    return true;
}

static void log_changes(const struct engine_govern *v, const struct governor *before,
                        const struct governor_actions *a)
{
    const struct governor *g = &v->governor;
    if (g->hot && !before->hot)
        log_warn("governor", "gpu_hot", "celsius=%d limit=%d action=batch sequences=%u",
                 g->temperature, g->limits.temp_high, a->batch);
    if (!g->hot && before->hot)
        log_info("governor", "gpu_cool", "celsius=%d limit=%d", g->temperature, g->limits.temp_low);
    if (a->pause && !v->actions.pause)
        log_warn("governor", "vram_high", "used_bytes=%llu total_bytes=%llu action=pause",
                 (unsigned long long)g->used, (unsigned long long)g->total);
    if (!a->pause && v->actions.pause)
        log_info("governor", "vram_steady", "used_bytes=%llu total_bytes=%llu action=resume",
                 (unsigned long long)g->used, (unsigned long long)g->total);
}

/* Chunks go, or come. */
static void move_chunks(struct engine_govern *v, struct engine_run *run,
                        const struct governor_actions *a, uint64_t now_ns)
{
    struct engine_islands *is = &run->islands;
    const uint32_t held = is->vram.chunks_held;
    struct err e = {.code = ERR_OK};
    enum err_code code = ERR_OK;
    if (a->chunks_return > 0)
        code = engine_islands_give_back(is, a->chunks_return);
    if (a->chunks_take > 0)
        code = engine_islands_take_again(is, a->chunks_take, &e);
    const uint32_t now = is->vram.chunks_held;
    v->given_back += held > now ? held - now : 0;
    v->taken_again += now > held ? now - held : 0;
    if (code == ERR_NOMEM)
        governor_refused(&v->governor, now_ns);
    else
        run->gpu_failed |= code != ERR_OK;
    if (now != held)
        log_info("governor", now < held ? "islands_given_back" : "islands_taken_again",
                 "chunks=%u held=%u of=%u used_bytes=%llu total_bytes=%llu",
                 now < held ? held - now : now - held, now, is->vram.chunks,
                 (unsigned long long)v->governor.used, (unsigned long long)v->governor.total);
}

/* Chunks that can be given back: none where no expert fits in what there is. */
static uint32_t chunks_of(const struct engine_run *run)
{
    return run->islands.cache != NULL ? run->islands.vram.chunks : 0;
}

static uint32_t held_of(const struct engine_run *run)
{
    return run->islands.cache != NULL ? run->islands.vram.chunks_held : 0;
}

bool engine_govern_turn(struct engine_govern *v, struct engine_run *run, uint64_t now_ns)
{
    const struct governor before = v->governor;
    struct governor_actions a;
    char why[sizeof v->why_slower];
    if (!v->active || !run->gpu || run->gpu_failed ||
        !take_readings(v, run, run->islands.device, now_ns))
        return false;
    governor_update(&v->governor, &v->readings, chunks_of(run), held_of(run), now_ns, &a);
    log_changes(v, &before, &a);
    move_chunks(v, run, &a, now_ns);
    governor_describe(&v->governor, chunks_of(run), held_of(run), why, sizeof why);
    const bool changed = strcmp(why, v->why_slower) != 0 || a.pause != v->actions.pause || a.drop;
    memcpy(v->why_slower, why, sizeof why);
    v->actions = a;
    run->batch_limit = a.batch;
    return changed;
}

static uint64_t shown(int32_t value)
{
    return value > 0 ? (uint64_t)value : 0;
}

void engine_govern_count(const struct engine_govern *v, const struct engine_run *run,
                         struct proto_status *ret)
{
    const bool active = v->active && run->gpu;
    ret->gpu_temperature_celsius = active ? shown(v->governor.temperature) : 0;
    ret->gpu_power_milliwatts = shown(v->readings.power_mw);
    ret->gpu_utilization_percent = shown(v->readings.utilization_percent);
    ret->gpu_memory_total_bytes = active ? v->governor.total : 0;
    ret->gpu_memory_used_bytes = active ? v->governor.used : 0;
    ret->governor_memory_level = active ? v->governor.memory : 0;
    ret->governor_paused = v->actions.pause;
    ret->governor_batch_limit = v->actions.batch;
    ret->vram_given_back_bytes =
        active
            ? (uint64_t)(run->islands.vram.chunks - run->islands.vram.chunks_held) * K_CHUNK_BYTES
            : 0;
    ret->vram_chunks_given_back_total = v->given_back;
    ret->vram_chunks_taken_again_total = v->taken_again;
}
