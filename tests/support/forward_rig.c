#include "forward_rig.h"

enum {
    THREADS = 2,
    DEPTH = 4,
    LEAST_ARENA = 1 << 20 /* the dense weights land there first */
};

static enum err_code open_model(struct forward_rig *r, struct model_loading *loading,
                                uint64_t arena, const struct tier_read_source *source,
                                uint32_t max_rows, struct err *e)
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
    if (code != ERR_OK)
        return code;
    loading->ssd = r->experts->ssd;
    loading->arena = r->experts->ram.arena;
    loading->arena_bytes = r->experts->ram.bytes;
    loading->total_bytes = r->model->weights_bytes;
    return model_load(r->model, loading, e);
}

enum err_code forward_rig_open(const char *path, uint64_t arena,
                               const struct tier_read_source *source,
                               const struct engine_forward_sizes *sizes, struct forward_rig *ret,
                               struct err *e)
{
    *ret = (struct forward_rig){.device = NULL};
    enum err_code code = k_open(K_LEVEL_AUTO, THREADS, &ret->device, e);
    if (code == ERR_OK)
        code = k_ops(ret->device)->stream_new(ret->device, &ret->stream, e);
    struct model_loading loading = {.path = path, .device = ret->device, .stream = ret->stream};
    if (code == ERR_OK)
        code = open_model(ret, &loading, arena, source, sizes->max_rows, e);
    if (code == ERR_OK)
        code = k_ops(ret->device)
                   ->buffer_new(ret->device,
                                (uint64_t)sizes->max_sequences * sizes->max_pages *
                                    engine_forward_page_bytes(ret->model, K_KV_F16),
                                &ret->pool, e);
    if (code == ERR_OK)
        code = engine_forward_new(ret->device, ret->stream, ret->experts, sizes, ret->pool,
                                  &ret->forward, e);
    return code;
}

void forward_rig_close(struct forward_rig *r)
{
    engine_forward_free(r->forward);
    engine_experts_free(r->experts);
    if (r->pool != NULL)
        k_ops(r->device)->buffer_free(r->pool);
    model_close(r->model);
    if (r->stream != NULL)
        k_ops(r->device)->stream_free(r->stream);
    if (r->device != NULL)
        k_close(r->device);
}
