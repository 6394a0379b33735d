#include "sim_trace.h"

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "alloc.h"
#include "rng.h"

enum {
    MOST_CHANCES = 1 << 28 /* 1 GiB */
};

struct word {
    const char *name;
    size_t offset;
    int kind; /* 0: uint32, 1: double, 2: uint64 */
    double least, most;
};

#define WORD(field, kind, least, most)                                      \
    {                                                                       \
#field, offsetof(struct sim_trace_recipe, field), kind, least, most \
    }

static const struct word words[] = {
    WORD(layers, 0, 1, ROUTE_TRACE_MAX_LAYERS),
    WORD(experts, 0, 1, ROUTE_TRACE_MAX_EXPERTS),
    WORD(used, 0, 1, ROUTE_TRACE_MAX_USED),
    WORD(tokens, 0, 1, 1e6),
    WORD(rows, 0, 1, 64),
    WORD(zipf, 1, 0, 4),
    WORD(locality, 1, 0, 1),
    WORD(recent, 1, 0, 1),
    WORD(window, 0, 1, 1024),
    WORD(topics, 0, 1, 1024),
    WORD(stay, 0, 1, 1e6),
    WORD(chunk, 0, 0, 16384),
    WORD(every, 0, 1, 1e6),
    WORD(bytes, 0, ROUTE_TRACE_ALIGN, 1u << 31),
    WORD(odd_bytes, 0, ROUTE_TRACE_ALIGN, 1u << 31),
    WORD(seed, 2, 0, 1e18),
};

struct sim_trace_recipe sim_trace_default(void)
{
    return (struct sim_trace_recipe){.layers = 24,
                                     .experts = 128,
                                     .used = 8,
                                     .tokens = 1000,
                                     .rows = 1,
                                     .zipf = 0.7,
                                     .locality = 0.3,
                                     .recent = 0.3,
                                     .window = 16,
                                     .topics = 1,
                                     .stay = 250,
                                     .every = 250,
                                     .bytes = 2863104,
                                     .odd_bytes = 2863104,
                                     .seed = 1};
}

static enum err_code set_word(struct sim_trace_recipe *r, const char *name, size_t n,
                              const char *value, struct err *e)
{
    char *end;
    errno = 0;
    const double x = strtod(value, &end);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        const struct word *w = &words[i];
        char *to = (char *)r + w->offset;
        if (strlen(w->name) != n || memcmp(w->name, name, n) != 0)
            continue;
        if (end == value || (*end != ',' && *end != '\0') || !(x >= w->least && x <= w->most))
            return err_set(e, ERR_ARGUMENT, "--generate: %s=%.20s: a number from %g to %g", w->name,
                           value, w->least, w->most);
        if (w->kind == 0)
            *(uint32_t *)(void *)to = (uint32_t)x;
        else if (w->kind == 1)
            *(double *)(void *)to = x;
        else
            *(uint64_t *)(void *)to = (uint64_t)x;
        return ERR_OK;
    }
    return err_set(e, ERR_ARGUMENT, "--generate: %.*s is not known", (int)n, name);
}

enum err_code sim_trace_words(const char *text, struct sim_trace_recipe *r, struct err *e)
{
    while (*text != '\0') {
        const size_t n = strcspn(text, "=,");
        if (text[n] != '=')
            return err_set(e, ERR_ARGUMENT, "--generate: %.*s has no value", (int)n, text);
        const enum err_code code = set_word(r, text, n, text + n + 1, e);
        if (code != ERR_OK)
            return code;
        text += strcspn(text, ",");
        text += *text == ',';
    }
    if (r->used > r->experts)
        return err_set(e, ERR_ARGUMENT, "--generate: %u of %u experts used", r->used, r->experts);
    if (r->bytes % ROUTE_TRACE_ALIGN != 0 || r->odd_bytes % ROUTE_TRACE_ALIGN != 0)
        return err_set(e, ERR_ARGUMENT, "--generate: bytes are multiples of %d", ROUTE_TRACE_ALIGN);
    return ERR_OK;
}

/* ---- needs from routes ---------------------------------------------------------------------- */

/* Room for n_steps steps of n_rows rows in all; the needs are at most `most`. */
static enum err_code start(struct sim_trace *t, uint32_t n_steps, uint64_t most, struct err *e)
{
    t->layer_bytes = alloc_zero(ALLOC_MISC, t->n_layer, sizeof *t->layer_bytes);
    t->step_rows = alloc_zero(ALLOC_MISC, n_steps, sizeof *t->step_rows);
    t->first = alloc_zero(ALLOC_MISC, (size_t)n_steps * t->n_layer + 1, sizeof *t->first);
    t->needs = alloc_zero(ALLOC_MISC, most, sizeof *t->needs);
    if (t->layer_bytes == NULL || t->step_rows == NULL || t->first == NULL || t->needs == NULL)
        return err_set(e, ERR_NOMEM, "no memory for a trace of %u steps", n_steps);
    return ERR_OK;
}

static void set_bytes(struct sim_trace *t, uint32_t layer, uint64_t bytes)
{
    t->layer_bytes[layer] = bytes;
    t->all_bytes += bytes * t->n_expert;
}

/* Appends a step: ids [n_rows][n_layer][n_used]. */
static void add_step(struct sim_trace *t, uint32_t n_rows, const uint16_t *ids)
{
    uint32_t rows[ROUTE_TRACE_MAX_EXPERTS];
    const uint64_t pass = (uint64_t)t->n_steps * t->n_layer;
    t->step_rows[t->n_steps++] = n_rows;
    t->n_rows += n_rows;
    for (uint32_t l = 0; l < t->n_layer; l++) {
        memset(rows, 0, sizeof *rows * t->n_expert);
        for (uint32_t r = 0; r < n_rows; r++)
            for (uint32_t k = 0; k < t->n_used; k++)
                rows[ids[((size_t)r * t->n_layer + l) * t->n_used + k]]++;
        for (uint32_t i = 0; i < t->n_expert; i++)
            if (rows[i] > 0)
                t->needs[t->n_needs++] = (struct sim_need){
                    .expert = (uint16_t)i, .rows = (uint16_t)(rows[i] < 65535 ? rows[i] : 65535)};
        t->first[pass + l + 1] = t->n_needs;
    }
}

static uint64_t needs_at_most(uint64_t rows, uint32_t n_used, uint32_t n_expert)
{
    return rows * n_used < n_expert ? rows * n_used : n_expert;
}

enum err_code sim_trace_from_file(const struct route_trace_file *f, struct sim_trace *ret,
                                  struct err *e)
{
    struct sim_trace t = {
        .n_layer = f->shape.n_layer, .n_expert = f->shape.n_expert, .n_used = f->shape.n_used};
    uint64_t most = 1;
    for (uint64_t s = 0; s < f->n_steps; s++)
        most += t.n_layer *
                needs_at_most(f->step_first[s + 1] - f->step_first[s], t.n_used, t.n_expert);
    if (f->n_steps == 0 || f->n_steps > UINT32_MAX)
        return err_set(e, ERR_ARGUMENT, "the trace has %llu steps", (unsigned long long)f->n_steps);
    const enum err_code code = start(&t, (uint32_t)f->n_steps, most, e);
    if (code != ERR_OK) {
        sim_trace_done(&t);
        return code;
    }
    for (uint32_t l = 0; l < t.n_layer; l++)
        set_bytes(&t, l, f->shape.layer_bytes[l]);
    for (uint64_t s = 0; s < f->n_steps; s++)
        add_step(&t, (uint32_t)(f->step_first[s + 1] - f->step_first[s]),
                 f->ids + f->step_first[s] * t.n_layer * t.n_used);
    *ret = t;
    return ERR_OK;
}

void sim_trace_done(struct sim_trace *t)
{
    alloc_free(t->layer_bytes);
    alloc_free(t->step_rows);
    alloc_free(t->first);
    alloc_free(t->needs);
    alloc_free(t->chances);
    *t = (struct sim_trace){.n_layer = 0};
}

/* ---- generated routes ----------------------------------------------------------------------- */

/* While a token's experts are drawn one after the other. */
struct chance {
    double weight; /* that a draw by weight finds it */
    double first;  /* that the draw finds it, before what is taken is drawn again */
    double taken;  /* that it is among those drawn so far */
};

struct source {
    const struct sim_trace_recipe *recipe;
    double *sums;     /* [experts] running sums of the Zipf weights */
    uint16_t *orders; /* [topics][layers][experts] */
    uint16_t *past;   /* [rows][window][layers][used] the last tokens of each sequence */
    uint32_t *ages;   /* [rows] tokens so far */
    uint64_t draws;
    struct chance *chances; /* [experts] of the layer that is looked at */
    uint32_t *picks;        /* [topics][layers][experts] taken by weight so far */
};

static double draw(struct source *s)
{
    const uint64_t n = s->draws++;
    const uint64_t x = rng_draw(s->recipe->seed + (n >> 31), (uint32_t)(n & 0x7fffffff));
    return (double)(x >> 11) * 0x1p-53;
}

static enum err_code source_start(struct source *s, struct err *e)
{
    const struct sim_trace_recipe *r = s->recipe;
    const size_t n_orders = (size_t)r->topics * r->layers;
    s->sums = alloc_zero(ALLOC_MISC, r->experts, sizeof *s->sums);
    s->orders = alloc_zero(ALLOC_MISC, n_orders * r->experts, sizeof *s->orders);
    s->past =
        alloc_zero(ALLOC_MISC, (size_t)r->rows * r->window * r->layers * r->used, sizeof *s->past);
    s->ages = alloc_zero(ALLOC_MISC, r->rows, sizeof *s->ages);
    s->chances = alloc_zero(ALLOC_MISC, r->experts, sizeof *s->chances);
    s->picks = alloc_zero(ALLOC_MISC, n_orders * r->experts, sizeof *s->picks);
    if (s->sums == NULL || s->orders == NULL || s->past == NULL || s->ages == NULL ||
        s->chances == NULL || s->picks == NULL)
        return err_set(e, ERR_NOMEM, "no memory for a generated trace");
    double sum = 0;
    for (uint32_t i = 0; i < r->experts; i++)
        s->sums[i] = sum += pow(i + 1, -r->zipf);
    for (size_t n = 0; n < n_orders; n++) {
        uint16_t *order = s->orders + n * r->experts;
        for (uint32_t i = 0; i < r->experts; i++) {
            const uint32_t j = (uint32_t)(draw(s) * (i + 1));
            order[i] = order[j];
            order[j] = (uint16_t)i;
        }
    }
    return ERR_OK;
}

static void source_done(struct source *s)
{
    alloc_free(s->sums);
    alloc_free(s->orders);
    alloc_free(s->past);
    alloc_free(s->ages);
    alloc_free(s->chances);
    alloc_free(s->picks);
}

static uint16_t by_weight(struct source *s, uint32_t topic, uint32_t layer)
{
    const struct sim_trace_recipe *r = s->recipe;
    const double x = draw(s) * s->sums[r->experts - 1];
    uint32_t low = 0, high = r->experts - 1;
    while (low < high) {
        const uint32_t middle = (low + high) / 2;
        if (s->sums[middle] < x)
            low = middle + 1;
        else
            high = middle;
    }
    return s->orders[((size_t)topic * r->layers + layer) * r->experts + low];
}

static uint16_t *past(struct source *s, uint32_t row, uint32_t age, uint32_t layer)
{
    const struct sim_trace_recipe *r = s->recipe;
    return s->past + (((size_t)row * r->window + age % r->window) * r->layers + layer) * r->used;
}

/* The k-th expert of the token by its past; UINT16_MAX: by weight. */
static uint16_t choose(struct source *s, uint32_t row, uint32_t layer, uint32_t k)
{
    const struct sim_trace_recipe *r = s->recipe;
    const uint32_t age = s->ages[row];
    const double x = draw(s);
    if (age > 0 && x < r->locality)
        return past(s, row, age - 1, layer)[k];
    if (age > 0 && x < r->locality + r->recent) {
        const uint32_t reach = age < r->window - 1 ? age : r->window - 1;
        if (reach > 0)
            return past(s, row, age - 1 - (uint32_t)(draw(s) * reach), layer)[k];
    }
    return UINT16_MAX;
}

static uint32_t topic_of(const struct source *s, uint32_t row)
{
    return (s->ages[row] / s->recipe->stay + row * 3) % s->recipe->topics;
}

/* The next token of a sequence: ids [layers][used]. */
static void next_token(struct source *s, uint32_t row, uint16_t *ids)
{
    const struct sim_trace_recipe *r = s->recipe;
    const uint32_t age = s->ages[row];
    const uint32_t topic = topic_of(s, row);
    for (uint32_t l = 0; l < r->layers; l++)
        for (uint32_t k = 0; k < r->used; k++) {
            uint16_t *id = ids + (size_t)l * r->used + k;
            *id = choose(s, row, l, k);
            bool drawn = *id == UINT16_MAX;
            if (drawn)
                *id = by_weight(s, topic, l);
            /* What no draw finds is taken in order. */
            for (uint32_t tries = 0;; tries++) {
                bool twice = false;
                for (uint32_t i = 1; i <= k; i++)
                    twice |= *id == *(id - i);
                if (!twice)
                    break;
                *id = tries < 32 ? by_weight(s, topic, l) : (uint16_t)((*id + 1) % r->experts);
                drawn = true;
            }
            s->picks[((size_t)topic * r->layers + l) * r->experts + *id] += drawn;
        }
    for (uint32_t l = 0; l < r->layers; l++)
        memcpy(past(s, row, age, l), ids + (size_t)l * r->used, r->used * sizeof *ids);
    s->ages[row]++;
}

/* Chances of the k-th draw, as choose() makes it. */
static void first_draw(struct source *s, uint32_t row, uint32_t layer, uint32_t k)
{
    const struct sim_trace_recipe *r = s->recipe;
    const uint32_t age = s->ages[row];
    const uint32_t reach = age < r->window - 1 ? age : r->window - 1;
    const double last = age > 0 ? r->locality : 0.0;
    const double recent = reach > 0 ? fmin(r->recent, 1.0 - last) : 0.0;
    for (uint32_t i = 0; i < r->experts; i++)
        s->chances[i].first = (1.0 - last - recent) * s->chances[i].weight;
    if (age > 0)
        s->chances[past(s, row, age - 1, layer)[k]].first += last;
    for (uint32_t back = 0; back < reach && recent > 0.0; back++)
        s->chances[past(s, row, age - 1 - back, layer)[k]].first += recent / reach;
}

static double zipf_weight(const struct source *s, uint32_t rank)
{
    const double before = rank > 0 ? s->sums[rank - 1] : 0.0;
    return (s->sums[rank] - before) / s->sums[s->recipe->experts - 1];
}

/* Weight to be expected of an expert that `n` of `all` draws took, each of the weights being as
 * likely before. */
static double learnt_weight(const struct source *s, uint32_t n, uint32_t all)
{
    double sum = 0.0, weights = 0.0, most = -INFINITY;
    for (uint32_t pass = 0; pass < 2; pass++)
        for (uint32_t rank = 0; rank < s->recipe->experts; rank++) {
            const double w = fmin(zipf_weight(s, rank), 1.0 - 1e-12);
            const double likely = n * log(w) + (all - n) * log1p(-w);
            if (pass == 0) {
                most = fmax(most, likely);
            } else {
                sum += exp(likely - most);
                weights += w * exp(likely - most);
            }
        }
    return weights / sum;
}

/* Weights of the layer's experts as they are, or as who is not told them expects them. */
static void set_weights(struct source *s, uint32_t topic, uint32_t layer)
{
    const struct sim_trace_recipe *r = s->recipe;
    const size_t place = ((size_t)topic * r->layers + layer) * r->experts;
    double memo[64] = {0}, sum = 0.0;
    uint32_t all = 0;
    for (uint32_t i = 0; i < r->experts; i++)
        all += s->picks[place + i];
    for (uint32_t i = 0; i < r->experts; i++) {
        const uint16_t expert = s->orders[place + i];
        const uint32_t n = s->picks[place + expert];
        double w = zipf_weight(s, i);
        if (r->chances == SIM_TRACE_UNTOLD) {
            if (n >= 64 || memo[n] == 0.0)
                w = learnt_weight(s, n, all);
            else
                w = memo[n];
            if (n < 64)
                memo[n] = w;
        }
        s->chances[expert] = (struct chance){.weight = w};
        sum += w;
    }
    for (uint32_t i = 0; i < r->experts; i++)
        s->chances[i].weight /= sum;
}

/* Chances that the next token of a sequence takes the layer's experts, in s->chances: exact for the
 * first of its draws; what is drawn twice is taken to be drawn again whatever else was taken. */
static void foresee(struct source *s, uint32_t row, uint32_t layer)
{
    const struct sim_trace_recipe *r = s->recipe;
    set_weights(s, topic_of(s, row), layer);
    for (uint32_t k = 0; k < r->used; k++) {
        double again = 0.0, open = 0.0;
        first_draw(s, row, layer, k);
        for (uint32_t i = 0; i < r->experts; i++) {
            const struct chance *x = &s->chances[i];
            again += x->first * x->taken;
            open += x->weight * (1.0 - x->taken);
        }
        for (uint32_t i = 0; i < r->experts; i++) {
            struct chance *x = &s->chances[i];
            const double found = x->first + (open > 0.0 ? again / open * x->weight : 0.0);
            x->taken = fmin(x->taken + (1.0 - x->taken) * found, 1.0);
        }
    }
}

/* Chances that the next token of any sequence takes the experts. */
static void foresee_step(struct source *s, const struct sim_trace *t)
{
    const struct sim_trace_recipe *r = s->recipe;
    float *chances = t->chances + (size_t)t->n_steps * r->layers * r->experts;
    for (uint32_t l = 0; l < r->layers; l++, chances += r->experts)
        for (uint32_t row = 0; row < r->rows; row++) {
            foresee(s, row, l);
            for (uint32_t i = 0; i < r->experts; i++)
                chances[i] += (1.0f - chances[i]) * (float)s->chances[i].taken;
        }
}

/* Of the last step, a prompt: as if all of it had been known before. */
static void know_step(const struct sim_trace *t)
{
    const uint64_t pass = ((uint64_t)t->n_steps - 1) * t->n_layer;
    for (uint32_t l = 0; l < t->n_layer; l++)
        for (uint64_t i = t->first[pass + l]; i < t->first[pass + l + 1]; i++)
            t->chances[(pass + l) * t->n_expert + t->needs[i].expert] = 1.0f;
}

static void generate_steps(struct source *s, struct sim_trace *t, uint16_t *ids)
{
    const struct sim_trace_recipe *r = s->recipe;
    const size_t row_ids = (size_t)r->layers * r->used;
    for (uint32_t n = 0; n < r->tokens; n++) {
        if (r->chunk > 0 && n % r->every == 0) {
            for (uint32_t i = 0; i < r->chunk; i++)
                next_token(s, (n / r->every) % r->rows, ids + i * row_ids);
            add_step(t, r->chunk, ids);
            if (t->chances != NULL)
                know_step(t);
        }
        if (t->chances != NULL)
            foresee_step(s, t);
        for (uint32_t i = 0; i < r->rows; i++)
            next_token(s, i, ids + i * row_ids);
        add_step(t, r->rows, ids);
    }
}

enum err_code sim_trace_generate(const struct sim_trace_recipe *r, struct sim_trace *ret,
                                 struct err *e)
{
    struct source s = {.recipe = r};
    struct sim_trace t = {.n_layer = r->layers, .n_expert = r->experts, .n_used = r->used};
    const uint32_t n_chunks = r->chunk > 0 ? (r->tokens + r->every - 1) / r->every : 0;
    const uint64_t most =
        (uint64_t)r->layers * (r->tokens * needs_at_most(r->rows, r->used, r->experts) +
                               n_chunks * needs_at_most(r->chunk, r->used, r->experts));
    const uint32_t most_rows = r->chunk > r->rows ? r->chunk : r->rows;
    uint16_t *ids = alloc_zero(ALLOC_MISC, (size_t)most_rows * r->layers * r->used, sizeof *ids);
    enum err_code code = ids == NULL ? err_set(e, ERR_NOMEM, "no memory for a generated trace")
                                     : source_start(&s, e);
    if (code == ERR_OK)
        code = start(&t, r->tokens + n_chunks, most, e);
    const uint64_t n_chances = ((uint64_t)r->tokens + n_chunks) * r->layers * r->experts;
    if (code == ERR_OK && r->chances != SIM_TRACE_NO_CHANCES && n_chances <= MOST_CHANCES) {
        t.chances = alloc_zero(ALLOC_MISC, n_chances, sizeof *t.chances);
        if (t.chances == NULL)
            code = err_set(e, ERR_NOMEM, "no memory for the chances of %u steps", r->tokens);
    }
    if (code == ERR_OK) {
        for (uint32_t l = 0; l < r->layers; l++)
            set_bytes(&t, l, l % 3 == 2 ? r->odd_bytes : r->bytes);
        generate_steps(&s, &t, ids);
        *ret = t;
    } else {
        sim_trace_done(&t);
    }
    source_done(&s);
    alloc_free(ids);
    return code;
}
