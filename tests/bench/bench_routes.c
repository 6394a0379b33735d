/* bench_routes TRACE...: what a trace of isletd (route.trace) says about the routers, for one
 * sequence that decodes or for prompts: rows count one after the other.
 *   same      share of a row's experts that the row before (of its sequence) had too, mean over
 *             layers, and the layers with the lowest and the highest
 *   zipf      exponent: slope of log popularity over log rank, in the upper half of the ranks
 *   entropy   of the choices of a layer, in percent of that of an even choice
 *   used      share of a layer's experts that served at all
 *   lru N %   hits of an LRU over all layers that holds N percent of the experts */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "alloc.h"
#include "route_trace.h"
#include "sim_replay.h"
#include "sim_trace.h"

static const double percents[] = {12.5, 25, 50};
enum {
    N_PERCENTS = sizeof(percents) / sizeof(percents[0])
};

struct figures {
    double same, lowest, highest, zipf, entropy, used;
    double lru[N_PERCENTS];
};

static const uint16_t *ids_of(const struct route_trace_file *f, uint64_t row, uint32_t layer)
{
    return f->ids + (row * f->shape.n_layer + layer) * f->shape.n_used;
}

static double same_in_layer(const struct route_trace_file *f, uint32_t layer)
{
    uint64_t same = 0, all = 0;
    for (uint64_t row = 1; row < f->n_rows; row++) {
        const uint16_t *now = ids_of(f, row, layer), *before = ids_of(f, row - 1, layer);
        if (f->sequence[row] != f->sequence[row - 1] || f->position[row] == 0)
            continue;
        all += f->shape.n_used;
        for (uint32_t i = 0; i < f->shape.n_used; i++)
            for (uint32_t k = 0; k < f->shape.n_used; k++)
                same += now[i] == before[k];
    }
    return all > 0 ? (double)same / (double)all : 0;
}

static int descending(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x < y) - (x > y);
}

/* Adds the layer's popularity to the sums in *ret. counts: [n_expert] of the caller. */
static void popularity(const struct route_trace_file *f, uint32_t layer, uint64_t *counts,
                       struct figures *ret)
{
    const uint32_t n = f->shape.n_expert;
    const double all = (double)f->n_rows * f->shape.n_used;
    double sx = 0, sy = 0, sxx = 0, sxy = 0, m = 0, entropy = 0, used = 0;
    memset(counts, 0, n * sizeof(counts[0]));
    for (uint64_t row = 0; row < f->n_rows; row++)
        for (uint32_t i = 0; i < f->shape.n_used; i++)
            counts[ids_of(f, row, layer)[i]]++;
    qsort(counts, n, sizeof(counts[0]), descending);
    for (uint32_t r = 0; r < n && counts[r] > 0; r++) {
        const double share = (double)counts[r] / all, x = log(r + 1), y = log(share);
        entropy -= share * y;
        used++;
        if (r >= n / 2)
            continue;
        sx += x;
        sy += y;
        sxx += x * x;
        sxy += x * y;
        m++;
    }
    ret->entropy += entropy / log(n);
    ret->used += used / n;
    ret->zipf -= m > 1 ? (m * sxy - sx * sy) / (m * sxx - sx * sx) : 0;
}

static enum err_code measure(const char *path, struct figures *ret, struct err *e)
{
    struct route_trace_file f = {0};
    struct sim_trace sim = {0};
    uint64_t *counts = NULL;
    enum err_code rc = route_trace_read(path, &f, e);
    if (rc == ERR_OK && f.n_rows < 2)
        rc = err_set(e, ERR_FORMAT, "%s holds no two rows", path);
    if (rc == ERR_OK)
        rc = sim_trace_from_file(&f, &sim, e);
    if (rc == ERR_OK &&
        (counts = alloc_zero(ALLOC_MISC, f.shape.n_expert, sizeof(*counts))) == NULL)
        rc = err_set(e, ERR_NOMEM, "no memory for counts");
    if (rc != ERR_OK)
        goto out;
    *ret = (struct figures){.lowest = 1};
    for (uint32_t layer = 0; layer < f.shape.n_layer; layer++) {
        const double same = same_in_layer(&f, layer);
        ret->same += same / f.shape.n_layer;
        ret->lowest = fmin(ret->lowest, same);
        ret->highest = fmax(ret->highest, same);
        popularity(&f, layer, counts, ret);
    }
    ret->zipf /= f.shape.n_layer;
    ret->entropy /= f.shape.n_layer;
    ret->used /= f.shape.n_layer;
    for (int i = 0; rc == ERR_OK && i < N_PERCENTS; i++) {
        struct sim_replay_result replay;
        rc = sim_replay_run(&sim, SIM_REPLAY_LRU, 0,
                            (uint64_t)((double)sim.all_bytes * percents[i] / 100), &replay, e);
        if (rc == ERR_OK)
            ret->lru[i] = (double)replay.hits / (double)replay.needs;
    }
out:
    alloc_free(counts);
    sim_trace_done(&sim);
    route_trace_file_done(&f);
    return rc;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        fprintf(stderr, "usage: bench_routes TRACE...\n");
        return 2;
    }
    printf("same (lowest, highest layer)    zipf  entropy  used");
    for (int i = 0; i < N_PERCENTS; i++)
        printf("  lru %4.1f %%", percents[i]);
    printf("\n");
    for (int i = 1; i < argc; i++) {
        struct figures f;
        struct err e = {.code = ERR_OK};
        if (measure(argv[i], &f, &e) != ERR_OK) {
            fprintf(stderr, "bench_routes: %s\n", e.text);
            return 1;
        }
        printf("%5.1f %% (%5.1f %%, %5.1f %%)      %5.2f   %4.0f %%  %3.0f %%", 100 * f.same,
               100 * f.lowest, 100 * f.highest, f.zipf, 100 * f.entropy, 100 * f.used);
        for (int k = 0; k < N_PERCENTS; k++)
            printf("     %4.0f %%", 100 * f.lru[k]);
        printf("  %s\n", argv[i]);
    }
    return 0;
}
