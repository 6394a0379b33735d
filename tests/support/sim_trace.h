/* Needs of an expert cache in the order of the engine: each pass of a step through a layer needs
 * some experts, each once, for some of the step's rows. From a recorded trace or generated. */
#ifndef ISLET_SIM_TRACE_H
#define ISLET_SIM_TRACE_H

#include <stdint.h>

#include "err.h"
#include "route_trace.h"

struct sim_need {
    uint16_t expert;
    uint16_t rows;
};

struct sim_trace {
    uint32_t n_layer, n_expert, n_used;
    uint64_t *layer_bytes; /* [n_layer] */
    uint64_t all_bytes;    /* of all experts */
    uint32_t n_steps;
    uint32_t *step_rows; /* [n_steps] */
    uint64_t *first;     /* [n_steps * n_layer + 1] first need of each pass */
    struct sim_need *needs;
    uint64_t n_needs, n_rows;
    float *chances; /* [n_steps][n_layer][n_expert] of being needed, by what came before the step;
                     * NULL: not known */
};

enum sim_trace_chances {
    SIM_TRACE_NO_CHANCES,
    SIM_TRACE_TOLD,  /* of who knows the generator */
    SIM_TRACE_UNTOLD /* of who knows it, and of each expert whether it was drawn by weight, but has
                      * to learn from those draws which expert has which weight */
};

/* What a generated trace looks like. Experts of a layer have Zipf weights in an order that each
 * topic shuffles for itself; a token takes each expert of the one before (of its sequence) with
 * probability `locality`, one of the last `window` tokens' with probability `recent`, the others
 * by weight. */
struct sim_trace_recipe {
    uint32_t layers, experts, used;
    uint32_t tokens; /* of each sequence, decoded one a step */
    uint32_t rows;   /* sequences that decode together */
    double zipf, locality, recent;
    uint32_t window;
    uint32_t topics, stay; /* each sequence changes its topic every `stay` tokens */
    uint32_t chunk, every; /* a prefill step of `chunk` rows before each `every` tokens; 0: none */
    uint32_t bytes, odd_bytes; /* of an expert; of an expert of each third layer */
    uint64_t seed;
    enum sim_trace_chances chances; /* kept if they fit 1 GiB; of a prefill step: what it needs */
};

struct sim_trace_recipe sim_trace_default(void);
/* "zipf=1.0,locality=0.4,topics=8": names as in the recipe. ERR_ARGUMENT names the word. */
enum err_code sim_trace_words(const char *text, struct sim_trace_recipe *r, struct err *e)
    __attribute__((warn_unused_result));
enum err_code sim_trace_generate(const struct sim_trace_recipe *r, struct sim_trace *ret,
                                 struct err *e) __attribute__((warn_unused_result));
enum err_code sim_trace_from_file(const struct route_trace_file *f, struct sim_trace *ret,
                                  struct err *e) __attribute__((warn_unused_result));
void sim_trace_done(struct sim_trace *t); /* of zeroes is fine */

#endif
