/* Host mathematics in plain double operations, so that every machine makes the same table (A15,
 * A20). */
#include <string.h>

#include "k_float.h"
#include "kernels.h"

/* The same operations with the processor's own fma; without it each is a call. */
__attribute__((target("fma"))) static float exp32_fma(float x)
{
    return k_float_exp32(x);
}

float k_exp32(float x)
{
    return __builtin_cpu_supports("fma") ? exp32_fma(x) : k_float_exp32(x);
}

/* x * 2^k by the exponent field, in two steps so that subnormal results round once. */
static double scale2(double x, int64_t k)
{
    while (k > 1000) {
        x *= 0x1p1000;
        k -= 1000;
    }
    while (k < -1000) {
        x *= 0x1p-1000;
        k += 1000;
    }
    const uint64_t bits = (uint64_t)(k + 1023) << 52;
    double factor;
    memcpy(&factor, &bits, sizeof factor);
    return x * factor;
}

/* Nearest even for |x| < 2^51. */
static double rint64(double x)
{
    volatile double magic = 6755399441055744.0; /* 1.5 * 2^52 */
    return (x + magic) - magic;
}

double k_exp64(double x)
{
    const double k = rint64(x * 1.4426950408889634);
    const double r = (x - k * 0.693147180369123816490) - k * 1.90821492927058770002e-10;
    double s = 1.0;
    for (int i = 14; i >= 1; i--)
        s = 1.0 + s * r / (double)i;
    return scale2(s, (int64_t)k);
}

double k_log64(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int64_t e = (int64_t)(bits >> 52) - 1023;
    if ((bits >> 52) == 0) { /* subnormal */
        x *= 0x1p54;
        memcpy(&bits, &x, sizeof bits);
        e = (int64_t)(bits >> 52) - 1023 - 54;
    }
    bits = (bits & 0xfffffffffffffu) | (UINT64_C(1023) << 52);
    double m;
    memcpy(&m, &bits, sizeof m);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        e++;
    }
    const double s = (m - 1.0) / (m + 1.0), z = s * s;
    double p = 0.0;
    for (int i = 23; i >= 1; i -= 2)
        p = p * z + 1.0 / (double)i;
    return (double)e * 0.693147180369123816490 +
           (2.0 * s * p + (double)e * 1.90821492927058770002e-10);
}

static void sincos64(double x, double *ret_sin, double *ret_cos)
{
    const double k = rint64(x * 0.63661977236758134308);
    const double r = ((x - k * 1.57079632673412561417) - k * 6.07710050630396597660e-11) -
                     k * 2.02226624879595063154e-21;
    const double z = r * r;
    double u = 0.0, v = 0.0;
    for (int i = 17; i >= 3; i -= 2)
        u = (u + 1.0) * (-z / (double)(i * (i - 1)));
    for (int i = 18; i >= 2; i -= 2)
        v = (v + 1.0) * (-z / (double)(i * (i - 1)));
    const double s = r + r * u, c = 1.0 + v;
    switch ((int64_t)k & 3) {
    case 0:
        *ret_sin = s;
        *ret_cos = c;
        break;
    case 1:
        *ret_sin = c;
        *ret_cos = -s;
        break;
    case 2:
        *ret_sin = -s;
        *ret_cos = -c;
        break;
    default:
        *ret_sin = -c;
        *ret_cos = s;
        break;
    }
}

void k_rope_table(double base, uint32_t rope_dim, uint32_t n_positions, float *out)
{
    const double log_base = k_log64(base);
    for (uint32_t i = 0; i < rope_dim / 2; i++) {
        const double freq = k_exp64(-2.0 * (double)i / (double)rope_dim * log_base);
        for (uint32_t position = 0; position < n_positions; position++) {
            double s, c;
            sincos64((double)position * freq, &s, &c);
            float *pair = out + ((size_t)position * (rope_dim / 2) + i) * 2;
            pair[0] = (float)c;
            pair[1] = (float)s;
        }
    }
}
