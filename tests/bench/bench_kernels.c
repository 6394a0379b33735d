/* GB/s of weights that products read from memory, by format, level, rows of the batch and threads;
 * beside it what the machine reads at all. Settings alternate within each round, so that a noisy
 * moment hits all of them; medians. Table to stdout, one JSON object a line to
 * build/bench/kernels.json. Arguments: [rounds] [MiB of weights]. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "k_format.h"
#include "k_host.h"
#include "k_pool.h"
#include "kernels.h"

enum {
    N_IN = 2048,
    MAX_ROWS = 64,
    MAX_ROUNDS = 32,
    N_THREADS = 2,
    N_LEVELS = 2
};

static const struct {
    enum k_format format;
    const char *name;
} formats[] = {{K_Q8_0, "Q8_0"}, {K_Q4_K, "Q4_K"}, {K_Q5_K, "Q5_K"}, {K_Q6_K, "Q6_K"},
               {K_Q4_0, "Q4_0"}, {K_F16, "F16"},   {K_F32, "F32"}};
static const uint32_t row_counts[] = {1, 4, 16, 64};

struct setting {
    enum k_level level;
    uint32_t threads;
    struct k_device *device;
    struct k_stream *stream;
    double gbs[MAX_ROUNDS];
};

struct bench {
    struct setting settings[N_LEVELS * N_THREADS];
    uint32_t n_settings, rounds;
    uint64_t weight_bytes;
    struct k_device *reader[N_THREADS];
    double read[N_THREADS][MAX_ROUNDS];
    uint64_t sums[1024]; /* of the read pieces, so that the reads are not dropped */
    FILE *json;
};

static void die(const char *what)
{
    fprintf(stderr, "bench_kernels: %s\n", what);
    exit(1);
}

static uint64_t next(uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *state ^ (*state >> 29);
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const double *values, uint32_t n)
{
    double sorted[MAX_ROUNDS];
    memcpy(sorted, values, n * sizeof sorted[0]);
    qsort(sorted, n, sizeof sorted[0], by_size);
    return sorted[n / 2];
}

static uint64_t now_ns(uint32_t threads)
{
    struct timespec t;
    clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static double gbs(uint64_t bytes, uint64_t ns)
{
    return (double)bytes / (double)ns;
}

struct read_job {
    const uint8_t *data;
    size_t piece_bytes;
    uint64_t *sums;
};

static void read_piece(const void *context, uint32_t piece, uint32_t thread)
{
    (void)thread;
    const struct read_job *job = context;
    const uint64_t *p = (const uint64_t *)(const void *)(job->data + piece * job->piece_bytes);
    uint64_t sum[8] = {0};
    for (size_t i = 0; i < job->piece_bytes / 64; i++)
        for (int l = 0; l < 8; l++)
            sum[l] += p[8 * i + (size_t)l];
    for (int l = 0; l < 8; l++)
        job->sums[piece] ^= sum[l];
}

static double read_once(struct bench *b, struct k_device *d, const void *data)
{
    const struct read_job job = {data, (b->weight_bytes / 1024) & ~(size_t)63, b->sums};
    const uint64_t start = now_ns(d->threads);
    k_pool_run(d->pool, read_piece, &job, 1024);
    return gbs(job.piece_bytes * 1024, now_ns(d->threads) - start);
}

static struct k_span span(struct k_device *d, uint64_t bytes)
{
    struct err e = {0};
    struct k_span s = {0};
    if (k_ops(d)->buffer_new(d, bytes, &s.buffer, &e) != ERR_OK)
        die(e.text);
    return s;
}

static void drop(struct k_span s)
{
    k_host_buffer_free(s.buffer);
}

static double multiply_once(struct setting *s, const struct k_matmul *a, uint64_t bytes)
{
    const uint64_t start = now_ns(s->threads);
    if (k_ops(s->device)->matmul(a, s->stream) != ERR_OK)
        die("matmul failed");
    return gbs(bytes, now_ns(s->threads) - start);
}

static void report(struct bench *b, const char *format, uint32_t rows)
{
    double limit[N_THREADS];
    for (uint32_t t = 0; t < N_THREADS; t++)
        limit[t] = median(b->read[t], b->rounds);
    for (uint32_t i = 0; i < b->n_settings; i++) {
        struct setting *s = &b->settings[i];
        const double got = median(s->gbs, b->rounds), most = limit[s->threads - 1];
        printf("%-5s %4u %-7s %7u %8.2f %8.2f %7.0f %%\n", format, rows, k_ops(s->device)->name,
               s->threads, got, most, 100.0 * got / most);
        fprintf(b->json,
                "{\"format\":\"%s\",\"rows\":%u,\"level\":\"%s\",\"threads\":%u,\"gbs\":%.3f,"
                "\"read_gbs\":%.3f}\n",
                format, rows, k_ops(s->device)->name, s->threads, got, most);
    }
    fflush(stdout);
}

static void run_format(struct bench *b, enum k_format format, const char *name)
{
    struct k_device *d = b->settings[0].device;
    const uint64_t row_bytes = k_format_bytes(format, 1, N_IN);
    const uint32_t n_out = (uint32_t)(b->weight_bytes / row_bytes);
    const struct k_span data = span(d, row_bytes * n_out), y = span(d, 4ull * n_out * MAX_ROWS);
    uint64_t r = 1;
    /* Scales stay finite and small; the values do not matter for the time. */
    uint8_t *bytes = k_host_at(data);
    for (uint64_t i = 0; i < row_bytes * n_out; i += 8) {
        const uint64_t u = next(&r) & UINT64_C(0x37ff37ff37ff37ff);
        memcpy(bytes + i, &u, row_bytes * n_out - i < 8 ? row_bytes * n_out - i : 8);
    }
    for (size_t k = 0; k < sizeof row_counts / sizeof row_counts[0]; k++) {
        const uint32_t rows = row_counts[k];
        if (k_format_form(format) == K_FORM_F32 && rows > 16)
            continue; /* float weights do not gain from more */
        struct k_rows step = {.max_rows = rows, .n_rows = span(d, 4), .faults = span(d, 4 * rows)};
        k_host_upload(NULL, step.n_rows, &rows, 4);
        struct k_act act = {.n = N_IN,
                            .f32 = span(d, 4ull * N_IN * rows),
                            .q32 = span(d, k_format_act_bytes(K_FORM_Q32, N_IN) * rows),
                            .q256 = span(d, k_format_act_bytes(K_FORM_Q256, N_IN) * rows)};
        float *x = k_host_at(act.f32);
        for (uint32_t i = 0; i < N_IN * rows; i++)
            x[i] = (float)(next(&r) & 0xffff) * 0x1p-15f - 1.0f;
        if (k_ops(d)->quantise(&(struct k_quantise){step, act}, b->settings[0].stream) != ERR_OK)
            die("quantise failed");
        struct k_matmul a = {.rows = step, .act = act, .n_matrices = 1};
        a.w[0] = (struct k_matrix){data, format, n_out, N_IN};
        a.y[0] = y;
        for (uint32_t round = 0; round < b->rounds; round++) {
            for (uint32_t i = 0; i < b->n_settings; i++)
                b->settings[i].gbs[round] = multiply_once(&b->settings[i], &a, row_bytes * n_out);
            for (uint32_t t = 0; t < N_THREADS; t++)
                b->read[t][round] = read_once(b, b->reader[t], bytes);
        }
        report(b, name, rows);
        drop(step.n_rows);
        drop(step.faults);
        drop(act.f32);
        drop(act.q32);
        drop(act.q256);
    }
    drop(data);
    drop(y);
}

static void open_settings(struct bench *b)
{
    struct err e = {0};
    for (uint32_t t = 1; t <= N_THREADS; t++)
        for (enum k_level level = K_LEVEL_AVX2; level <= K_LEVEL_AVX512; level++) {
            struct setting *s = &b->settings[b->n_settings];
            if (k_open(level, t, &s->device, &e) != ERR_OK) {
                printf("skipped: %s\n", e.text);
                e = (struct err){0};
                continue;
            }
            if (k_ops(s->device)->stream_new(s->device, &s->stream, &e) != ERR_OK)
                die(e.text);
            s->level = level;
            s->threads = t;
            b->reader[t - 1] = s->device;
            b->n_settings++;
        }
    if (b->n_settings == 0)
        die("this processor has neither AVX2 nor AVX-512");
}

int main(int argc, char **argv)
{
    static struct bench b;
    b.rounds = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 7;
    b.weight_bytes = (argc > 2 ? strtoull(argv[2], NULL, 10) : 160) << 20;
    if (b.rounds == 0 || b.rounds > MAX_ROUNDS)
        die("rounds: 1 to 32");
    b.json = fopen(ISLET_BUILD_DIR "/bench/kernels.json", "w");
    if (b.json == NULL)
        die("cannot write " ISLET_BUILD_DIR "/bench/kernels.json");
    open_settings(&b);
    printf("format rows level  threads     GB/s read GB/s    share\n");
    for (size_t f = 0; f < sizeof formats / sizeof formats[0]; f++)
        run_format(&b, formats[f].format, formats[f].name);
    for (uint32_t i = 0; i < b.n_settings; i++) {
        k_ops(b.settings[i].device)->stream_free(b.settings[i].stream);
        k_close(b.settings[i].device);
    }
    fclose(b.json);
    return 0;
}
