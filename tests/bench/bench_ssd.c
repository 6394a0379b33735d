/* bench_ssd FILE [--bytes N] [--total N] [--rounds N]: the rate at which random experts come from
 * the disk, for each way of reading and each depth. An expert is three slices of N bytes (default
 * 1,000,000) far apart in the file, no byte is read twice in a row, and the file leaves the page
 * cache before each row. Rows of a depth alternate, the median of the rounds counts. "cpu" is
 * processor time of all threads per GB read; "one" the mean time of an expert read alone. */
#include <fcntl.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "tier_ssd.h"

enum {
    SLOTS = 192,
    MAX_ROUNDS = 15,
    N_IO = 3,
    N_DEPTH = 7
};

struct bench {
    const char *path;
    uint64_t slice_bytes, total_bytes, file_bytes;
    uint32_t rounds;
    uint8_t *arena;
    uint64_t slot_bytes, arena_bytes;
    uint32_t *order; /* [n_experts] shuffled */
    uint32_t n_experts, next;
};

struct row {
    double rate, cpu; /* GB/s; seconds a GB */
};

static void __attribute__((noreturn)) die(const char *what, const char *text)
{
    fprintf(stderr, "bench_ssd: %s: %s\n", what, text);
    exit(1);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double cpu_now(void)
{
    struct rusage r;
    getrusage(RUSAGE_SELF, &r);
    return (double)(r.ru_utime.tv_sec + r.ru_stime.tv_sec) +
           (double)(r.ru_utime.tv_usec + r.ru_stime.tv_usec) * 1e-6;
}

static void drop_from_page_cache(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        die(path, "cannot be opened");
    (void)fdatasync(fd);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    close(fd);
}

static void shuffle(struct bench *b)
{
    uint64_t seed = 1;
    for (uint32_t i = 0; i < b->n_experts; i++)
        b->order[i] = i;
    for (uint32_t i = b->n_experts - 1; i > 0; i--) {
        seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        const uint32_t k = (uint32_t)((seed >> 33) % (i + 1)), kept = b->order[i];
        b->order[i] = b->order[k];
        b->order[k] = kept;
    }
}

/* Slices at the same place of the file's three thirds, as gate, up and down are. */
static void start_expert(struct bench *b, struct tier_ssd *t, uint32_t slot)
{
    struct tier_ssd_part parts[TIER_SSD_PARTS];
    const uint64_t third = b->file_bytes / TIER_SSD_PARTS, piece = b->slot_bytes / TIER_SSD_PARTS;
    const uint64_t at = (uint64_t)b->order[b->next++ % b->n_experts] * b->slice_bytes;
    for (uint32_t i = 0; i < TIER_SSD_PARTS; i++) {
        const uint64_t offset = i * third + at;
        const uint64_t place = slot * b->slot_bytes + i * piece + offset % TIER_SSD_ALIGN;
        parts[i] = (struct tier_ssd_part){0, offset, b->slice_bytes, place};
    }
    tier_ssd_start(t, slot, parts, TIER_SSD_PARTS);
}

static struct tier_ssd *open_ssd(const struct bench *b, enum tier_ssd_io io, uint32_t depth)
{
    struct err e = {.code = ERR_OK};
    struct tier_ssd *t = NULL;
    const struct tier_ssd_options o = {.paths = &b->path,
                                       .n_files = 1,
                                       .io = io,
                                       .depth = depth,
                                       .arena = b->arena,
                                       .arena_bytes = b->arena_bytes};
    if (tier_ssd_open(&o, &t, &e) != ERR_OK)
        die(b->path, e.text);
    tier_ssd_reserved(t, b->arena_bytes);
    return t;
}

/* Reads total_bytes with `ahead` experts asked for at any time. */
static struct row measure(struct bench *b, struct tier_ssd *t, uint32_t ahead)
{
    const uint64_t n = b->total_bytes / (TIER_SSD_PARTS * b->slice_bytes);
    struct tier_ssd_result results[SLOTS];
    uint64_t started = 0, ended = 0;
    drop_from_page_cache(b->path);
    const double began = now(), cpu_began = cpu_now();
    for (; started < ahead && started < n; started++)
        start_expert(b, t, (uint32_t)started);
    while (ended < n) {
        const uint32_t got = tier_ssd_wait(t, true, results, SLOTS);
        for (uint32_t i = 0; i < got; i++) {
            if (results[i].code != ERR_OK)
                die("read", results[i].error.text);
            ended++;
            if (started < n) {
                start_expert(b, t, (uint32_t)results[i].id);
                started++;
            }
        }
    }
    const double gb = (double)(n * TIER_SSD_PARTS * b->slice_bytes) * 1e-9;
    return (struct row){gb / (now() - began), (cpu_now() - cpu_began) / gb};
}

static int by_rate(const void *a, const void *b)
{
    const struct row *x = a, *y = b;
    return (x->rate > y->rate) - (x->rate < y->rate);
}

static void run(struct bench *b)
{
    static const enum tier_ssd_io ios[N_IO] = {TIER_SSD_URING, TIER_SSD_PREAD, TIER_SSD_BUFFERED};
    static const uint32_t depths[N_DEPTH] = {1, 2, 4, 8, 16, 32, 64};
    static struct row rows[N_IO][N_DEPTH][MAX_ROUNDS], alone[N_IO][MAX_ROUNDS];
    for (uint32_t round = 0; round < b->rounds; round++) {
        for (uint32_t d = 0; d < N_DEPTH; d++)
            for (uint32_t i = 0; i < N_IO; i++) {
                struct tier_ssd *t = open_ssd(b, ios[i], depths[d]);
                rows[i][d][round] = measure(b, t, 64 < depths[d] ? depths[d] : 64);
                tier_ssd_close(t);
            }
        for (uint32_t i = 0; i < N_IO; i++) {
            struct tier_ssd *t = open_ssd(b, ios[i], 8);
            alone[i][round] = measure(b, t, 1);
            if (round == 0)
                printf("%s\n", tier_ssd_about(t));
            tier_ssd_close(t);
        }
    }
    printf("%5s  %18s  %18s  %18s\n", "depth", "uring GB/s (cpu)", "pread GB/s (cpu)",
           "buffered GB/s (cpu)");
    for (uint32_t d = 0; d < N_DEPTH; d++) {
        printf("%5u", depths[d]);
        for (uint32_t i = 0; i < N_IO; i++) {
            qsort(rows[i][d], b->rounds, sizeof(struct row), by_rate);
            const struct row *m = &rows[i][d][b->rounds / 2];
            printf("  %9.2f (%.3f s)", m->rate, m->cpu);
        }
        printf("\n");
    }
    printf("  one");
    for (uint32_t i = 0; i < N_IO; i++) {
        qsort(alone[i], b->rounds, sizeof(struct row), by_rate);
        const struct row *m = &alone[i][b->rounds / 2];
        printf("  %9.2f (%.2f ms)", m->rate,
               (double)(TIER_SSD_PARTS * b->slice_bytes) * 1e-6 / m->rate);
    }
    printf("\n");
}

int main(int argc, char **argv)
{
    struct bench b = {.slice_bytes = 1000000, .total_bytes = UINT64_C(1) << 30, .rounds = 5};
    static const struct option options[] = {{"bytes", 1, NULL, 'b'},
                                            {"total", 1, NULL, 't'},
                                            {"rounds", 1, NULL, 'r'},
                                            {NULL, 0, NULL, 0}};
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        const uint64_t value = c == '?' ? 0 : strtoull(optarg, NULL, 10);
        if (value == 0)
            die("usage", "bench_ssd FILE [--bytes N] [--total N] [--rounds N]");
        if (c == 'b')
            b.slice_bytes = value;
        else if (c == 't')
            b.total_bytes = value;
        else
            b.rounds = value < MAX_ROUNDS ? (uint32_t)value : MAX_ROUNDS;
    }
    struct stat s;
    if (optind + 1 != argc || stat(argv[optind], &s) != 0)
        die("usage", "bench_ssd FILE [--bytes N] [--total N] [--rounds N]");
    b.path = argv[optind];
    b.file_bytes = (uint64_t)s.st_size;
    b.n_experts = (uint32_t)(b.file_bytes / TIER_SSD_PARTS / b.slice_bytes);
    if (b.n_experts < 2 * SLOTS)
        die(b.path, "too small for these slices");
    b.slot_bytes = (b.slice_bytes / TIER_SSD_ALIGN + 3) * TIER_SSD_ALIGN * TIER_SSD_PARTS;
    b.arena_bytes = b.slot_bytes * SLOTS;
    b.arena = mmap(NULL, b.arena_bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    b.order = calloc(b.n_experts, sizeof(*b.order));
    if (b.arena == MAP_FAILED || b.order == NULL)
        die("memory", "none");
    shuffle(&b);
    run(&b);
    free(b.order);
    munmap(b.arena, b.arena_bytes);
    return 0;
}
