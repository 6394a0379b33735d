#include "worker_plan.h"

#include <errno.h>
#include <stdio.h>

#include "engine.h"
#include "engine_expect.h"
#include "engine_machine.h"
#include "worker_config.h"
#include "worker_loop.h"
#include "worker_plan_text.h"

enum {
    MEASURE_NS = 700 * 1000 * 1000, /* for each of RAM and file */
    RAM_BYTES = 256 << 20,
    LEAST_RAM_BYTES = 16 << 20
};

/* ---- rows ---- */

/* Bytes of the distinct experts that the tokens of a prompt use when routing is uniform. */
static double prompt_bytes(const struct model *m, unsigned n_tokens)
{
    const double used = (double)m->shape.n_expert_used / m->shape.n_expert;
    double untouched = 1;
    for (unsigned i = 0; i < n_tokens; i++)
        untouched *= 1 - used;
    return (1 - untouched) * (double)m->experts_bytes;
}

static void set_first_token(const struct worker_plan *p, struct worker_plan_row *row)
{
    const struct model *m = p->model;
    const bool fills = engine_plan_fills_at_start(&row->plan.budget, m->experts_bytes);
    for (int i = 0; i < 2; i++) {
        const double experts =
            fills ? (double)m->experts_bytes : prompt_bytes(m, i == 0 ? 1 : WORKER_PLAN_PROMPT);
        row->first_token_s[i] = ((double)m->weights_bytes + experts) / p->ssd.rate;
    }
}

/* Fills the rest of a row whose plan works. */
static void fill_row(const struct worker_plan *p, struct worker_plan_row *row)
{
    const struct model *m = p->model;
    const uint32_t n = m->shape.n_layer * m->shape.n_expert;
    const double slots = (double)row->plan.budget.arena / (double)m->experts_bytes * n;
    /* all weights but the table of embeddings, of which a token reads one row */
    const uint64_t table = m->shape.tied_head ? 0 : m->tensors.token_embd->bytes;
    const struct engine_expect x = {.dense_bytes = (double)(m->weights_bytes - table),
                                    .expert_bytes = (double)p->token_bytes,
                                    .ram_rate = p->ram_rate,
                                    .ssd_rate = p->ssd.rate};
    row->slots = row->plan.budget.all_resident ? n : (uint32_t)slots;
    row->resident = (double)row->slots / n;
    row->fits = p->available == 0 || row->plan.budget.total <= p->available;
    row->misses = engine_expect_speed(&x, 0);
    row->uniform = engine_expect_speed(&x, row->resident);
    row->usual = engine_expect_speed(&x, engine_expect_hits(row->resident));
    set_first_token(p, row);
}

/* Other budgets, from the least that works to all experts; what does not grow is left out. */
static void fill_rows(struct worker_plan *p, const struct engine_config *config,
                      const struct engine_plan_machine *machine)
{
    const uint64_t experts = p->model->experts_bytes, cycle = p->set.plan.needs.cycle;
    const struct {
        const char *name;
        uint64_t slots;
    } wanted[WORKER_PLAN_ROWS] = {{"least", 1},
                                  {"two_tokens", 2 * cycle},
                                  {"quarter", experts / 4},
                                  {"half", experts / 2},
                                  {"all", experts}};
    for (unsigned i = 0; i < WORKER_PLAN_ROWS; i++) {
        struct worker_plan_row *row = &p->rows[p->n_rows];
        row->name = wanted[i].name;
        if (engine_plan_least(config, machine, p->model, wanted[i].slots, &row->plan, NULL) !=
            ERR_OK)
            return;
        if (p->n_rows > 0 && row->plan.needs.budget <= row[-1].plan.needs.budget)
            continue;
        fill_row(p, row);
        p->n_rows++;
    }
}

/* ---- the machine ---- */

static void look_at_machine(struct worker_plan *p)
{
    p->ram = engine_machine_memory("MemTotal");
    p->available = engine_machine_available();
    p->group_limits = engine_machine_cgroup_left() == p->available;
}

static enum err_code measure(struct worker_plan *p, const struct engine_config *c,
                             struct k_device *device, struct err *e)
{
    uint64_t bytes =
        p->available != 0 && p->available / 4 < RAM_BYTES ? p->available / 4 : RAM_BYTES;
    bytes = bytes < LEAST_RAM_BYTES ? LEAST_RAM_BYTES : bytes;
    const enum err_code code =
        engine_rates_ram(device, bytes, MEASURE_NS, c->ticks, &p->ram_rate, e);
    return code != ERR_OK ? code
                          : engine_rates_ssd(device, p->model, (enum tier_ssd_io)c->ssd_io,
                                             c->ssd_depth, MEASURE_NS, c->ticks, &p->ssd, e);
}

/* ---- the GPU ---- */

/* Opens the GPU that a start would use, and makes sure that the model's plan has room on it. None
 * is no error unless the settings ask for one. */
static enum err_code open_gpu(struct worker_plan *p, const struct engine_config *c,
                              struct k_device *cpu, struct k_device **ret, struct err *e)
{
    struct err why = {.code = ERR_OK};
    struct k_device *gpu = NULL;
    struct engine_plan plan;
    if (c->gpu == ENGINE_GPU_OFF)
        return ERR_OK;
    enum err_code code = c->open_gpu(c->open_gpu_context, &gpu, &why);
    if (code == ERR_OK) {
        k_ops(gpu)->memory(gpu, &p->vram_free, &p->vram_total);
        const struct engine_plan_machine machine = {
            .cpu = cpu, .gpu = gpu, .vram_free = p->vram_free, .vram_total = p->vram_total};
        /* What RAM lacks is no reason against the GPU. */
        code = engine_plan_least(c, &machine, p->model, 1, &plan, &why);
    }
    if (code == ERR_OK) {
        p->gpu = k_ops(gpu)->describe(gpu);
        *ret = gpu;
        return ERR_OK;
    }
    k_close(gpu);
    if (c->gpu == ENGINE_GPU_ON)
        return err_set(e, why.code, "%s", why.text);
    p->gpu_refusal = why;
    return ERR_OK;
}

/* ---- all of it ---- */

static enum err_code make_plan(struct worker_plan *p, const struct engine_config *config,
                               struct k_device *device, const struct k_device *gpu, struct err *e)
{
    const struct model *m = p->model;
    p->level = k_ops(device)->name;
    p->threads = k_threads(device);
    p->token_bytes = engine_plan_token_bytes(m);
    for (uint32_t i = 0; i < m->file->n_files; i++)
        p->file_bytes += m->file->file_sizes[i];
    look_at_machine(p);
    enum err_code code = measure(p, config, device, e);
    if (code != ERR_OK)
        return code;
    p->set.name = "set";
    const struct engine_plan_machine machine = {.cpu = device,
                                                .gpu = gpu,
                                                .available = p->available,
                                                .vram_free = p->vram_free,
                                                .vram_total = p->vram_total};
    if (engine_plan_make(config, &machine, m, &p->set.plan, &p->refusal) == ERR_OK)
        fill_row(p, &p->set);
    fill_rows(p, config, &machine);
    return ERR_OK;
}

int worker_plan_run(const struct settings *s, bool json)
{
    const struct engine_config config = worker_config_engine(s);
    struct worker_plan plan = {.n_rows = 0};
    struct k_device *device = NULL, *gpu = NULL;
    struct model *model = NULL;
    struct err e = {.code = ERR_OK};
    enum err_code code = k_open((enum k_level)config.cpu_level, config.threads, &device, &e);
    if (code == ERR_OK)
        code = model_open(&(struct model_loading){.path = config.model_path, .device = device},
                          &model, &e);
    plan.model = model;
    if (code == ERR_OK)
        code = open_gpu(&plan, &config, device, &gpu, &e);
    if (code == ERR_OK)
        code = make_plan(&plan, &config, device, gpu, &e);
    if (code == ERR_OK && json)
        worker_plan_text_json(&plan, stdout);
    else if (code == ERR_OK)
        worker_plan_text_table(&plan, stdout);
    if (fflush(stdout) != 0 || ferror(stdout))
        (void)err_set_os(&e, ERR_IO, errno, "the plan cannot be written");
    if (code == ERR_OK && plan.refusal.code != ERR_OK)
        (void)err_set(&e, plan.refusal.code, "%s", plan.refusal.text);
    if (e.code != ERR_OK)
        fprintf(stderr, "isletd: %s\n", e.text);
    model_close(model);
    k_close(gpu);
    k_close(device);
    return e.code == ERR_OK ? 0 : WORKER_EXIT_CONFIG;
}
