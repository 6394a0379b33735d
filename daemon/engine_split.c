#include "engine_split.h"

double engine_split_cpu_ns(const struct engine_split_rates *rates,
                           const struct engine_split_layer *layer, uint32_t n_rows)
{
    const double bytes = (double)layer->expert_bytes;
    const double read = bytes / rates->cpu, computed = bytes * n_rows / rates->cpu_row;
    const double sent = (double)layer->row_bytes * n_rows / rates->link;
    return 1e9 * ((read > computed ? read : computed) + sent);
}

/* By rows, most first. By insertion: in decode nearly all have one row, so that it is one pass. */
static void sort(const uint32_t *n_rows, uint32_t n, uint32_t *order)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t k = i;
        for (; k > 0 && n_rows[order[k - 1]] < n_rows[i]; k--)
            order[k] = order[k - 1];
        order[k] = i;
    }
}

uint32_t engine_split_plan(const struct engine_split_rates *rates,
                           const struct engine_split_layer *layer, uint32_t *ret_order)
{
    const double bytes = (double)layer->expert_bytes;
    const double compute = 1e9 * bytes / rates->gpu, copy = 1e9 * bytes / rates->link;
    double cpu = 0, best = 0;
    uint32_t best_copied = layer->n;
    sort(layer->n_rows, layer->n, ret_order);
    if (layer->placement != ENGINE_PLACEMENT_BEST)
        return layer->placement == ENGINE_PLACEMENT_COPY ? layer->n : 0;
    for (uint32_t i = 0; i <= layer->n; i++) { /* the last i are the CPU's */
        const uint32_t copied = layer->n - i;
        if (i > 0)
            cpu += engine_split_cpu_ns(rates, layer, layer->n_rows[ret_order[copied]]);
        const double resident = compute * layer->n_resident, link = copy * copied;
        /* copies run beside the resident experts; the last one is computed after it came */
        double gpu = resident + compute * copied;
        if (copied > 0 && gpu < link + compute)
            gpu = link + compute;
        const double here = rates->copy_ns * copied + (i == 0 ? 0 : cpu + rates->sync_ns);
        const double all = gpu > here ? gpu : here;
        if (i == 0 || all < best) {
            best = all;
            best_copied = copied;
        }
    }
    return best_copied;
}

void engine_split_learn(double *rate, uint64_t bytes, uint64_t ns)
{
    if (bytes == 0 || ns == 0)
        return;
    const double now = 1e9 * (double)bytes / (double)ns;
    *rate = *rate > 0 ? 0.9 * *rate + 0.1 * now : now;
}

void engine_split_learn_ns(double *time, uint32_t n, uint64_t ns)
{
    if (n == 0)
        return;
    const double now = (double)ns / n;
    *time = *time > 0 ? 0.9 * *time + 0.1 * now : now;
}
