/* cachesim (TRACE | --generate RECIPE) [--percent 5,10,...] [--bytes 1GiB,...] [--json]
 *          [--plot out.svg]
 * Hit rates and bytes a token of cache policies on a trace of isletd (route.trace) or a generated
 * one, for several capacities. A token is a row. Every policy starts empty. For a generated trace
 * also what no policy can be expected to do better (sim_bound.h). */
#include <getopt.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "alloc.h"
#include "expert_cache.h"
#include "sim_bound.h"
#include "sim_plot.h"
#include "sim_replay.h"
#include "units.h"

enum {
    MAX_CAPACITIES = 32
};

/* Decayed frequency is tried with each; the one that read least is marked. */
static const double half_lives[] = {4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096};

enum {
    N_HALF_LIVES = sizeof half_lives / sizeof *half_lives
};

struct options {
    struct sim_trace_recipe recipe;
    bool generate, json;
    const char *trace, *recipe_text, *plot;
    double percents[MAX_CAPACITIES];
    uint32_t n_percents;
    uint64_t bytes[MAX_CAPACITIES];
    uint32_t n_bytes;
};

struct row {
    uint64_t capacity;
    double percent;
    struct sim_replay_result lru, lfu, decay, fixed, ours, belady;
    double half_life; /* the best in hindsight */
    bool bounded;
    struct sim_replay_result told, untold; /* least to be expected of any policy */
};

static const char usage[] =
    "usage: cachesim (TRACE | --generate RECIPE) [options]\n"
    "  TRACE                a file that isletd wrote (route.trace = FILE)\n"
    "  --generate RECIPE    name=value,...: layers experts used tokens rows zipf locality recent\n"
    "                       window topics stay chunk every bytes odd_bytes seed\n"
    "  --percent LIST       capacities in percent of all experts' bytes\n"
    "  --bytes LIST         capacities in bytes: 512 MiB,1.5 GiB\n"
    "  --json               an object a capacity instead of the table\n"
    "  --plot FILE          hit rates as an SVG file\n";

static enum err_code parse_percents(struct options *o, const char *text, struct err *e)
{
    o->n_percents = 0;
    for (;;) {
        char *end;
        const double x = strtod(text, &end);
        if (end == text || (*end != ',' && *end != '\0') || !(x > 0 && x <= 100))
            return err_set(e, ERR_ARGUMENT, "--percent: %.40s: numbers above 0 up to 100", text);
        if (o->n_percents == MAX_CAPACITIES)
            return err_set(e, ERR_ARGUMENT, "--percent: more than %d", MAX_CAPACITIES);
        o->percents[o->n_percents++] = x;
        if (*end == '\0')
            return ERR_OK;
        text = end + 1;
    }
}

static enum err_code parse_bytes(struct options *o, const char *text, struct err *e)
{
    o->n_bytes = 0;
    for (;;) {
        char word[64];
        const size_t n = strcspn(text, ",");
        if (n >= sizeof word || o->n_bytes == MAX_CAPACITIES)
            return err_set(e, ERR_ARGUMENT, "--bytes: %.40s: up to %d sizes", text, MAX_CAPACITIES);
        memcpy(word, text, n);
        word[n] = '\0';
        const enum err_code code = units_parse_bytes(word, &o->bytes[o->n_bytes++], e);
        if (code != ERR_OK)
            return err_wrap(e, "--bytes");
        if (text[n] == '\0')
            return ERR_OK;
        text += n + 1;
    }
}

static enum err_code parse_options(int argc, char **argv, struct options *o, struct err *e)
{
    static const struct option names[] = {{"generate", required_argument, NULL, 'g'},
                                          {"percent", required_argument, NULL, 'p'},
                                          {"bytes", required_argument, NULL, 'b'},
                                          {"json", no_argument, NULL, 'j'},
                                          {"plot", required_argument, NULL, 'o'},
                                          {"help", no_argument, NULL, 'h'},
                                          {NULL, 0, NULL, 0}};
    enum err_code code = parse_percents(o, "5,6,10,12.5,15,19,25,30,38,50,60,75,90,100", e);
    for (int c; code == ERR_OK && (c = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        if (c == 'g') {
            o->generate = true;
            o->recipe_text = optarg;
            code = sim_trace_words(optarg, &o->recipe, e);
        } else if (c == 'p') {
            code = parse_percents(o, optarg, e);
        } else if (c == 'b') {
            code = parse_bytes(o, optarg, e);
        } else if (c == 'j') {
            o->json = true;
        } else if (c == 'o') {
            o->plot = optarg;
        } else if (c == 'h') {
            fputs(usage, stdout);
            exit(0);
        } else {
            code = err_set(e, ERR_ARGUMENT, "see cachesim --help");
        }
    }
    if (code == ERR_OK && argc - optind != (o->generate ? 0 : 1))
        code = err_set(e, ERR_ARGUMENT, "one trace, or --generate; see cachesim --help");
    else if (code == ERR_OK && !o->generate)
        o->trace = argv[optind];
    return code;
}

static enum err_code load(const struct options *o, struct sim_trace *ret, struct err *e)
{
    if (o->generate)
        return sim_trace_generate(&o->recipe, ret, e);
    struct route_trace_file f;
    enum err_code code = route_trace_read(o->trace, &f, e);
    if (code != ERR_OK)
        return code;
    if (f.cut_bytes > 0)
        fprintf(stderr, "cachesim: %s: the last step is cut (%llu bytes left out)\n", o->trace,
                (unsigned long long)f.cut_bytes);
    code = sim_trace_from_file(&f, ret, e);
    route_trace_file_done(&f);
    return code;
}

/* Bounds by the chances that the generator gave, as they are and as they can be learned. */
static enum err_code bounds(const struct options *o, struct row *rows, uint32_t n, struct err *e)
{
    static struct sim_replay_result results[2][2 * MAX_CAPACITIES];
    uint64_t list[2 * MAX_CAPACITIES];
    enum err_code code = ERR_OK;
    bool known = o->generate;
    for (uint32_t i = 0; i < n; i++)
        list[i] = rows[i].capacity;
    for (uint32_t kind = 0; kind < 2 && code == ERR_OK && known; kind++) {
        struct sim_trace_recipe recipe = o->recipe;
        struct sim_trace t = {.n_layer = 0};
        recipe.chances = kind == 0 ? SIM_TRACE_TOLD : SIM_TRACE_UNTOLD;
        code = sim_trace_generate(&recipe, &t, e);
        known = t.chances != NULL;
        if (code == ERR_OK && known)
            code = sim_bound_run(&t, list, n, results[kind], e);
        sim_trace_done(&t);
    }
    for (uint32_t i = 0; i < n && code == ERR_OK && known; i++) {
        rows[i].bounded = true;
        rows[i].told = results[0][i];
        rows[i].untold = results[1][i];
    }
    return code;
}

/* ---- figures --------------------------------------------------------------------------------- */

static enum err_code measure(const struct sim_trace *t, struct row *r, struct err *e)
{
    const struct {
        enum sim_replay_kind kind;
        struct sim_replay_result *ret;
    } runs[] = {{SIM_REPLAY_LRU, &r->lru},
                {SIM_REPLAY_LFU, &r->lfu},
                {SIM_REPLAY_STATIC, &r->fixed},
                {SIM_REPLAY_OURS, &r->ours},
                {SIM_REPLAY_BELADY, &r->belady}};
    enum err_code code = ERR_OK;
    for (size_t i = 0; i < sizeof runs / sizeof *runs && code == ERR_OK; i++)
        code = sim_replay_run(t, runs[i].kind, 0, r->capacity, runs[i].ret, e);
    for (size_t i = 0; i < N_HALF_LIVES && code == ERR_OK; i++) {
        struct sim_replay_result x = {.hits = 0};
        code = sim_replay_run(t, SIM_REPLAY_DECAY, half_lives[i], r->capacity, &x, e);
        if (i == 0 || x.read_bytes < r->decay.read_bytes) {
            r->decay = x;
            r->half_life = half_lives[i];
        }
    }
    return code;
}

static double hits(const struct sim_replay_result *x)
{
    return x->needs == 0 ? 0 : 100.0 * (double)x->hits / (double)x->needs;
}

static double bytes_per_token(const struct sim_trace *t, const struct sim_replay_result *x)
{
    return (double)x->read_bytes / (double)t->n_rows;
}

/* Bytes read over the least of LRU, decayed frequency and the static list. */
static double share_of_best(const struct row *r, const struct sim_replay_result *x)
{
    uint64_t best = r->lru.read_bytes;
    best = r->decay.read_bytes < best ? r->decay.read_bytes : best;
    best = r->fixed.read_bytes < best ? r->fixed.read_bytes : best;
    return best == 0 ? 1.0 : (double)x->read_bytes / (double)best;
}

static void print_table(const struct sim_trace *t, const struct row *rows, uint32_t n)
{
    printf("%u layers x %u experts, %u used; %u steps, %llu tokens, %llu needs; experts %s, "
           "a token cycle %.1f %%\n",
           t->n_layer, t->n_expert, t->n_used, t->n_steps, (unsigned long long)t->n_rows,
           (unsigned long long)t->n_needs, units_bytes(t->all_bytes).s,
           100.0 * t->n_used / t->n_expert);
    printf("resident              hits, %%                                  MB a token\n"
           "   %%   capacity     LRU   LFU    DF (half)  list  ours Belady |"
           "    LRU    LFU     DF   list   ours Belady  ours/best  us/token\n");
    for (uint32_t i = 0; i < n; i++) {
        const struct row *r = &rows[i];
        printf("%5.1f %10s  %6.2f %5.2f %5.2f (%4.0f) %5.2f %5.2f %6.2f |", r->percent,
               units_bytes(r->capacity).s, hits(&r->lru), hits(&r->lfu), hits(&r->decay),
               r->half_life, hits(&r->fixed), hits(&r->ours), hits(&r->belady));
        printf(" %6.4g %6.4g %6.4g %6.4g %6.4g %6.4g %10.3f %9.1f\n",
               bytes_per_token(t, &r->lru) * 1e-6, bytes_per_token(t, &r->lfu) * 1e-6,
               bytes_per_token(t, &r->decay) * 1e-6, bytes_per_token(t, &r->fixed) * 1e-6,
               bytes_per_token(t, &r->ours) * 1e-6, bytes_per_token(t, &r->belady) * 1e-6,
               share_of_best(r, &r->ours), r->ours.seconds * 1e6 / (double)t->n_rows);
    }
}

static void print_bounds(const struct sim_trace *t, const struct row *rows, uint32_t n)
{
    printf(
        "\nno policy can be expected to do better if it is told the generator's chances, or, untold"
        ",\nhas to learn which expert has which weight:\n"
        "resident    hits over LRU     |   MB a token          |   bytes / best\n"
        "   %%      told untold  ours  |   told untold   ours  |  told untold  ours  "
        "ours/untold\n");
    for (uint32_t i = 0; i < n; i++) {
        const struct row *r = &rows[i];
        const struct sim_replay_result *all[] = {&r->told, &r->untold, &r->ours};
        printf("%5.1f   ", r->percent);
        for (uint32_t k = 0; k < 3; k++)
            printf(" %5.2f", hits(all[k]) - hits(&r->lru));
        printf("  | ");
        for (uint32_t k = 0; k < 3; k++)
            printf(" %6.4g", bytes_per_token(t, all[k]) * 1e-6);
        printf("  | ");
        for (uint32_t k = 0; k < 3; k++)
            printf(" %5.3f", share_of_best(r, all[k]));
        printf(" %10.3f\n", (double)r->ours.read_bytes / (double)r->untold.read_bytes);
    }
}

static void print_json(const struct sim_trace *t, const struct row *rows, uint32_t n)
{
    printf("[");
    for (uint32_t i = 0; i < n; i++) {
        const struct row *r = &rows[i];
        const struct {
            const char *name;
            const struct sim_replay_result *x;
        } all[] = {{"lru", &r->lru},      {"lfu", &r->lfu},      {"decay", &r->decay},
                   {"static", &r->fixed}, {"ours", &r->ours},    {"belady", &r->belady},
                   {"told", &r->told},    {"untold", &r->untold}};
        const size_t n_all = r->bounded ? 8 : 6;
        printf("%s\n{\"capacity\": %llu, \"percent\": %.4f, \"half_life\": %.0f, "
               "\"tokens\": %llu, \"needs\": %llu, \"bytes_over_best\": %.4f, "
               "\"us_per_token\": %.2f",
               i > 0 ? "," : "", (unsigned long long)r->capacity, r->percent, r->half_life,
               (unsigned long long)t->n_rows, (unsigned long long)t->n_needs,
               share_of_best(r, &r->ours), r->ours.seconds * 1e6 / (double)t->n_rows);
        for (size_t k = 0; k < n_all; k++)
            printf(", \"%s\": {\"hit_percent\": %.4f, \"bytes_per_token\": %.1f}", all[k].name,
                   hits(all[k].x), bytes_per_token(t, all[k].x));
        printf("}");
    }
    printf("\n]\n");
}

static enum err_code plot(const struct options *o, const struct row *rows, uint32_t n,
                          struct err *e)
{
    double x[2 * MAX_CAPACITIES], y[6][2 * MAX_CAPACITIES];
    for (uint32_t i = 0; i < n; i++) {
        x[i] = rows[i].percent;
        y[0][i] = hits(&rows[i].ours);
        y[1][i] = hits(&rows[i].lru);
        y[2][i] = hits(&rows[i].lfu);
        y[3][i] = hits(&rows[i].decay);
        y[4][i] = hits(&rows[i].fixed);
        y[5][i] = hits(&rows[i].belady);
    }
    const struct sim_plot_curve curves[] = {
        {"ours", y[0]},        {"LRU", y[1]},   {"LFU", y[2]}, {"decayed, best half-life", y[3]},
        {"static list", y[4]}, {"Belady", y[5]}};
    return sim_plot_write(o->plot, o->generate ? o->recipe_text : o->trace, x, n, curves, 6, e);
}

static int by_capacity(const void *a, const void *b)
{
    const struct row *x = a, *y = b;
    return (x->capacity > y->capacity) - (x->capacity < y->capacity);
}

/* What is asked for, rising; a capacity below the largest expert is left out, and said. */
static uint32_t capacities(const struct options *o, const struct sim_trace *t, struct row *rows)
{
    uint64_t largest = 0;
    uint32_t n = 0, kept = 0;
    for (uint32_t l = 0; l < t->n_layer; l++)
        largest = t->layer_bytes[l] > largest ? t->layer_bytes[l] : largest;
    for (uint32_t i = 0; i < o->n_percents; i++)
        rows[n++].capacity = (uint64_t)(o->percents[i] / 100 * (double)t->all_bytes);
    for (uint32_t i = 0; i < o->n_bytes; i++)
        rows[n++].capacity = o->bytes[i];
    for (uint32_t i = 0; i < n; i++) {
        const uint64_t capacity = rows[i].capacity;
        if (capacity < largest)
            fprintf(stderr, "cachesim: %s left out: the largest expert has %s\n",
                    units_bytes(capacity).s, units_bytes(largest).s);
        else
            rows[kept++] = (struct row){.capacity = capacity,
                                        .percent = 100.0 * (double)capacity / (double)t->all_bytes};
    }
    qsort(rows, kept, sizeof *rows, by_capacity);
    return kept;
}

int main(int argc, char **argv)
{
    static struct options o;
    static struct row rows[2 * MAX_CAPACITIES];
    struct sim_trace t = {.n_layer = 0};
    struct err e = {.code = ERR_OK};
    o.recipe = sim_trace_default();
    enum err_code code = parse_options(argc, argv, &o, &e);
    if (code == ERR_OK)
        code = load(&o, &t, &e);
    const uint32_t n = code == ERR_OK ? capacities(&o, &t, rows) : 0;
    for (uint32_t i = 0; i < n && code == ERR_OK; i++)
        code = measure(&t, &rows[i], &e);
    if (code == ERR_OK)
        code = bounds(&o, rows, n, &e);
    if (code == ERR_OK && o.json)
        print_json(&t, rows, n);
    else if (code == ERR_OK)
        print_table(&t, rows, n);
    if (code == ERR_OK && !o.json && n > 0 && rows[0].bounded)
        print_bounds(&t, rows, n);
    if (code == ERR_OK && o.plot != NULL)
        code = plot(&o, rows, n, &e);
    sim_trace_done(&t);
    if (code != ERR_OK)
        fprintf(stderr, "cachesim: %s\n", e.text);
    return code == ERR_OK ? 0 : code == ERR_ARGUMENT ? 2 : 1;
}
