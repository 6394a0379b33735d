/* The compute pool: splits an operation in pieces, never a sum. Pieces are handed out one by one,
 * so that whoever is free takes the next; a helper that the scheduler holds back delays at most the
 * piece it has begun. Helpers spin for some microseconds after a job, then sleep. One job at a
 * time; the caller works too. */
#ifndef ISLET_K_POOL_H
#define ISLET_K_POOL_H

#include <stddef.h>
#include <stdint.h>

#include "err.h"

struct k_pool;

/* `thread` is 0..threads-1, for per-thread scratch. */
typedef void k_pool_fn(const void *context, uint32_t piece, uint32_t thread);

/* scratch_bytes: private to each thread, aligned to 64. Helpers check that denormals are on and
 * rounding is to nearest. Gives *ret; free with k_pool_free. */
enum err_code k_pool_new(uint32_t threads, size_t scratch_bytes, struct k_pool **ret, struct err *e)
    __attribute__((warn_unused_result));
void k_pool_free(struct k_pool *p);
/* Runs fn for pieces 0..n-1 and returns when all are done. n = 1 runs on the caller at once. */
void k_pool_run(struct k_pool *p, k_pool_fn *fn, const void *context, uint32_t n);
void *k_pool_scratch(struct k_pool *p, uint32_t thread);
/* A1: FTZ and DAZ off, rounding to nearest, in the calling thread. */
int k_pool_float_mode_is_exact(void);

#endif
