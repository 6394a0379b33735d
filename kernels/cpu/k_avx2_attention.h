/* The forms of attention that are rare or small, which AVX-512 takes from AVX2 as they are. */
#ifndef ISLET_K_AVX2_ATTENTION_H
#define ISLET_K_AVX2_ATTENTION_H

#include "k_cpu_inner.h"

/* 8-bit pages; head_dim a multiple of 32, at most K_ATTENTION_DIM. */
k_cpu_attention_fn k_avx2_attention_q8;

#endif
