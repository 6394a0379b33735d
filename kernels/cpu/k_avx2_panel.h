/* Products with several rows by AVX2: as k_avx512_panel.h, with 8 outputs a panel. */
#ifndef ISLET_K_AVX2_PANEL_H
#define ISLET_K_AVX2_PANEL_H

#include "k_cpu_inner.h"

/* As k_cpu_mul_fn, quantised formats; n_rows <= K_CPU_TILE_ROWS. */
k_cpu_mul_fn k_avx2_panel_mul;

#endif
