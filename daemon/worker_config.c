#include "worker_config.h"

#include "settings.h"

/* 0: auto. */
static uint64_t bytes_or_auto(const struct settings *s, enum setting_id id)
{
    return settings_is_auto(s, id) ? 0 : settings_bytes(s, id);
}

struct engine_config worker_config_engine(const struct settings *s)
{
    return (struct engine_config){
        .model_path = settings_text(s, SETTING_model_path),
        .cpu_level = settings_choice(s, SETTING_compute_cpu_level),
        .threads = (uint32_t)settings_count(s, SETTING_compute_threads),
        .ram_budget = bytes_or_auto(s, SETTING_memory_ram_budget),
        .kv_budget = bytes_or_auto(s, SETTING_memory_kv_budget),
        .kv_type = settings_choice(s, SETTING_memory_kv_type),
        .trace_path = settings_text(s, SETTING_route_trace),
        .ssd_io = settings_choice(s, SETTING_ssd_io),
        .ssd_depth = (uint32_t)settings_count(s, SETTING_ssd_depth),
        .context = (uint32_t)settings_count(s, SETTING_model_context),
        .max_sequences = (uint32_t)settings_count(s, SETTING_batch_max_sequences),
        .prefill_chunk = (uint32_t)settings_count(s, SETTING_batch_prefill_chunk),
        .ticks = ticks_real(),
    };
}
