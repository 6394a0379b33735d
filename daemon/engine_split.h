/* Which of a layer's experts that are in no island are computed by the CPU where they lie in RAM,
 * and which are copied to the GPU now: pure. Both sides work at the same time, so the split is the
 * one whose slower side is done first. The bits of an answer do not depend on it. */
#ifndef ISLET_ENGINE_SPLIT_H
#define ISLET_ENGINE_SPLIT_H

#include <stdint.h>

/* Who computes experts that are in no island. The answers are the same. */
enum engine_placement {
    ENGINE_PLACEMENT_BEST,   /* by the rates; islands have what is used most */
    ENGINE_PLACEMENT_CPU,    /* the others are there to be measured against: the CPU, for all */
    ENGINE_PLACEMENT_LAYERS, /* the CPU; some layers' experts are in islands and stay there */
    ENGINE_PLACEMENT_COPY    /* the GPU; islands have what is used most */
};

/* Bytes a second but for what ends in _ns. */
struct engine_split_rates {
    double link;    /* copies to the GPU */
    double cpu;     /* weights that the CPU computes with for one row */
    double cpu_row; /* weights times rows that the CPU computes: its bound with many rows */
    double gpu;     /* weights that the GPU computes with */
    double sync_ns; /* what a layer loses when the CPU takes part at all */
    double copy_ns; /* that the CPU takes to begin a copy, and does not compute meanwhile */
};

struct engine_split_layer {
    uint64_t expert_bytes;  /* that are computed with */
    uint64_t row_bytes;     /* of a row's result, which the CPU sends to the GPU */
    uint32_t n_resident;    /* experts that the GPU computes in any case */
    uint32_t n;             /* experts to be split, */
    const uint32_t *n_rows; /* [n] with so many rows each */
    enum engine_placement placement;
};

/* Time that the CPU takes for an expert, the way of its results to the GPU included. */
double engine_split_cpu_ns(const struct engine_split_rates *rates,
                           const struct engine_split_layer *layer, uint32_t n_rows);
/* Puts the experts, as indices into n_rows, into ret_order [n]: those that are copied first, with
 * most rows first; returns how many these are. Equal rows keep their order. */
uint32_t engine_split_plan(const struct engine_split_rates *rates,
                           const struct engine_split_layer *layer, uint32_t *ret_order);

/* Takes a measurement into account: `bytes` (times rows for cpu_row) took `ns`. */
void engine_split_learn(double *rate, uint64_t bytes, uint64_t ns);
/* The same for a time: `n` of something took `ns`. */
void engine_split_learn_ns(double *time, uint32_t n, uint64_t ns);

#endif
