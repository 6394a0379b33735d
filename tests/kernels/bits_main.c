/* bits [--quick | --full] [--seed N]: compares each level of this CPU with the reference. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bits.h"
#include "k_float.h"
#include "k_host.h"

static const struct {
    const char *name;
    bits_case *run;
    uint32_t quick; /* cases, four threads together; a sanitised build runs a share of them */
} cases[] = {
    {"matmul", bits_matmul, 700},       {"quantise", bits_quantise, 300},
    {"norm", bits_norm, 200},           {"rope", bits_rope, 100},
    {"attention", bits_attention, 120}, {"router", bits_router, 200},
    {"experts", bits_experts, 150},     {"small", bits_small, 100},
    {"nonfinite", bits_nonfinite, 100},
};

static bool open_side(enum k_level level, uint32_t threads, struct bits_side *side)
{
    struct err e = {0};
    if (k_open(level, threads, &side->device, &e) != ERR_OK ||
        k_ops(side->device)->stream_new(side->device, &side->stream, &e) != ERR_OK) {
        printf("FAIL: %s\n", e.text);
        return false;
    }
    side->ops = k_ops(side->device);
    return true;
}

static void close_side(struct bits_side *side)
{
    side->ops->stream_free(side->stream);
    k_close(side->device);
}

/* The float of every bit pattern (or every 257th): never a step down, and the ends as A11 says. */
static bool check_exp32(bool full, uint64_t *ret_n)
{
    const uint32_t step = full ? 1 : 257;
    float last = 0.0f;
    bool ok =
        k_exp32(-87.5f) == 0.0f && k_exp32(0.0f) == 1.0f && k_exp32(__builtin_nanf("")) == 0.0f;
    uint64_t n = 0;
    /* -104 up to -0: bit patterns falling; then 0 up to 90. */
    for (uint32_t u = k_float_bits(-104.0f); u >= 0x80000000u + step; u -= step, n++) {
        const float y = k_exp32(k_float_of_bits(u));
        ok &= y >= last;
        last = y;
    }
    for (uint32_t u = 0; u <= k_float_bits(90.0f); u += step, n++) {
        const float y = k_exp32(k_float_of_bits(u));
        ok &= y >= last;
        last = y;
    }
    *ret_n = n;
    return ok;
}

/* The level's own exp32, seen through the gate: silu(-x) for every float (or every 257th) up to 90
 * in size. */
static bool check_level_exp(struct bits_run *run)
{
    enum {
        N = 4096
    };
    const uint32_t step = run->full ? 1 : 257, last = k_float_bits(90.0f);
    static float h[N], ones[N], want[N];
    for (uint32_t i = 0; i < N; i++)
        ones[i] = 1.0f;
    for (uint32_t u = 0; u <= last; u += N / 2 * step) {
        for (uint32_t i = 0; i < N; i++) {
            const uint32_t bits = u + i / 2 * step < last ? u + i / 2 * step : last;
            h[i] = k_float_of_bits(bits | (i % 2) << 31);
            want[i] = k_float_swiglu(h[i], 1.0f);
        }
        k_host_of(run->tried.device)->inner.swiglu(h, ones, N);
        if (!bits_equal(run, "silu", want, h, N))
            return false;
    }
    return true;
}

static void run_level(struct bits_run *run, enum k_level level, const char *name)
{
    for (uint32_t threads = 1; threads <= 4; threads++) {
        if (!open_side(level, threads, &run->tried)) {
            run->failed++;
            return;
        }
        if (strcmp(run->tried.ops->name, name) != 0) {
            printf("FAIL: level %s was asked for and %s runs\n", name, run->tried.ops->name);
            run->failed++;
        }
        for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
            const uint32_t n = (run->full ? 20 : 1) * cases[c].quick / 4 / ISLET_TEST_SHARE;
            bool ok = true;
            for (uint32_t i = 0; i < n && ok; i++)
                ok = cases[c].run(run);
            run->passed += ok;
            run->failed += !ok;
            if (!ok)
                printf("FAIL: %s, level %s, %u threads\n", cases[c].name, name, threads);
        }
        if (threads == 1) {
            const bool ok = check_level_exp(run);
            run->passed += ok;
            run->failed += !ok;
        }
        close_side(&run->tried);
    }
    printf("level %s: ran, 1 to 4 threads\n", name);
}

int main(int argc, char **argv)
{
    uint64_t seed = 20261130;
    struct bits_run run = {0};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--full") == 0)
            run.full = true;
        else if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc)
            seed = strtoull(argv[++i], NULL, 0);
        else if (strcmp(argv[i], "--quick") != 0) {
            fprintf(stderr, "usage: bits [--quick | --full] [--seed N]\n");
            return 2;
        }
    }
    run.random.state = seed;
    printf("seed %llu; levels of this CPU: %s\n", (unsigned long long)seed, k_levels_available());
    if (!open_side(K_LEVEL_REFERENCE, 1, &run.reference))
        return 1;
    static const struct {
        enum k_level level;
        const char *name;
    } levels[] = {
        {K_LEVEL_REFERENCE, "reference"}, {K_LEVEL_AVX2, "avx2"}, {K_LEVEL_AVX512, "avx512"}};
    for (size_t l = 1; l < 3; l++) {
        if (strstr(k_levels_available(), levels[l].name) != NULL)
            run_level(&run, levels[l].level, levels[l].name);
        else
            printf("level %s: skip, this CPU lacks it\n", levels[l].name);
    }
    const bool seen = bits_mutation_is_seen(&run.random);
    run.passed += seen;
    run.failed += !seen;
    printf("mutation (two accumulators instead of one): %s\n", seen ? "seen" : "FAIL: not seen");
    uint64_t n = 0;
    const bool exp_ok = check_exp32(run.full, &n);
    run.passed += exp_ok;
    run.failed += !exp_ok;
    printf("exp32: %llu inputs, %s\n", (unsigned long long)n, exp_ok ? "monotonic" : "FAIL");
    close_side(&run.reference);
    printf("%llu values compared as bits\n", (unsigned long long)run.compared);
    printf("%u passed, %u failed\n", run.passed, run.failed);
    return run.failed != 0;
}
