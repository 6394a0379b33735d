/* One specialised copy of the loops per format; the same for both AVX levels: included by k_<level>_matmul.c last, after
 * mul_float. */
#ifndef ISLET_K_AVX_DISPATCH_H
#define ISLET_K_AVX_DISPATCH_H

static void mul(enum k_format format, const void *w, uint32_t n_out, uint32_t n_in,
                const void *const *x, float *const *y, uint32_t n_rows, void *work)
{
    switch (format) {
    case K_F32:
        mul_float(K_F32, w, n_out, n_in, x, y, n_rows);
        break;
    case K_F16:
        mul_float(K_F16, w, n_out, n_in, x, y, n_rows);
        break;
    case K_BF16:
        mul_float(K_BF16, w, n_out, n_in, x, y, n_rows);
        break;
    case K_Q4_0:
        mul_format(K_Q4_0, w, n_out, n_in, x, y, n_rows, work);
        break;
    case K_Q8_0:
        mul_format(K_Q8_0, w, n_out, n_in, x, y, n_rows, work);
        break;
    case K_Q4_K:
        mul_format(K_Q4_K, w, n_out, n_in, x, y, n_rows, work);
        break;
    case K_Q5_K:
        mul_format(K_Q5_K, w, n_out, n_in, x, y, n_rows, work);
        break;
    case K_Q6_K:
        mul_format(K_Q6_K, w, n_out, n_in, x, y, n_rows, work);
        break;
    }
}

#endif
