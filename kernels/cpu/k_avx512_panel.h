/* Products with several rows by AVX-512 VNNI (B2's form, made on the fly): 16 outputs' blocks are
 * unpacked once into a panel with lane = output, and every row of the batch runs over it. */
#ifndef ISLET_K_AVX512_PANEL_H
#define ISLET_K_AVX512_PANEL_H

#include "k_cpu_inner.h"

/* As k_cpu_mul_fn, quantised formats; n_rows <= K_CPU_TILE_ROWS. */
k_cpu_mul_fn k_avx512_panel_mul;

#endif
