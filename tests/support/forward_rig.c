#include "forward_rig.h"

enum {
    THREADS = 2,
    DEPTH = 4,
    LEAST_ARENA = 1 << 20 /* the dense weights land there first */
};

/* The device that computes all but some experts. */
static struct k_device *main_device(const struct forward_rig *r)
{
    return r->gpu != NULL ? r->gpu : r->device;
}

static struct k_stream *main_stream(const struct forward_rig *r)
{
    return r->gpu != NULL ? r->gpu_stream : r->stream;
}

static enum err_code start_gpu(struct forward_rig *r, const struct forward_rig_gpu *gpu,
                               uint32_t max_rows, struct err *e)
{
    uint64_t all = 0, islands = tier_vram_least(r->model);
    for (uint32_t i = 0; i < r->model->shape.n_layer; i++)
        all += r->model->shape.n_expert * tier_vram_island_bytes(r->model, i);
    if (gpu->islands_bytes == UINT64_MAX)
        islands = all > islands ? all : islands;
    else
        islands += gpu->islands_bytes;
    const enum err_code code =
        engine_islands_start(&r->islands,
                             &(struct engine_islands_options){
                                 .device = r->gpu,
                                 .stream = r->gpu_stream,
                                 .experts = r->experts,
                                 .islands_bytes = islands / EXPERT_CACHE_ALIGN * EXPERT_CACHE_ALIGN,
                                 .budget = 768 * tier_vram_island_bytes(r->model, 0),
                                 .max_rows = max_rows},
                             e);
    return code != ERR_OK
               ? code
               : engine_hybrid_start(&r->hybrid,
                                     &(struct engine_hybrid_options){.cpu = r->device,
                                                                     .gpu = r->gpu,
                                                                     .cpu_stream = r->stream,
                                                                     .model = r->model,
                                                                     .max_rows = max_rows,
                                                                     .ticks = ticks_real(),
                                                                     .rates = gpu->rates},
                                     e);
}

static enum err_code open_model(struct forward_rig *r, struct model_loading *loading,
                                uint64_t arena, const struct tier_read_source *source,
                                const struct forward_rig_gpu *gpu, uint32_t max_rows, struct err *e)
{
    enum err_code code = model_open(loading, &r->model, e);
    if (code != ERR_OK)
        return code;
    const uint64_t all =
        r->model->experts_bytes > LEAST_ARENA ? r->model->experts_bytes : LEAST_ARENA;
    const struct engine_experts_options options = {.arena_bytes = arena != 0 ? arena : all,
                                                   .depth = DEPTH,
                                                   .max_rows = max_rows,
                                                   .source = source};
    code = engine_experts_new(r->device, r->stream, r->model, &options, &r->experts, e);
    if (code == ERR_OK && gpu != NULL)
        code = start_gpu(r, gpu, max_rows, e);
    if (code != ERR_OK)
        return code;
    loading->ssd = r->experts->ssd;
    loading->arena = r->experts->ram.arena;
    loading->arena_bytes = r->experts->ram.bytes;
    loading->total_bytes = r->model->weights_bytes;
    if (gpu != NULL)
        loading->staging = (struct k_span){r->islands.vram.memory, 0};
    return model_load(r->model, loading, e);
}

enum err_code forward_rig_open(const char *path, uint64_t arena,
                               const struct tier_read_source *source,
                               const struct engine_forward_sizes *sizes,
                               const struct forward_rig_gpu *gpu, struct forward_rig *ret,
                               struct err *e)
{
    *ret = (struct forward_rig){.gpu = gpu != NULL ? gpu->device : NULL};
    enum err_code code = k_open(K_LEVEL_AUTO, THREADS, &ret->device, e);
    if (code == ERR_OK)
        code = k_ops(ret->device)->stream_new(ret->device, &ret->stream, e);
    if (code == ERR_OK && gpu != NULL)
        code = k_ops(ret->gpu)->stream_new(ret->gpu, &ret->gpu_stream, e);
    struct model_loading loading = {
        .path = path, .device = main_device(ret), .stream = main_stream(ret), .host = ret->device};
    if (code == ERR_OK)
        code = open_model(ret, &loading, arena, source, gpu, sizes->max_rows, e);
    if (code == ERR_OK)
        code = k_ops(main_device(ret))
                   ->buffer_new(main_device(ret),
                                (uint64_t)sizes->max_sequences * sizes->max_pages *
                                    engine_forward_page_bytes(ret->model, K_KV_F16),
                                &ret->pool, e);
    const struct engine_forward_tiers tiers = {.experts = ret->experts,
                                               .islands = gpu != NULL ? &ret->islands : NULL,
                                               .hybrid = gpu != NULL ? &ret->hybrid : NULL};
    if (code == ERR_OK)
        code = engine_forward_new(main_device(ret), main_stream(ret), &tiers, sizes, ret->pool,
                                  &ret->forward, e);
    return code == ERR_OK ? engine_forward_record(ret->forward, e) : code;
}

void forward_rig_close(struct forward_rig *r)
{
    engine_forward_free(r->forward);
    engine_hybrid_done(&r->hybrid);
    engine_islands_done(&r->islands);
    engine_experts_free(r->experts);
    if (r->pool != NULL)
        k_ops(main_device(r))->buffer_free(r->pool);
    model_close(r->model);
    if (r->gpu_stream != NULL)
        k_ops(r->gpu)->stream_free(r->gpu_stream);
    k_close(r->gpu);
    if (r->stream != NULL)
        k_ops(r->device)->stream_free(r->stream);
    k_close(r->device);
}
