#include "engine_experts.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

#include "alloc.h"
#include "fault.h"
#include "log.h"

enum {
    BATCH_ROWS = 256, /* given out at once while reads are under way: some milliseconds' work */
    RESULTS = 16,
    IDLE_READS = 4,
    AHEAD_BYTES = 2 << 20 /* under way before a guess begins no read: what keeps a disk busy until
                           * the engine looks again. With more, what a layer needs waits for reads
                           * of guesses: 81 ms a token instead of 78, and 95 without guesses */
};

/* ---- start ---- */

/* Bytes of the arrays, laid out in one block at `at`; NULL: only counts. */
static size_t lay_out(struct engine_experts *x, char *at, uint32_t n_experts, uint32_t n_expert,
                      uint32_t max_rows)
{
    const struct {
        void **to;
        size_t bytes;
    } arrays[] = {{(void **)&x->row_bytes, max_rows * sizeof(*x->row_bytes)},
                  {(void **)&x->row_misses, max_rows * sizeof(*x->row_misses)},
                  {(void **)&x->group_of, n_expert * sizeof(*x->group_of)},
                  {(void **)&x->missing, n_expert * sizeof(*x->missing)},
                  {(void **)&x->ready, n_expert * sizeof(*x->ready)},
                  {(void **)&x->selected, n_expert * sizeof(*x->selected)},
                  {(void **)&x->expected, n_experts * sizeof(*x->expected)},
                  {(void **)&x->held, n_experts * sizeof(*x->held)},
                  {(void **)&x->is_held, n_experts * sizeof(*x->is_held)},
                  {(void **)&x->row_failed, max_rows * sizeof(*x->row_failed)},
                  {(void **)&x->sound, n_experts}};
    size_t n = 0;
    for (size_t i = 0; i < sizeof(arrays) / sizeof(arrays[0]); i++) {
        if (at != NULL)
            *arrays[i].to = at + n;
        n += (arrays[i].bytes + 7) & ~(size_t)7;
    }
    return n;
}

uint64_t engine_experts_bytes(const struct model *m, uint32_t max_rows)
{
    struct engine_experts x = {.model = NULL};
    return lay_out(&x, NULL, m->shape.n_layer * m->shape.n_expert, m->shape.n_expert, max_rows);
}

enum err_code engine_experts_open_ssd(const struct model *m,
                                      const struct engine_experts_options *options, void *arena,
                                      struct tier_ssd **ret, struct err *e)
{
    const struct gguf_file *file = m->file;
    const char **paths = alloc_zero(ALLOC_MODEL, file->n_files, sizeof(*paths));
    char(*names)[GGUF_FILE_MAX_PATH] = alloc_zero(ALLOC_MODEL, file->n_files, sizeof(*names));
    enum err_code code = ERR_OK;
    if (paths == NULL || names == NULL)
        code = err_set(e, ERR_NOMEM, "no memory for %u file names", file->n_files);
    for (uint32_t i = 0; i < file->n_files && code == ERR_OK; i++) {
        gguf_file_part_path(file, i, names[i]);
        paths[i] = names[i];
    }
    if (code == ERR_OK)
        code = tier_ssd_open(&(struct tier_ssd_options){.paths = paths,
                                                        .n_files = file->n_files,
                                                        .fds = file->fds,
                                                        .io = options->io,
                                                        .depth = options->depth,
                                                        .source = options->source,
                                                        .arena = arena,
                                                        .arena_bytes = options->arena_bytes},
                             ret, e);
    alloc_free(names);
    alloc_free(paths);
    return code;
}

enum err_code engine_experts_new(struct k_device *device, struct k_stream *stream, struct model *m,
                                 const struct engine_experts_options *options,
                                 struct engine_experts **ret, struct err *e)
{
    const uint32_t n_expert = m->shape.n_expert, n = m->shape.n_layer * n_expert;
    const size_t head = (sizeof(struct engine_experts) + 7) & ~(size_t)7;
    char *block =
        alloc_zero(ALLOC_WORK, 1, head + (size_t)engine_experts_bytes(m, options->max_rows));
    if (block == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the table of %u experts", n);
    struct engine_experts *x = (struct engine_experts *)(void *)block;
    lay_out(x, block + head, n, n_expert, options->max_rows);
    x->model = m;
    x->ops = k_ops(device);
    x->stream = stream;
    x->n_experts = n;
    x->all_fit = options->arena_bytes >= m->experts_bytes;
    enum err_code code =
        expert_cache_new(&(struct expert_cache_options){.n_layer = m->shape.n_layer,
                                                        .n_expert = n_expert,
                                                        .n_used = m->shape.n_expert_used,
                                                        .layer_bytes = m->expert_bytes,
                                                        .arena_bytes = options->arena_bytes},
                         &x->cache, e);
    if (code == ERR_OK)
        code = tier_ram_start(&x->ram, device, options->arena_bytes, e);
    if (code == ERR_OK)
        code = engine_experts_open_ssd(m, options, x->ops->buffer_host(x->ram.arena), &x->ssd, e);
    if (code == ERR_OK) {
        tier_ssd_reserved(x->ssd, atomic_load(&x->ram.reserved));
        *ret = x;
    } else {
        engine_experts_free(x);
    }
    return code;
}

void engine_experts_free(struct engine_experts *x)
{
    if (x == NULL)
        return;
    tier_ssd_close(x->ssd); /* before the memory that its reads go to */
    tier_ram_done(&x->ram);
    expert_cache_free(x->cache);
    alloc_free(x);
}

/* ---- reads ---- */

static const struct gguf_tensor *slice_tensor(const struct engine_experts *x, uint32_t layer, int i)
{
    const struct shape_layer *l = &x->model->tensors.layers[layer];
    return i == 0 ? l->gate : i == 1 ? l->up : l->down;
}

static uint32_t id_of(const struct engine_experts *x, uint32_t layer, uint32_t expert)
{
    return layer * x->model->shape.n_expert + expert;
}

/* Begins the read of an absent expert, of *ret_bytes (NULL: nobody is charged). False: no room in
 * the queue or among the slots. */
static bool start_read(struct engine_experts *x, uint32_t layer, uint32_t expert, bool pin,
                       uint64_t *ret_bytes)
{
    struct tier_ssd_part parts[TIER_SSD_PARTS];
    uint64_t place = 0;
    if (tier_ssd_room(x->ssd) == 0 || !expert_cache_reserve(x->cache, layer, expert, pin, &place))
        return false;
    model_expert_parts(x->model, layer, expert, place, parts);
    const uint64_t bytes = tier_ssd_start(x->ssd, id_of(x, layer, expert), parts, TIER_SSD_PARTS);
    if (ret_bytes != NULL)
        *ret_bytes = bytes;
    return true;
}

/* Values of an expert that came for the first time (A3). */
static enum err_code check_values(const struct engine_experts *x, uint32_t layer, uint32_t expert,
                                  const struct tier_ssd_part *parts, struct err *e)
{
    const uint8_t *arena = x->ops->buffer_host(x->ram.arena);
    for (int i = 0; i < TIER_SSD_PARTS; i++) {
        const struct gguf_tensor *t = slice_tensor(x, layer, i);
        const enum k_format format = (enum k_format)t->type;
        const uint64_t n =
            parts[i].bytes / k_format_block_bytes(format) * k_format_block_elements(format);
        const int64_t bad = k_find_invalid(format, arena + parts[i].place, n);
        if (bad >= 0)
            return err_set(e, ERR_FORMAT,
                           "%s: tensor %.*s has a value that is not finite in block %lld of expert "
                           "%u; the file is damaged, download it again",
                           gguf_file_label(x->model->file->path), (int)t->name.size, t->name.data,
                           (long long)bad, expert);
    }
    return ERR_OK;
}

static void fail_group(struct engine_experts *x, uint32_t group)
{
    const struct k_group *g = &x->groups[group];
    for (uint32_t i = 0; i < g->count; i++)
        x->row_failed[x->order[g->first + i] / x->model->shape.n_expert_used] = true;
    x->any_failed = true;
}

/* The kernels find the expert through the layer's table of slots. */
static void set_slots(struct engine_experts *x, uint32_t layer, uint32_t expert,
                      const struct tier_ssd_part *parts)
{
    const struct k_span table = x->model->layers[layer].experts.slots;
    const uint64_t slots[TIER_SSD_PARTS] = {parts[0].place, parts[1].place, parts[2].place};
    x->ops->upload(x->stream, (struct k_span){table.buffer, table.offset + expert * sizeof(slots)},
                   slots, sizeof(slots));
}

/* The read that failed was for one of the expert's slices, which share a tensor with others. */
static void name_tensor(const struct engine_experts *x, uint32_t layer, uint32_t expert,
                        const struct tier_ssd_part *parts, const struct tier_ssd_result *result,
                        struct err *e)
{
    for (int i = 0; i < TIER_SSD_PARTS; i++) {
        const struct tier_ssd_part *p = &parts[i];
        const struct gguf_tensor *t = slice_tensor(x, layer, i);
        if (p->file == result->file && p->offset < result->offset + result->bytes &&
            result->offset < p->offset + p->bytes) {
            (void)err_wrap(e, "expert %u of tensor %.*s", expert, (int)t->name.size, t->name.data);
            return;
        }
    }
}

/* A read ended: the expert is there, or its group fails. */
static void land(struct engine_experts *x, const struct tier_ssd_result *result,
                 const struct err *changed)
{
    const uint32_t n_expert = x->model->shape.n_expert;
    const uint32_t layer = (uint32_t)(result->id / n_expert), expert = result->id % n_expert;
    const bool waited = layer == x->layer && x->group_of[expert] != 0;
    const uint32_t group = waited ? x->group_of[expert] - 1 : 0;
    struct tier_ssd_part parts[TIER_SSD_PARTS];
    struct err e = changed->code != ERR_OK ? *changed : result->error;
    enum err_code code = changed->code != ERR_OK ? changed->code : result->code;
    model_expert_parts(x->model, layer, expert, expert_cache_place(x->cache, layer, expert), parts);
    if (changed->code == ERR_OK && result->code != ERR_OK)
        name_tensor(x, layer, expert, parts, result, &e);
    if (code == ERR_OK && !x->sound[result->id])
        code = check_values(x, layer, expert, parts, &e);
    if (code == ERR_OK) {
        x->sound[result->id] = 1;
        set_slots(x, layer, expert, parts);
        expert_cache_arrived(x->cache, layer, expert);
    } else {
        /* why rows failed is not hidden by a read that nobody waited for */
        if (waited || !x->any_failed || x->error.code == ERR_OK)
            x->error = e;
        expert_cache_failed(x->cache, layer, expert);
        x->is_held[result->id] = false;
        if (x->failed != NULL)
            x->failed(x->failed_context, (uint32_t)result->id, &e);
    }
    if (!waited)
        return;
    x->group_of[expert] = 0;
    x->n_waiting--;
    if (code == ERR_OK)
        x->ready[x->n_there++] = group;
    else
        fail_group(x, group);
}

/* Takes what has arrived. Returns how many reads ended. */
static uint32_t harvest(struct engine_experts *x, bool block)
{
    struct tier_ssd_result results[RESULTS];
    uint32_t n, all = 0;
    do {
        struct err changed = {.code = ERR_OK};
        n = tier_ssd_wait(x->ssd, block && all == 0, results, RESULTS);
        /* after the reads: what was written before them shows now */
        if (n > 0)
            changed.code = tier_ssd_check_files(x->ssd, &changed);
        for (uint32_t i = 0; i < n; i++)
            land(x, &results[i], &changed);
        all += n;
    } while (n == RESULTS);
    if (x->heartbeat != NULL && all > 0)
        atomic_fetch_add(x->heartbeat, 1);
    return all;
}

static bool is_above(const struct engine_experts *x, uint32_t layer, uint32_t expert)
{
    return x->above != NULL && expert_cache_state(x->above, layer, expert) == EXPERT_CACHE_READY;
}

static uint32_t row_of(const struct engine_experts *x, const struct k_group *g, uint32_t i)
{
    return x->order[g->first + i] / x->model->shape.n_expert_used;
}

/* The rows of a group share the bytes that are read for it, to the last one. */
static void charge_group(struct engine_experts *x, const struct k_group *g, uint64_t bytes)
{
    for (uint32_t i = 0; i < g->count; i++)
        x->row_bytes[row_of(x, g, i)] += bytes / g->count + (i < bytes % g->count);
}

/* What is read before anyone has chosen it is read for all rows of the step. */
static void charge_step(struct engine_experts *x, uint64_t bytes)
{
    const uint64_t share = bytes / x->n_rows, rest = bytes % x->n_rows;
    for (uint32_t i = 0; i < x->n_rows; i++)
        x->row_bytes[i] += share + (i < rest);
}

/* Is enough under way to keep the disk busy? */
static bool busy(const struct engine_experts *x, uint32_t layer)
{
    return expert_cache_count(x->cache).loading * x->model->expert_bytes[layer] >= AHEAD_BYTES;
}

/* Reads what layers behind this one are expected to choose. The reads hold pins until these have
 * chosen: the policy alone would rather keep what it has seen more often. */
static bool start_expected(struct engine_experts *x)
{
    const uint32_t n_expert = x->model->shape.n_expert;
    uint64_t bytes = 0;
    for (; x->next_expected < x->n_expected; x->next_expected++) {
        const uint32_t id = x->expected[x->next_expected];
        if (expert_cache_state(x->cache, id / n_expert, id % n_expert) != EXPERT_CACHE_ABSENT)
            continue;
        if (busy(x, id / n_expert) || x->n_held == x->n_experts ||
            !start_read(x, id / n_expert, id % n_expert, true, &bytes))
            return false;
        charge_step(x, bytes);
        x->held[x->n_held++] = id;
        x->guesses++;
        x->is_held[id] = true;
    }
    return true;
}

/* The guesses up to a layer have served. Those whose read failed are not held, even if they were
 * read again. */
static void release_held(struct engine_experts *x, uint32_t layer)
{
    const uint32_t n_expert = x->model->shape.n_expert;
    uint32_t held = 0, expected = 0;
    for (uint32_t i = 0; i < x->n_held; i++) {
        const uint32_t id = x->held[i];
        if (id / n_expert > layer) {
            x->held[held++] = id;
            continue;
        }
        if (x->is_held[id])
            expert_cache_unpin(x->cache, id / n_expert, id % n_expert);
        x->is_held[id] = false;
    }
    for (uint32_t i = x->next_expected; i < x->n_expected; i++)
        if (x->expected[i] / n_expert > layer)
            x->expected[expected++] = x->expected[i];
    x->n_held = held;
    x->n_expected = expected;
    x->next_expected = 0;
}

static void release_all_held(struct engine_experts *x)
{
    release_held(x, x->model->shape.n_layer);
}

/* Begins as many reads as there is room for: those that the layer misses, then those of layers
 * behind it. */
static void start_reads(struct engine_experts *x)
{
    uint64_t bytes = 0;
    while (x->next_missing < x->n_missing) {
        const uint32_t group = x->missing[x->next_missing], expert = x->groups[group].expert;
        if (!start_read(x, x->layer, expert, true, &bytes))
            return;
        charge_group(x, &x->groups[group], bytes);
        x->group_of[expert] = group + 1;
        x->n_waiting++;
        x->next_missing++;
    }
    if (!start_expected(x))
        return;
    for (; x->ahead && x->next_ahead < x->model->shape.n_expert; x->next_ahead++) {
        if (is_above(x, x->layer + 1, x->next_ahead) ||
            expert_cache_state(x->cache, x->layer + 1, x->next_ahead) != EXPERT_CACHE_ABSENT)
            continue;
        if (!start_read(x, x->layer + 1, x->next_ahead, false, &bytes))
            return;
        charge_step(x, bytes);
    }
}

/* ---- a layer ---- */

void engine_experts_step(struct engine_experts *x, uint32_t n_rows)
{
    tier_ssd_reserved(x->ssd, atomic_load(&x->ram.reserved));
    release_all_held(x); /* of a step that a device failure ended */
    x->n_rows = n_rows;
    memset(x->row_misses, 0, n_rows * sizeof(*x->row_misses));
    memset(x->row_bytes, 0, n_rows * sizeof(*x->row_bytes));
    memset(x->row_failed, 0, n_rows * sizeof(*x->row_failed));
    x->any_failed = false;
}

static bool all_there(const struct engine_experts *x)
{
    return x->all_fit && expert_cache_count(x->cache).resident == x->n_experts;
}

/* A group that the layer needs: READY, read already, or to be read. */
static void need(struct engine_experts *x, uint32_t g)
{
    const struct k_group *group = &x->groups[g];
    const uint32_t expert = group->expert;
    x->guesses_right += x->is_held[id_of(x, x->layer, expert)];
    switch (expert_cache_need(x->cache, x->layer, expert, group->count)) {
    case EXPERT_CACHE_READY:
        x->ready[x->n_there++] = g;
        return;
    case EXPERT_CACHE_LOADING:
        x->group_of[expert] = g + 1;
        x->n_waiting++;
        break;
    case EXPERT_CACHE_ABSENT:
        x->missing[x->n_missing++] = g;
        break;
    }
    for (uint32_t i = 0; i < group->count; i++)
        x->row_misses[row_of(x, group, i)]++;
}

void engine_experts_layer(struct engine_experts *x, const struct engine_experts_layer *layer)
{
    const uint32_t n = layer->wanted == NULL ? layer->n_groups : layer->n_wanted;
    x->layer = layer->index;
    x->groups = layer->groups;
    x->order = layer->order;
    x->n_missing = x->next_missing = x->n_waiting = x->n_given = x->n_there = x->n_selected = 0;
    x->ahead = false;
    x->pinned = !all_there(x);
    if (x->pinned)
        expert_cache_layer(x->cache, x->layer, x->n_rows);
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t g = layer->wanted == NULL ? i : layer->wanted[i];
        if (x->pinned)
            need(x, g);
        else
            x->ready[x->n_there++] = g;
    }
    release_held(x, x->layer);
    if (!x->pinned)
        return;
    /* Nearly every expert was chosen here, so the next layer's will be too. */
    x->ahead = x->layer + 1 < x->model->shape.n_layer &&
               (uint64_t)layer->n_groups * 10 >= (uint64_t)x->model->shape.n_expert * 9;
    x->next_ahead = 0;
    start_reads(x);
}

void engine_experts_expect(struct engine_experts *x, uint32_t layer, uint32_t expert)
{
    const uint32_t id = id_of(x, layer, expert);
    if (expert_cache_state(x->cache, layer, expert) != EXPERT_CACHE_ABSENT ||
        x->n_expected == x->n_experts)
        return;
    for (uint32_t i = x->next_expected; i < x->n_expected; i++) /* few */
        if (x->expected[i] == id)
            return;
    x->expected[x->n_expected++] = id;
    start_reads(x);
}

static void release_batch(struct engine_experts *x)
{
    if (x->pinned)
        for (uint32_t i = 0; i < x->n_selected; i++)
            expert_cache_unpin(x->cache, x->layer, x->groups[x->selected[i]].expert);
    x->n_selected = 0;
}

static bool reads_open(const struct engine_experts *x)
{
    return expert_cache_count(x->cache).loading > 0;
}

/* Waits until a group can be computed. False: none is left. */
static bool wait_ready(struct engine_experts *x)
{
    while (x->n_given == x->n_there) {
        if (x->n_waiting == 0 && x->next_missing == x->n_missing)
            return false;
        if (!reads_open(x)) { /* so other pins leave no slot */
            release_all_held(x);
            if (x->unpin != NULL)
                x->unpin(x->unpin_context);
            start_reads(x);
        }
        /* The arena holds any expert: nothing of the layer is pinned, so a read is under way. */
        const uint32_t ended = harvest(x, true);
        assert(ended > 0);
        start_reads(x);
    }
    return true;
}

uint32_t engine_experts_take(struct engine_experts *x)
{
    release_batch(x);
    engine_experts_poll(x);
    if (!wait_ready(x))
        return 0;
    const bool limited = reads_open(x);
    uint64_t rows = 0;
    while (x->n_given < x->n_there) {
        const uint32_t group = x->ready[x->n_given];
        rows += x->groups[group].count;
        if (limited && x->n_selected > 0 && rows > BATCH_ROWS)
            break;
        x->selected[x->n_selected++] = group;
        x->n_given++;
    }
    return x->n_selected;
}

bool engine_experts_at_hand(const struct engine_experts *x)
{
    return x->n_given < x->n_there;
}

void engine_experts_slices(const struct engine_experts *x, uint32_t layer, uint32_t expert,
                           const uint8_t *ret[TIER_SSD_PARTS])
{
    const uint8_t *arena = x->ops->buffer_host(x->ram.arena);
    struct tier_ssd_part parts[TIER_SSD_PARTS];
    model_expert_parts(x->model, layer, expert, expert_cache_place(x->cache, layer, expert), parts);
    for (int i = 0; i < TIER_SSD_PARTS; i++)
        ret[i] = arena + parts[i].place;
}

void engine_experts_poll(struct engine_experts *x)
{
    if (reads_open(x) || x->next_missing < x->n_missing || x->next_expected < x->n_expected) {
        harvest(x, false);
        start_reads(x);
    }
}

/* ---- outside of steps ---- */

/* No group waits: what lands is for later. */
static void leave_layer(struct engine_experts *x)
{
    x->n_missing = x->next_missing = x->n_waiting = x->n_selected = 0;
    x->ahead = false;
    release_all_held(x);
}

/* Begins the next reads of a fill. False: all were begun that have room. An expert that is refused
 * while no read is under way has none: a read that failed left a hole that smaller ones share. */
static bool fill_some(struct engine_experts *x, uint32_t most)
{
    const uint32_t n_expert = x->model->shape.n_expert;
    for (; x->warm < x->n_experts && most > 0; x->warm++) {
        const uint32_t layer = x->warm / n_expert, expert = x->warm % n_expert;
        if (expert_cache_state(x->cache, layer, expert) != EXPERT_CACHE_ABSENT)
            continue;
        if (start_read(x, layer, expert, false, NULL))
            most--;
        else if (reads_open(x))
            break;
    }
    return x->warm < x->n_experts;
}

bool engine_experts_idle(struct engine_experts *x)
{
    leave_layer(x);
    if (reads_open(x)) {
        x->error.code = ERR_OK;
        harvest(x, true);
        engine_experts_idle_warn(x);
        return true;
    }
    tier_ssd_reserved(x->ssd, atomic_load(&x->ram.reserved));
    return x->all_fit && (fill_some(x, IDLE_READS) || reads_open(x));
}

void engine_experts_idle_warn(struct engine_experts *x)
{
    if (x->error.code == ERR_OK || x->idle_failed)
        return;
    x->idle_failed = true;
    log_warn("engine", "idle_read_failed",
             "reason=\"%s\" action=\"continuing: experts are read when they are needed\"",
             x->error.text);
}

bool engine_experts_fetch(struct engine_experts *x, uint32_t layer, uint32_t expert)
{
    leave_layer(x);
    tier_ssd_reserved(x->ssd, atomic_load(&x->ram.reserved));
    return start_read(x, layer, expert, true, NULL);
}

bool engine_experts_bring(struct engine_experts *x, uint32_t layer, uint32_t expert, bool passes)
{
    leave_layer(x);
    if (!start_read(x, layer, expert, passes, NULL))
        return false;
    if (passes) /* no step may find slots pinned that it does not know of */
        expert_cache_unpin(x->cache, layer, expert);
    return true;
}

void engine_experts_land(struct engine_experts *x)
{
    leave_layer(x);
    if (reads_open(x))
        harvest(x, true);
}

/* Layers differ in their experts' bytes, the first is taken for all: an estimate. */
static unsigned percent_of(uint64_t read, uint64_t total)
{
    const double percent = 100.0 * (double)read / (double)total;
    return percent < 99.0 ? (unsigned)percent : 99;
}

enum err_code engine_experts_fill(struct engine_experts *x, const struct model_loading *loading,
                                  struct err *e)
{
    uint64_t read = x->model->weights_bytes;
    unsigned told = percent_of(read, loading->total_bytes);
    leave_layer(x);
    x->error.code = ERR_OK;
    for (bool more = true; more || reads_open(x);) {
        if (loading->stopped != NULL && loading->stopped(loading->context))
            return err_set(e, ERR_CANCELLED, "loading was stopped");
        more = fill_some(x, UINT32_MAX);
        read += harvest(x, true) * x->model->expert_bytes[0];
        if (x->error.code != ERR_OK)
            return err_set(e, x->error.code, "%s", x->error.text);
        const unsigned percent = percent_of(read, loading->total_bytes);
        if (percent > told && loading->progress != NULL)
            loading->progress(loading->context, percent);
        told = percent;
        if (fault_hit(FAULT_WORKER_LOAD))
            return err_set(e, ERR_IO, "expert %u: a fault was asked for", x->warm);
    }
    return ERR_OK;
}
