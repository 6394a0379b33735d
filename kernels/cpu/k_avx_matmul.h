/* The product's loops, the same for both AVX levels: included by k_<level>_matmul.c after it has defined
 *   struct unpacked, unpack256    a super-block made ready
 *   dot256, less_offset, mins_dot its integer sums, as lanes yet to be added
 *   weights32, dot32              the same for 32-blocks
 *   f16_lanes                     eight f16 in 32-bit lanes to floats */
#ifndef ISLET_K_AVX_MATMUL_H
#define ISLET_K_AVX_MATMUL_H

/* d in the low half, dmin in the high one (Q4_K, Q5_K); d alone (Q6_K, 32-blocks). */
static inline uint32_t scales_bits(enum k_format format, const uint8_t *block)
{
    uint32_t both = 0;
    if (format == K_Q4_K || format == K_Q5_K)
        memcpy(&both, block, 4);
    else
        memcpy(&both, block + (format == K_Q6_K ? offsetof(struct k_format_q6_k, d) : 0), 2);
    return both;
}

/* t of eight blocks (A5) from their S, M and scales. */
static inline __m256 t_of(enum k_format format, __m256i s, __m256i m, __m256i d_bits)
{
    const __m256 d = f16_lanes(_mm256_and_si256(d_bits, _mm256_set1_epi32(0xffff)));
    if (format != K_Q4_K && format != K_Q5_K)
        return _mm256_mul_ps(d, _mm256_cvtepi32_ps(s));
    const __m256 dmin = f16_lanes(_mm256_srli_epi32(d_bits, 16));
    return _mm256_fmsub_ps(d, _mm256_cvtepi32_ps(s), _mm256_mul_ps(dmin, _mm256_cvtepi32_ps(m)));
}

/* acc = fma(dx[b], t[b], acc) for each output; eight outputs at a time hide the latency (A6). */
static inline void fold(const float *t, uint32_t n_blocks, const float *dx, uint32_t n_out,
                        float *y)
{
    for (uint32_t o = 0; o < n_out; o += LANES) {
        const uint32_t n = n_out - o < LANES ? n_out - o : LANES;
        const float *row[LANES];
        float acc[LANES] = {0};
        for (uint32_t i = 0; i < LANES; i++)
            row[i] = t + (size_t)(o + (i < n ? i : n - 1)) * n_blocks;
        for (uint32_t b = 0; b < n_blocks; b++)
            for (uint32_t i = 0; i < LANES; i++)
                acc[i] = k_float_fma(dx[b], row[i][b], acc[i]);
        memcpy(y + o, acc, n * sizeof(float));
    }
}

/* Blocks of one row: eight at a time in memory order, whatever outputs they belong to. */
static inline __attribute__((always_inline)) void stream256(enum k_format format, const uint8_t *w,
                                                            uint32_t n, uint32_t n_blocks,
                                                            const struct k_act_row *x, float *t)
{
    const uint32_t bytes = format == K_Q4_K ? 144 : format == K_Q5_K ? 176 : 210;
    uint32_t xb = 0;
    for (uint32_t i = 0; i < n; i += LANES) {
        __m256i s[LANES];
        __m128i m[LANES];
        uint32_t d[LANES];
        for (uint32_t l = 0; l < LANES; l++) {
            /* Past the end the last block is computed again; t has room for it. */
            const uint8_t *block = w + (size_t)(i + l < n ? i + l : n - 1) * bytes;
            struct unpacked u;
            _mm_prefetch((const char *)block + 1024, _MM_HINT_T0);
            _mm_prefetch((const char *)block + 1088, _MM_HINT_T0);
            unpack256(format, block, &u);
            s[l] = dot256(&u, x->q + 256 * xb);
            if (format == K_Q6_K)
                s[l] = less_offset(&u, s[l], x->sum16 + 16 * xb);
            else
                m[l] = mins_dot(&u, x->sum + 8 * xb);
            d[l] = scales_bits(format, block);
            xb = xb + 1 == n_blocks ? 0 : xb + 1;
        }
        const __m256i mins = format == K_Q6_K ? _mm256_setzero_si256() : tree8_128(m);
        _mm256_storeu_ps(t + i, t_of(format, tree8(s), mins,
                                     _mm256_loadu_si256((const __m256i *)(const void *)d)));
    }
}

static inline __attribute__((always_inline)) void stream32(enum k_format format, const uint8_t *w,
                                                           uint32_t n, uint32_t n_blocks,
                                                           const struct k_act_row *x, float *t)
{
    const uint32_t bytes = format == K_Q8_0 ? 34 : 18;
    uint32_t xb = 0;
    for (uint32_t i = 0; i < n; i += LANES) {
        __m256i s[LANES];
        uint32_t d[LANES];
        _mm_prefetch((const char *)w + (size_t)i * bytes + 1024, _MM_HINT_T0);
        _mm_prefetch((const char *)w + (size_t)i * bytes + 1088, _MM_HINT_T0);
        _mm_prefetch((const char *)w + (size_t)i * bytes + 1152, _MM_HINT_T0);
        _mm_prefetch((const char *)w + (size_t)i * bytes + 1216, _MM_HINT_T0);
        for (uint32_t l = 0; l < LANES; l++) {
            const uint8_t *block = w + (size_t)(i + l < n ? i + l : n - 1) * bytes;
            s[l] = dot32(format, weights32(format, block), x->q + 32 * xb, x->sum[xb]);
            d[l] = scales_bits(format, block);
            xb = xb + 1 == n_blocks ? 0 : xb + 1;
        }
        _mm256_storeu_ps(t + i, t_of(format, tree8(s), _mm256_setzero_si256(),
                                     _mm256_loadu_si256((const __m256i *)(const void *)d)));
    }
}

static inline __attribute__((always_inline)) void one_row(enum k_format format, const uint8_t *w,
                                                          uint32_t n_out, uint32_t n_in,
                                                          const void *x, float *y, float *t)
{
    const enum k_form form = format == K_Q8_0 || format == K_Q4_0 ? K_FORM_Q32 : K_FORM_Q256;
    const struct k_act_row row = k_format_act_row(form, (void *)(uintptr_t)x, n_in);
    const uint32_t n_blocks = n_in / (form == K_FORM_Q32 ? 32 : 256);
    const uint64_t stride = k_format_bytes(format, 1, n_in);
    const uint32_t tile = T_MAX / n_blocks < 64 ? T_MAX / n_blocks : 64;
    for (uint32_t o = 0; o < n_out; o += tile) {
        const uint32_t n = n_out - o < tile ? n_out - o : tile;
        if (form == K_FORM_Q32)
            stream32(format, w + stride * o, n * n_blocks, n_blocks, &row, t);
        else
            stream256(format, w + stride * o, n * n_blocks, n_blocks, &row, t);
        fold(t, n_blocks, row.dx, n, y + o);
    }
}

/* A tile of up to eight rows; lane = row. dx: float [n_blocks][8]. */
static inline __attribute__((always_inline)) void tile_rows(enum k_format format, const uint8_t *w,
                                                            uint32_t n_out, uint32_t n_in,
                                                            const struct k_act_row *x,
                                                            uint32_t n_rows, const float *dx,
                                                            float *const *y)
{
    const bool small = format == K_Q8_0 || format == K_Q4_0;
    const uint32_t block = small ? 32 : 256, n_blocks = n_in / block;
    const uint32_t bytes = k_format_block_bytes(format);
    for (uint32_t o = 0; o < n_out; o++) {
        __m256 acc = _mm256_setzero_ps();
        for (uint32_t b = 0; b < n_blocks; b++, w += bytes) {
            __m256i s[LANES];
            __m128i m[LANES];
            struct unpacked u;
            __m256i w32 = _mm256_setzero_si256();
            if (small)
                w32 = weights32(format, w);
            else
                unpack256(format, w, &u);
            for (uint32_t r = 0; r < LANES; r++) {
                if (r >= n_rows) {
                    s[r] = _mm256_setzero_si256();
                    m[r] = _mm_setzero_si128();
                    continue;
                }
                if (small) {
                    s[r] = dot32(format, w32, x[r].q + 32 * b, x[r].sum[b]);
                    continue;
                }
                s[r] = dot256(&u, x[r].q + 256 * b);
                if (format == K_Q6_K)
                    s[r] = less_offset(&u, s[r], x[r].sum16 + 16 * b);
                else
                    m[r] = mins_dot(&u, x[r].sum + 8 * b);
            }
            const bool mins = format == K_Q4_K || format == K_Q5_K;
            const __m256 t = t_of(format, tree8(s), mins ? tree8_128(m) : _mm256_setzero_si256(),
                                  _mm256_set1_epi32((int)scales_bits(format, w)));
            acc = _mm256_fmadd_ps(_mm256_loadu_ps(dx + LANES * b), t, acc);
        }
        float out[LANES];
        _mm256_storeu_ps(out, acc);
        for (uint32_t r = 0; r < n_rows; r++)
            y[r][o] = out[r];
    }
}

static inline __attribute__((always_inline)) void mul_format(enum k_format format, const uint8_t *w,
                                                             uint32_t n_out, uint32_t n_in,
                                                             const void *const *x, float *const *y,
                                                             uint32_t n_rows, void *work)
{
    if (n_rows == 1) {
        one_row(format, w, n_out, n_in, x[0], y[0], work);
        return;
    }
    const enum k_form form = format == K_Q8_0 || format == K_Q4_0 ? K_FORM_Q32 : K_FORM_Q256;
    const uint32_t n_blocks = n_in / (form == K_FORM_Q32 ? 32 : 256);
    float *dx = work;
    for (uint32_t first = 0; first < n_rows; first += LANES) {
        const uint32_t n = n_rows - first < LANES ? n_rows - first : LANES;
        struct k_act_row rows[LANES];
        for (uint32_t r = 0; r < n; r++)
            rows[r] = k_format_act_row(form, (void *)(uintptr_t)x[first + r], n_in);
        for (uint32_t b = 0; b < n_blocks; b++)
            for (uint32_t r = 0; r < LANES; r++)
                dx[LANES * b + r] = r < n ? rows[r].dx[b] : 0.0f;
        if (n == LANES)
            tile_rows(format, w, n_out, n_in, rows, LANES, dx, y + first);
        else
            tile_rows(format, w, n_out, n_in, rows, n, dx, y + first);
    }
}

#endif
