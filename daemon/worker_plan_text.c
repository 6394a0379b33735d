#include "worker_plan_text.h"

#include <string.h>

#include "units.h"
#include "utf8.h"
#include "worker_plan.h"

/* ---- as text ---- */

/* Names come from the file: only characters that do nothing to a terminal, and no quotes left open
 * in JSON. */
static void put_name(FILE *out, const char *text, bool json)
{
    const uint8_t *p = (const uint8_t *)text;
    for (size_t left = strlen(text); left > 0;) {
        const int n = utf8_sequence(p, left);
        const size_t step = n > 0 ? (size_t)n : 1;
        const bool control = n == 1 && (*p < 0x20 || *p == 0x7f);
        if (n <= 0 || control || (n == 2 && p[0] == 0xc2 && p[1] < 0xa0))
            fputc('?', out);
        else if (json && (*p == '"' || *p == '\\'))
            fprintf(out, "\\%c", *p);
        else
            fwrite(p, 1, step, out);
        p += step;
        left -= step;
    }
}

struct speed_text {
    char s[24];
};

static struct speed_text speed(double tokens)
{
    struct speed_text t;
    snprintf(t.s, sizeof(t.s), "%.*f", tokens < 1 ? 2 : tokens < 100 ? 1 : 0, tokens);
    return t;
}

static struct units_text seconds(double s)
{
    return units_ms((uint64_t)(s * 1000 + 1)); /* never "0" */
}

static void put_model(const struct worker_plan *p, FILE *out)
{
    const struct model_shape *s = &p->model->shape;
    const uint64_t expert = p->token_bytes / ((uint64_t)s->n_layer * s->n_expert_used);
    fputs("model     ", out);
    put_name(out, s->name, false);
    fprintf(out, ": %s, %u layers, %u experts of %s each, top-%u; file %s\n", s->arch, s->n_layer,
            s->n_expert, units_bytes(expert).s, s->n_expert_used, units_bytes(p->file_bytes).s);
}

static void put_needs(const struct worker_plan *p, FILE *out)
{
    const struct engine_plan *plan = &p->set.plan;
    const uint64_t position = plan->page_bytes / K_PAGE;
    fprintf(out,
            "needs     dense weights %s, work %s, experts %s; one token uses %s of experts\n"
            "kv        %s a position: %s for a context of %u, %s for all sequences\n",
            units_bytes(p->model->weights_bytes).s,
            units_bytes(plan->needs.work + plan->vram_needs.work).s,
            units_bytes(p->model->experts_bytes).s, units_bytes(p->token_bytes).s,
            units_bytes(position).s, units_bytes(position * plan->n_ctx).s, plan->n_ctx,
            units_bytes(plan->needs.kv + plan->vram_needs.kv).s);
}

/* Experts that have islands in VRAM. */
static uint32_t islands_of(const struct worker_plan *p)
{
    const struct engine_plan *plan = &p->set.plan;
    const uint32_t n = p->model->shape.n_layer * p->model->shape.n_expert;
    const double share = (double)plan->vram.islands / (double)plan->vram_needs.experts;
    return plan->vram.all_resident ? n : (uint32_t)(share * n);
}

static void put_gpu(const struct worker_plan *p, FILE *out)
{
    const struct engine_plan *plan = &p->set.plan;
    const uint32_t n = p->model->shape.n_layer * p->model->shape.n_expert;
    if (p->gpu_refusal.code != ERR_OK)
        fprintf(out, "gpu       not used: %s\n", p->gpu_refusal.text);
    if (p->gpu == NULL)
        return;
    fprintf(out,
            "gpu       %s, %s free\n"
            "vram      %s (%s), %s of it used: dense weights %s, KV pages %s, work %s, islands "
            "for %u of %u experts %s\n",
            p->gpu, units_bytes(p->vram_free).s, units_bytes(plan->vram_needs.budget).s,
            plan->vram_needs.automatic ? "auto: what is free less a margin" : "memory.vram_budget",
            units_bytes(plan->vram.total).s, units_bytes(plan->vram_needs.weights).s,
            units_bytes(plan->vram_needs.kv).s, units_bytes(plan->vram_needs.work).s, islands_of(p),
            n, units_bytes(plan->vram.islands).s);
}

static void put_machine(const struct worker_plan *p, FILE *out)
{
    fprintf(out,
            "machine   RAM %s, %s available%s; %s kernels, %u thread%s\n"
            "reads     RAM %.1f GB/s with all threads, this file %.2f GB/s (%s",
            units_bytes(p->ram).s, units_bytes(p->available).s,
            p->group_limits ? " (memory limit of the cgroup)" : "", p->level, p->threads,
            p->threads == 1 ? "" : "s", p->ram_rate / 1e9, p->ssd.rate / 1e9, p->ssd.about);
    if (!p->ssd.direct && p->ssd.cached >= 0)
        fprintf(out, "; %.0f %% of it was cached already", 100 * p->ssd.cached);
    else if (!p->ssd.direct)
        fputs("; it may have been cached already", out);
    fputs(")\n", out);
}

static void put_budget(const struct worker_plan *p, FILE *out)
{
    const struct engine_plan *plan = &p->set.plan;
    const uint32_t n = p->model->shape.n_layer * p->model->shape.n_expert;
    fprintf(out, "budget    %s (%s), %s of it used: ", units_bytes(plan->needs.budget).s,
            plan->needs.automatic ? "auto: 70 % of available" : "memory.ram_budget",
            units_bytes(plan->budget.total).s);
    if (plan->budget.all_resident)
        fprintf(out, "everything fits, all %u experts stay in memory\n", n);
    else
        fprintf(out, "%s of slots for %u of %u experts (%.0f %%)%s\n",
                units_bytes(plan->budget.arena).s, p->set.slots, n, 100 * p->set.resident,
                plan->budget.below_cycle ? "; less than one token uses: hardly any will be found "
                                           "in memory"
                                         : "");
}

static void put_expectation(const struct worker_plan *p, FILE *out)
{
    const struct worker_plan_row *r = &p->set;
    if (p->gpu != NULL) {
        fputs("expect    more than the CPU alone gives, which is below\n", out);
        return;
    }
    if (r->plan.budget.all_resident)
        fprintf(out, "expect    decode up to %s tok/s (bytes a token / RAM rate)",
                speed(r->uniform).s);
    else
        fprintf(out,
                "expect    decode %s .. %s .. %s tok/s (all experts missed .. uniform routing "
                ".. usual locality)",
                speed(r->misses).s, speed(r->uniform).s, speed(r->usual).s);
    fprintf(out, "\n          first token about %s after the start",
            seconds(r->first_token_s[0]).s);
    if (r->first_token_s[1] > r->first_token_s[0])
        fprintf(out, ", %s if the prompt has %d tokens", seconds(r->first_token_s[1]).s,
                WORKER_PLAN_PROMPT);
    fputs("\n", out);
}

static const char *meaning(const char *name)
{
    static const struct {
        const char *name, *text;
    } known[] = {{"least", "the least that works"},
                 {"two_tokens", "two tokens' experts"},
                 {"quarter", "25 % of the experts"},
                 {"half", "50 % of the experts"},
                 {"all", "all experts"}};
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++)
        if (strcmp(name, known[i].name) == 0)
            return known[i].text;
    return name;
}

static void put_row(const struct worker_plan_row *r, FILE *out)
{
    char range[80];
    if (r->plan.budget.all_resident)
        snprintf(range, sizeof(range), "%s", speed(r->uniform).s);
    else
        snprintf(range, sizeof(range), "%s .. %s .. %s", speed(r->misses).s, speed(r->uniform).s,
                 speed(r->usual).s);
    fprintf(out, "  %-10s %-21s %7u %8u %7.0f %%   %s%s\n", units_bytes_up(r->plan.needs.budget).s,
            meaning(r->name), r->plan.n_ctx, r->slots, 100 * r->resident, range,
            r->fits ? "" : "   (more than is available)");
}

void worker_plan_text_table(const struct worker_plan *p, FILE *out)
{
    put_model(p, out);
    put_needs(p, out);
    put_machine(p, out);
    put_gpu(p, out);
    if (p->refusal.code == ERR_OK) {
        put_budget(p, out);
        put_expectation(p, out);
    }
    fputs("\nother budgets; tok/s as all experts missed .. uniform routing .. usual locality\n",
          out);
    fprintf(out, "  %-10s %-21s %7s %8s %9s   %s\n", "ram_budget", "", "context", "slots",
            "resident", "decode tok/s");
    for (unsigned i = 0; i < p->n_rows; i++)
        put_row(&p->rows[i], out);
    fputs("Expected from measured rates, not promised.\n", out);
}

/* ---- as JSON ---- */

#define U(x) ((unsigned long long)(x))

static void put_json_row(const struct worker_plan_row *r, FILE *out)
{
    const struct engine_plan *plan = &r->plan;
    fprintf(out,
            "{\"name\":\"%s\",\"ram_budget_bytes\":%llu,\"automatic\":%s,\"used_bytes\":%llu,"
            "\"fits\":%s,\"context\":%u,\"kv_bytes\":%llu,\"work_bytes\":%llu,\"slots_bytes\":%llu,"
            "\"slots\":%u,\"resident\":%.4f,\"all_resident\":%s,\"below_token\":%s,",
            r->name, U(plan->needs.budget), plan->needs.automatic ? "true" : "false",
            U(plan->budget.total), r->fits ? "true" : "false", plan->n_ctx, U(plan->needs.kv),
            U(plan->needs.work), U(plan->budget.arena), r->slots, r->resident,
            plan->budget.all_resident ? "true" : "false",
            plan->budget.below_cycle ? "true" : "false");
    fprintf(out,
            "\"expected_tok_s\":{\"misses\":%.4g,\"uniform\":%.4g,\"usual\":%.4g},"
            "\"first_token_s\":{\"prompt_1\":%.3f,\"prompt_%d\":%.3f}}",
            r->misses, r->uniform, r->usual, r->first_token_s[0], WORKER_PLAN_PROMPT,
            r->first_token_s[1]);
}

static void put_json_model(const struct worker_plan *p, FILE *out)
{
    const struct model_shape *s = &p->model->shape;
    const struct engine_plan *plan = &p->set.plan;
    fputs("{\"model\":{\"path\":\"", out);
    put_name(out, p->model->file->path, true);
    fputs("\",\"name\":\"", out);
    put_name(out, s->name, true);
    fprintf(out,
            "\",\"architecture\":\"%s\",\"file_bytes\":%llu,\"layers\":%u,\"experts\":%u,"
            "\"experts_used\":%u,\"context_trained\":%u},",
            s->arch, U(p->file_bytes), s->n_layer, s->n_expert, s->n_expert_used, s->n_ctx_train);
    fprintf(out,
            "\"needs\":{\"weights_bytes\":%llu,\"kv_position_bytes\":%llu,\"experts_bytes\":%llu,"
            "\"token_experts_bytes\":%llu,\"process_bytes\":%llu},",
            U(p->model->weights_bytes), U(plan->page_bytes / K_PAGE), U(p->model->experts_bytes),
            U(p->token_bytes), U(ENGINE_BUDGET_PROCESS));
}

static void put_json_machine(const struct worker_plan *p, FILE *out)
{
    fprintf(out,
            "\"machine\":{\"ram_bytes\":%llu,\"available_bytes\":%llu,\"cgroup_limits\":%s,"
            "\"kernels\":\"%s\",\"threads\":%u,\"ram_read_rate\":%.0f,\"ssd_read_rate\":%.0f,"
            "\"ssd_read_bytes\":%llu,\"ssd_direct\":%s,\"ssd_cached\":",
            U(p->ram), U(p->available), p->group_limits ? "true" : "false", p->level, p->threads,
            p->ram_rate, p->ssd.rate, U(p->ssd.bytes), p->ssd.direct ? "true" : "false");
    if (!p->ssd.direct && p->ssd.cached >= 0)
        fprintf(out, "%.4f", p->ssd.cached);
    else
        fputs("null", out);
    fputs(",\"ssd_io\":\"", out);
    put_name(out, p->ssd.about, true);
    fputs("\"},", out);
}

/* The text, or null where there is none. */
static void put_json_error(const struct err *e, FILE *out)
{
    if (e->code == ERR_OK) {
        fputs("null", out);
        return;
    }
    fputc('"', out);
    put_name(out, e->text, true);
    fputc('"', out);
}

static void put_json_gpu(const struct worker_plan *p, FILE *out)
{
    const struct engine_plan *plan = &p->set.plan;
    fputs(",\"gpu_refusal\":", out);
    put_json_error(&p->gpu_refusal, out);
    if (p->gpu == NULL) {
        fputs(",\"gpu\":null", out);
        return;
    }
    fputs(",\"gpu\":{\"name\":\"", out);
    put_name(out, p->gpu, true);
    fprintf(out,
            "\",\"free_bytes\":%llu,\"vram_budget_bytes\":%llu,\"automatic\":%s,"
            "\"used_bytes\":%llu,\"weights_bytes\":%llu,\"kv_bytes\":%llu,\"work_bytes\":%llu,"
            "\"islands_bytes\":%llu,\"islands\":%u,\"all_resident\":%s}",
            U(p->vram_free), U(plan->vram_needs.budget),
            plan->vram_needs.automatic ? "true" : "false", U(plan->vram.total),
            U(plan->vram_needs.weights), U(plan->vram_needs.kv), U(plan->vram_needs.work),
            U(plan->vram.islands), islands_of(p), plan->vram.all_resident ? "true" : "false");
}

void worker_plan_text_json(const struct worker_plan *p, FILE *out)
{
    put_json_model(p, out);
    put_json_machine(p, out);
    fputs("\"budget\":", out);
    if (p->refusal.code == ERR_OK)
        put_json_row(&p->set, out);
    else
        fputs("null", out);
    put_json_gpu(p, out);
    fputs(",\"error\":", out);
    put_json_error(&p->refusal, out);
    fputs(",\"other_budgets\":[", out);
    for (unsigned i = 0; i < p->n_rows; i++) {
        fputs(i == 0 ? "" : ",", out);
        put_json_row(&p->rows[i], out);
    }
    fputs("]}\n", out);
}
