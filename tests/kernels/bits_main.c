/* Compares backends with the reference, bit for bit, over random shapes and inputs.
 *   bits [--quick | --full] [--seed N]          each level of this CPU, 1 to 4 threads
 *   bits --backend cuda [...]                   the GPU (islet-cuda.so of this build, or --file)
 *   --only matmul --cases 2000                  one kind of case (see `cases`), so many of them
 *   --file build/lib/islet-cuda.so              another shared object
 * On a GPU a third of the cases is recorded as a graph and replayed, weights are arranged first,
 * row counts lie below max_rows, and some cases have hundreds of rows. A kind needs the operations
 * that it calls: matmul: quantise arrange matmul; experts: grouping quantise arrange moe_*;
 * attention: kv_write attention; small: embed arrange add gather; router: router grouping. What
 * failed is printed with its shape; the same --seed and --only repeat it. Exit 0 and "skip: no CUDA
 * device" without one. */
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
    {"nonfinite", bits_nonfinite, 100}, {"enter", bits_enter, 200},
    {"heads", bits_heads, 200},         {"attend", bits_attend, 200},
    {"route", bits_route, 200},         {"pick", bits_pick, 100},
    {"device", bits_device, 100},
};
static const size_t N_CASES = sizeof cases / sizeof cases[0];

static bool stream_of(struct bits_side *side)
{
    struct err e = {0};
    side->ops = k_ops(side->device);
    if (side->ops->stream_new(side->device, &side->stream, &e) == ERR_OK)
        return true;
    printf("FAIL: %s\n", e.text);
    return false;
}

static bool open_side(enum k_level level, uint32_t threads, struct bits_side *side)
{
    struct err e = {0};
    if (k_open(level, threads, &side->device, &e) == ERR_OK)
        return stream_of(side);
    printf("FAIL: %s\n", e.text);
    return false;
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

static bool is_wanted(const struct bits_run *run, size_t c)
{
    if (!run->device && cases[c].run == bits_device)
        return false;
    return run->only == NULL || strcmp(run->only, cases[c].name) == 0;
}

static uint32_t case_count(const struct bits_run *run, size_t c)
{
    return run->cases > 0 ? run->cases : (run->full ? 20 : 1) * cases[c].quick / ISLET_TEST_SHARE;
}

/* n cases of a kind, up to the first that differs. */
static bool run_cases(struct bits_run *run, size_t c, uint32_t n)
{
    bool ok = true;
    for (uint32_t i = 0; i < n && ok; i++) {
        run->tried.record = run->device && bits_below(&run->random, 3) == 0;
        ok = cases[c].run(run);
        if (!ok)
            printf("%s: case %u of %u%s\n", cases[c].name, i + 1, n,
                   run->tried.record ? ", recorded and replayed" : "");
    }
    run->tried.record = false;
    run->passed += ok;
    run->failed += !ok;
    return ok;
}

/* 0: nothing failed, or there is no GPU. */
static int run_cuda(struct bits_run *run, const char *file)
{
    struct err e = {0};
    const struct k_cuda_options options = {.file = file, .ordinal = -1};
    const enum err_code code = k_open_cuda(&options, &run->tried.device, &e);
    if (code == ERR_UNSUPPORTED) {
        printf("skip: no CUDA device (%s)\n", e.text);
        return 0;
    }
    if (code != ERR_OK) {
        printf("FAIL: %s\n", e.text);
        return 1;
    }
    if (!stream_of(&run->tried) || !open_side(K_LEVEL_REFERENCE, 1, &run->reference))
        return 1;
    printf("%s\n", run->tried.ops->describe(run->tried.device));
    run->device = true;
    for (size_t c = 0; c < N_CASES; c++) {
        const uint64_t before = run->compared;
        const uint32_t n = case_count(run, c);
        if (!is_wanted(run, c))
            continue;
        const bool ok = run_cases(run, c, n);
        printf("%s%s: %u cases, %llu values\n", ok ? "" : "FAIL: ", cases[c].name, n,
               (unsigned long long)(run->compared - before));
    }
    close_side(&run->reference);
    close_side(&run->tried);
    printf("%llu values compared as bits\n", (unsigned long long)run->compared);
    printf("%u passed, %u failed\n", run->passed, run->failed);
    return run->failed != 0;
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
        for (size_t c = 0; c < N_CASES; c++) {
            const uint32_t n = case_count(run, c) / 4;
            if (is_wanted(run, c) && !run_cases(run, c, n == 0 ? 1 : n))
                printf("FAIL: %s, level %s, %u threads\n", cases[c].name, name, threads);
        }
        if (threads == 1 && run->only == NULL) {
            const bool ok = check_level_exp(run);
            run->passed += ok;
            run->failed += !ok;
        }
        close_side(&run->tried);
    }
    printf("level %s: ran, 1 to 4 threads\n", name);
}

static bool is_kind(const char *name)
{
    for (size_t c = 0; c < N_CASES; c++)
        if (strcmp(name, cases[c].name) == 0)
            return true;
    return false;
}

static int run_cpu(struct bits_run *run)
{
    printf("levels of this CPU: %s\n", k_levels_available());
    if (!open_side(K_LEVEL_REFERENCE, 1, &run->reference))
        return 1;
    static const struct {
        enum k_level level;
        const char *name;
    } levels[] = {
        {K_LEVEL_REFERENCE, "reference"}, {K_LEVEL_AVX2, "avx2"}, {K_LEVEL_AVX512, "avx512"}};
    for (size_t l = 1; l < 3; l++) {
        if (strstr(k_levels_available(), levels[l].name) != NULL)
            run_level(run, levels[l].level, levels[l].name);
        else
            printf("level %s: skip, this CPU lacks it\n", levels[l].name);
    }
    const bool seen = bits_mutation_is_seen(&run->random);
    run->passed += seen;
    run->failed += !seen;
    printf("mutation (two accumulators instead of one): %s\n", seen ? "seen" : "FAIL: not seen");
    uint64_t n = 0;
    const bool exp_ok = check_exp32(run->full, &n);
    run->passed += exp_ok;
    run->failed += !exp_ok;
    printf("exp32: %llu inputs, %s\n", (unsigned long long)n, exp_ok ? "monotonic" : "FAIL");
    close_side(&run->reference);
    printf("%llu values compared as bits\n", (unsigned long long)run->compared);
    printf("%u passed, %u failed\n", run->passed, run->failed);
    return run->failed != 0;
}

int main(int argc, char **argv)
{
    struct bits_run run = {.random.state = 20261130};
    const char *backend = "cpu", *file = NULL;
    setvbuf(stdout, NULL, _IOLBF, 0); /* a run that is cut short has told what it did */
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argv[i], "--full") == 0 || strcmp(argv[i], "--quick") == 0) {
            run.full = argv[i][2] == 'f';
            continue;
        }
        if (value != NULL && strcmp(argv[i], "--seed") == 0)
            run.random.state = strtoull(value, NULL, 0);
        else if (value != NULL && strcmp(argv[i], "--cases") == 0)
            run.cases = (uint32_t)strtoul(value, NULL, 0);
        else if (value != NULL && strcmp(argv[i], "--only") == 0 && is_kind(value))
            run.only = value;
        else if (value != NULL && strcmp(argv[i], "--file") == 0)
            file = value;
        else if (value != NULL && strcmp(argv[i], "--backend") == 0 &&
                 (strcmp(value, "cpu") == 0 || strcmp(value, "cuda") == 0))
            backend = value;
        else {
            fprintf(stderr, "usage: bits [--backend cpu|cuda] [--file islet-cuda.so] [--quick | "
                            "--full] [--seed N] [--cases N]\n            [--only KIND], kinds:");
            for (size_t c = 0; c < N_CASES; c++)
                fprintf(stderr, " %s", cases[c].name);
            fprintf(stderr, "\n");
            return 2;
        }
        i++;
    }
    printf("seed %llu\n", (unsigned long long)run.random.state);
    return strcmp(backend, "cuda") == 0 ? run_cuda(&run, file) : run_cpu(&run);
}
