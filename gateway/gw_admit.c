#include "gw_admit.h"

enum {
    STEP_MS = 1000 /* weight of a priority step and of a running request of the same key */
};

void gw_admit_init(struct gw_admit *a, size_t max_waiting, uint32_t slots)
{
    *a = (struct gw_admit){.max_waiting = max_waiting, .slots = slots, .mean_ms = 1000};
    list_init(&a->waiting);
    list_init(&a->running);
}

enum gw_admit_result gw_admit_request(struct gw_admit *a, struct gw_admit_ticket *t,
                                      uint64_t now_ns)
{
    size_t places = a->slots > a->n_running ? a->slots - a->n_running : 0;
    if (a->paused)
        return GW_ADMIT_PAUSED;
    if (a->n_waiting >= a->max_waiting + places)
        return GW_ADMIT_FULL;
    t->arrived_ns = now_ns;
    t->waiting = true;
    t->running = false;
    list_append(&a->waiting, &t->link);
    a->n_waiting++;
    return GW_ADMIT_TAKEN;
}

static int64_t running_of(const struct gw_admit *a, uint64_t key)
{
    int64_t n = 0;
    list_each(it, &a->running) {
        if (list_entry(it, struct gw_admit_ticket, link)->key == key)
            n++;
    }
    return n;
}

static int64_t rank(const struct gw_admit_ticket *t, uint64_t now_ns)
{
    int64_t waited_ms = now_ns > t->arrived_ns ? (int64_t)((now_ns - t->arrived_ns) / 1000000u) : 0;
    return t->priority * STEP_MS - waited_ms;
}

struct gw_admit_ticket *gw_admit_next(const struct gw_admit *a, uint64_t now_ns)
{
    struct gw_admit_ticket *best = NULL;
    int64_t best_rank = 0;
    list_each(it, &a->waiting) {
        struct gw_admit_ticket *t = list_entry(it, struct gw_admit_ticket, link);
        int64_t r = rank(t, now_ns) + STEP_MS * running_of(a, t->key);
        if (!best || r < best_rank) {
            best = t;
            best_rank = r;
        }
    }
    return best;
}

void gw_admit_start(struct gw_admit *a, struct gw_admit_ticket *t, uint64_t now_ns)
{
    if (!t->waiting)
        return;
    list_remove(&t->link);
    a->n_waiting--;
    t->waiting = false;
    t->running = true;
    t->started_ns = now_ns;
    list_append(&a->running, &t->link);
    a->n_running++;
}

void gw_admit_leave(struct gw_admit *a, struct gw_admit_ticket *t, uint64_t now_ns)
{
    if (t->waiting)
        a->n_waiting--;
    if (t->running) {
        a->n_running--;
        double ran_ms = now_ns > t->started_ns ? (double)(now_ns - t->started_ns) / 1e6 : 0;
        a->mean_ms += (ran_ms - a->mean_ms) / 8;
    }
    if (t->waiting || t->running)
        list_remove(&t->link);
    t->waiting = t->running = false;
}

unsigned gw_admit_retry_after_s(const struct gw_admit *a)
{
    double slots = a->slots > 0 ? a->slots : 1;
    double wait_s = a->mean_ms * (double)(a->n_waiting + 1) / slots / 1000;
    if (!(wait_s > 1))
        return 1;
    return wait_s >= 30 ? 30 : (unsigned)(wait_s + 0.999);
}
