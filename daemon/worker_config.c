#include "worker_config.h"

#include <stdio.h>
#include <stdlib.h>

#include "governor_nvml.h"
#include "kernels.h"
#include "settings.h"

/* 0: auto. */
static uint64_t bytes_or_auto(const struct settings *s, enum setting_id id)
{
    return settings_is_auto(s, id) ? 0 : settings_bytes(s, id);
}

/* For tests, as ISLET_CRASH_AT: ISLET_GPU_FAULT=n:error makes the nth call of the device's library
 * fail with that number, once in the life of the process. */
static struct k_cuda_fault asked_fault(void)
{
    const char *asked = getenv("ISLET_GPU_FAULT");
    unsigned long long nth;
    struct k_cuda_fault fault = {.nth = 0};
    if (asked != NULL && sscanf(asked, "%llu:%d", &nth, &fault.error) == 2)
        fault.nth = nth;
    unsetenv("ISLET_GPU_FAULT");
    return fault;
}

static enum err_code open_gpu(void *context, struct k_device **ret, struct err *e)
{
    const struct k_cuda_options o = {.ordinal = -1, .fault = asked_fault()};
    struct err why = {.code = ERR_OK};
    (void)context;
    const enum err_code code = k_open_cuda(&o, ret, &why);
    if (code == ERR_OK)
        return code;
    /* Who has the GPU's kernels wants them used: that they cannot be is to be told. */
    const bool wanted = code == ERR_UNSUPPORTED && k_cuda_open_finds(o.file);
    return err_set(e, wanted ? ERR_DEVICE : code, "%s", why.text);
}

struct engine_config worker_config_engine(const struct settings *s)
{
    return (struct engine_config){
        .model_path = settings_text(s, SETTING_model_path),
        .cpu_level = settings_choice(s, SETTING_compute_cpu_level),
        .threads = (uint32_t)settings_count(s, SETTING_compute_threads),
        .ram_budget = bytes_or_auto(s, SETTING_memory_ram_budget),
        .gpu = settings_choice(s, SETTING_compute_gpu),
        .open_gpu = open_gpu,
        .vram_budget = bytes_or_auto(s, SETTING_memory_vram_budget),
        .kv_budget = bytes_or_auto(s, SETTING_memory_kv_budget),
        .kv_type = settings_choice(s, SETTING_memory_kv_type),
        .trace_path = settings_text(s, SETTING_route_trace),
        .ssd_io = settings_choice(s, SETTING_ssd_io),
        .ssd_depth = (uint32_t)settings_count(s, SETTING_ssd_depth),
        .context = (uint32_t)settings_count(s, SETTING_model_context),
        .max_sequences = (uint32_t)settings_count(s, SETTING_batch_max_sequences),
        .prefill_chunk = (uint32_t)settings_count(s, SETTING_batch_prefill_chunk),
        .ticks = ticks_real(),
        .sensors = &governor_nvml_source,
        .governor_warn = (uint32_t)settings_count(s, SETTING_governor_warn),
        .governor_critical = (uint32_t)settings_count(s, SETTING_governor_critical),
        .governor_temp_high = (uint32_t)settings_count(s, SETTING_governor_temp_high),
        .governor_temp_low = (uint32_t)settings_count(s, SETTING_governor_temp_low),
    };
}
