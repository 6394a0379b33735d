/* `matmul`: arranged weights with up to eight rows by the decode kernels here, with more by the
 * prefill kernels, and what is not arranged by the plain ones. All matrices of a call go in one
 * launch where one kernel takes them all. */
#include "k_cuda_decode.cuh"
#include "k_cuda_plain.cuh"
#include "k_cuda_prefill.cuh"

namespace
{

struct part {
    const uint8_t *weights;
    float *y;
    uint32_t n_out, first; /* first unit of the launch */
    enum k_format format;
};

struct decode {
    struct part parts[K_MATMUL_MAX];
    uint32_t n_parts, units, n_in, max_rows;
    const uint8_t *q32, *q256;
    const uint32_t *n_rows;
    struct k_cuda_decode_shape shape;
};

/* The memory of max_rows rows is always there, so their number is looked at when results are
 * stored. */
struct decode_source {
    static constexpr bool LATE = true, ONE_ROW = false, FLOATS = false, ALONE = false;
    const struct decode &p;
    const uint8_t *act;
    uint64_t act_stride;
    float *y; /* row 0, the piece's first output */
    uint32_t n_out;

    __device__ uint32_t units() const
    {
        return p.units;
    }
    __device__ void find(uint32_t unit, struct k_cuda_decode_piece &ret)
    {
        uint32_t m = 0;
        while (m + 1 < p.n_parts && unit >= p.parts[m + 1].first)
            m++;
        const struct part &part = p.parts[m];
        const uint32_t stripe = unit - part.first;
        const enum k_form form = k_cuda_decode_form(part.format);
        act = form == K_FORM_Q32 ? p.q32 : p.q256;
        act_stride = k_cuda_act_stride(form, p.n_in);
        n_out = part.n_out;
        y = part.y + stripe * K_CUDA_TILE_OUTPUTS;
        ret.first[0] = ret.first[1] =
            part.weights + k_cuda_tile_offset(part.format, p.n_in, stripe, 0);
        ret.format = part.format;
        ret.n_in = p.n_in;
        ret.count = n_out / K_CUDA_TILE_OUTPUTS - stripe;
        ret.columns = p.max_rows;
    }
    __device__ void take(uint32_t, uint32_t) {} /* all: no more than eight */
    __device__ const uint8_t *row(uint32_t column) const
    {
        return act + column * act_stride;
    }
    __device__ void emit(uint32_t column, uint32_t output, float sum, float) const
    {
        if (column < *p.n_rows)
            y[(uint64_t)column * n_out + output] = sum;
    }
};

template <int F, int COLUMNS>
__global__ void __launch_bounds__(K_CUDA_DECODE_THREADS, K_CUDA_DECODE_BLOCKS)
    decode_rows(const struct decode p)
{
    extern __shared__ __align__(128) uint8_t k_cuda_decode_memory[];
    struct decode_source source = {p, NULL, 0, NULL, 0};
    k_cuda_decode<F, COLUMNS, 1>(p.shape, p.n_in, k_cuda_decode_memory, source);
}

template <int F> void decode_launch(const struct decode &p, uint32_t columns, struct k_stream *s)
{
    const dim3 grid(p.shape.grid), block(K_CUDA_DECODE_THREADS);
    const uint32_t bytes = k_cuda_decode_carve(NULL, p.shape, columns).bytes;
    if (columns == 1)
        K_CUDA_LAUNCH_AHEAD(s, (decode_rows<F, 1>), grid, block, bytes, p);
    else
        K_CUDA_LAUNCH_AHEAD(s, (decode_rows<F, 8>), grid, block, bytes, p);
}

uint32_t max_of(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

/* a's matrices are all arranged. */
void multiply_few(const struct k_matmul *a, struct k_stream *s)
{
    struct decode p = {};
    uint32_t slot = 0, blocks = 0;
    bool one_format = true;
    const uint32_t columns = a->rows.max_rows == 1 ? 1 : 8;
    for (uint32_t m = 0; m < a->n_matrices; m++) {
        const struct k_matrix *w = &a->w[m];
        struct part *part = &p.parts[p.n_parts++];
        part->weights = (const uint8_t *)k_cuda_at(w->data);
        part->y = (float *)k_cuda_at(a->y[m]);
        part->n_out = w->n_out;
        part->format = w->format;
        part->first = p.units;
        p.units += w->n_out / K_CUDA_TILE_OUTPUTS;
        slot = max_of(slot, k_cuda_tile_bytes(w->format));
        blocks = max_of(blocks, k_cuda_decode_blocks(w->format));
        one_format = one_format && w->format == a->w[0].format;
    }
    p.n_in = a->act.n;
    p.max_rows = a->rows.max_rows;
    p.q32 = (const uint8_t *)k_cuda_at(a->act.q32);
    p.q256 = (const uint8_t *)k_cuda_at(a->act.q256);
    p.n_rows = (const uint32_t *)k_cuda_at(a->rows.n_rows);
    p.shape = k_cuda_decode_choose(k_cuda_of(s->device), columns, slot, blocks, 1,
                                   p.n_in / K_CUDA_TILE_INPUTS, p.units);
    switch (one_format ? (int)a->w[0].format : (int)K_CUDA_DECODE_ANY) {
    case K_Q4_0:
        return decode_launch<K_Q4_0>(p, columns, s);
    case K_Q8_0:
        return decode_launch<K_Q8_0>(p, columns, s);
    case K_Q4_K:
        return decode_launch<K_Q4_K>(p, columns, s);
    case K_Q5_K:
        return decode_launch<K_Q5_K>(p, columns, s);
    case K_Q6_K:
        return decode_launch<K_Q6_K>(p, columns, s);
    default:
        return decode_launch<K_CUDA_DECODE_ANY>(p, columns, s);
    }
}

/* ---- what is not arranged -------------------------------------------------------------------- */

struct plain {
    const uint8_t *weights, *act;
    float *y;
    uint64_t row_bytes, act_stride;
    uint32_t n_out, n_in;
    const uint32_t *n_rows;
};

template <enum k_format F, int COLUMNS>
__global__ void __launch_bounds__(K_CUDA_PLAIN_THREADS) plain_rows(const struct plain p)
{
    const uint32_t o = blockIdx.x * K_CUDA_PLAIN_WARPS + threadIdx.x / 32;
    for (uint64_t i = threadIdx.x % 32 * 128; o < p.n_out && i < p.row_bytes; i += 32 * 128)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(p.weights + o * p.row_bytes + i));
    k_cuda_await();
    k_cuda_release();
    const uint32_t first = blockIdx.y * COLUMNS, n_rows = *p.n_rows;
    if (o >= p.n_out || first >= n_rows)
        return;
    const uint32_t count = min(n_rows - first, (uint32_t)COLUMNS);
    auto row = [&](uint32_t c) { return p.act + (first + c) * p.act_stride; };
    float r[COLUMNS];
    k_cuda_plain<F, COLUMNS>(p.weights + o * p.row_bytes, p.n_in, count, row, r);
    if (threadIdx.x % 32 == 0)
        for (int c = 0; c < COLUMNS; c++)
            if (c < count)
                p.y[(uint64_t)(first + c) * p.n_out + o] = r[c];
}

template <enum k_format F, int COLUMNS>
void plain_launch_columns(const struct plain &p, uint32_t max_rows, struct k_stream *s)
{
    const dim3 grid((p.n_out + K_CUDA_PLAIN_WARPS - 1) / K_CUDA_PLAIN_WARPS,
                    (max_rows + COLUMNS - 1) / COLUMNS);
    K_CUDA_LAUNCH_AHEAD(s, (plain_rows<F, COLUMNS>), grid, dim3(K_CUDA_PLAIN_THREADS), 0, p);
}

/* Columns share a warp's loads of weights, where there are warps enough without dividing them. */
template <enum k_format F>
void plain_launch(const struct plain &p, uint32_t max_rows, struct k_stream *s)
{
    const uint64_t full = 16 * (uint64_t)k_cuda_of(s->device)->sm_count;
    if (max_rows == 1 || (uint64_t)p.n_out * max_rows <= full)
        plain_launch_columns<F, 1>(p, max_rows, s);
    else
        plain_launch_columns<F, 8>(p, max_rows, s);
}

void multiply_plain(const struct k_matmul *a, uint32_t m, struct k_stream *s)
{
    const struct k_matrix *w = &a->w[m];
    const enum k_form form = k_format_form(w->format);
    struct plain p = {};
    p.weights = (const uint8_t *)k_cuda_at(w->data);
    p.act = (const uint8_t *)k_cuda_at(form == K_FORM_F32   ? a->act.f32
                                       : form == K_FORM_Q32 ? a->act.q32
                                                            : a->act.q256);
    p.y = (float *)k_cuda_at(a->y[m]);
    p.row_bytes = k_format_bytes(w->format, 1, w->n_in);
    p.act_stride = k_cuda_act_stride(form, w->n_in);
    p.n_out = w->n_out;
    p.n_in = w->n_in;
    p.n_rows = (const uint32_t *)k_cuda_at(a->rows.n_rows);
#define CASE(F) \
    case F:     \
        return plain_launch<F>(p, a->rows.max_rows, s);
    switch (w->format) {
        CASE(K_F32)
        CASE(K_F16)
        CASE(K_BF16)
        CASE(K_Q4_0)
        CASE(K_Q8_0)
        CASE(K_Q4_K)
        CASE(K_Q5_K)
        CASE(K_Q6_K)
    }
#undef CASE
}

} // namespace

extern "C" enum err_code k_cuda_matmul(const struct k_matmul *a, struct k_stream *s)
{
    struct k_matmul arranged = *a;
    arranged.n_matrices = 0;
    for (uint32_t m = 0; m < a->n_matrices; m++) {
        if (!k_cuda_tile_arranged(a->w[m].format, a->w[m].n_out, a->w[m].n_in)) {
            multiply_plain(a, m, s);
            continue;
        }
        arranged.w[arranged.n_matrices] = a->w[m];
        arranged.y[arranged.n_matrices++] = a->y[m];
    }
    if (arranged.n_matrices == 0)
        return ERR_OK;
    if (a->rows.max_rows > 8)
        return k_cuda_matmul_prefill(&arranged, s);
    multiply_few(&arranged, s);
    return ERR_OK;
}
