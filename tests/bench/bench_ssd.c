/* bench_ssd FILE [--bytes N] [--total N] [--rounds N] [--burst N]: how experts come from the disk,
 * for each way of reading and each depth. An expert is three slices of N bytes (default 1,000,000)
 * far apart in the file; no byte is read twice in a row, and the file leaves the page cache before
 * each row. First table: GB/s of random experts with many asked for at once, and processor time of
 * all threads per GB. Second: a burst of experts (default 8, the misses of a layer) asked for at
 * once when the disk is idle; when the first, the mean and the last of them is there. Ways and
 * depths alternate, the median of the rounds counts. */
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
    uint32_t rounds, burst;
    uint8_t *arena;
    uint64_t slot_bytes, arena_bytes;
    uint32_t *order; /* [n_experts] shuffled */
    uint32_t n_experts, next;
};

struct row {
    double key; /* sorted by: GB/s, or ms until the mean expert */
    double cpu; /* seconds a GB */
    double first, last;
};

static const enum tier_ssd_io ios[N_IO] = {TIER_SSD_URING, TIER_SSD_PREAD, TIER_SSD_BUFFERED};
static const uint32_t depths[N_DEPTH] = {1, 2, 4, 8, 16, 32, 64};

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

/* Reads total_bytes with SLOTS / 2 experts asked for at any time. */
static struct row stream(struct bench *b, struct tier_ssd *t)
{
    const uint64_t n = b->total_bytes / (TIER_SSD_PARTS * b->slice_bytes);
    struct tier_ssd_result results[SLOTS];
    uint64_t started = 0, ended = 0;
    drop_from_page_cache(b->path);
    const double began = now(), cpu_began = cpu_now();
    for (; started < SLOTS / 2 && started < n; started++)
        start_expert(b, t, (uint32_t)started);
    while (ended < n) {
        const uint32_t got = tier_ssd_wait(t, true, results, SLOTS);
        for (uint32_t i = 0; i < got; i++, ended++) {
            if (results[i].code != ERR_OK)
                die("read", results[i].error.text);
            if (started++ < n)
                start_expert(b, t, (uint32_t)results[i].id);
        }
    }
    const double gb = (double)(n * TIER_SSD_PARTS * b->slice_bytes) * 1e-9;
    return (struct row){.key = gb / (now() - began), .cpu = (cpu_now() - cpu_began) / gb};
}

/* Bursts of an idle disk; the mean over as many as total_bytes / 4 gives. */
static struct row bursts(struct bench *b, struct tier_ssd *t)
{
    const uint64_t n = b->total_bytes / 4 / (TIER_SSD_PARTS * b->slice_bytes * b->burst) + 1;
    struct tier_ssd_result result;
    struct row r = {.key = 0};
    drop_from_page_cache(b->path);
    for (uint64_t k = 0; k < n; k++) {
        const double began = now();
        for (uint32_t i = 0; i < b->burst; i++)
            start_expert(b, t, i);
        for (uint32_t i = 0; i < b->burst; i++) {
            if (tier_ssd_wait(t, true, &result, 1) != 1 || result.code != ERR_OK)
                die("read", result.error.text);
            const double ms = (now() - began) * 1e3;
            r.key += ms / b->burst / (double)n;
            r.first += i == 0 ? ms / (double)n : 0;
            r.last += i == b->burst - 1 ? ms / (double)n : 0;
        }
    }
    return r;
}

static int by_key(const void *a, const void *b)
{
    const struct row *x = a, *y = b;
    return (x->key > y->key) - (x->key < y->key);
}

static void run(struct bench *b)
{
    static struct row streams[N_DEPTH][N_IO][MAX_ROUNDS], burst[N_DEPTH][N_IO][MAX_ROUNDS];
    for (uint32_t round = 0; round < b->rounds; round++)
        for (uint32_t d = 0; d < N_DEPTH; d++)
            for (uint32_t i = 0; i < N_IO; i++) {
                struct tier_ssd *t = open_ssd(b, ios[i], depths[d]);
                if (round == 0 && d == 0)
                    printf("%s\n", tier_ssd_about(t));
                streams[d][i][round] = stream(b, t);
                burst[d][i][round] = bursts(b, t);
                tier_ssd_close(t);
            }
    const uint32_t middle = b->rounds / 2;
    printf("%5s %26s %26s %26s\n", "depth", "uring GB/s (cpu s/GB)", "pread", "buffered");
    for (uint32_t d = 0; d < N_DEPTH; d++) {
        printf("%5u", depths[d]);
        for (uint32_t i = 0; i < N_IO; i++) {
            qsort(streams[d][i], b->rounds, sizeof(struct row), by_key);
            const struct row *m = &streams[d][i][middle];
            printf(" %18.2f (%.3f)", m->key, m->cpu);
        }
        printf("\n");
    }
    printf("burst of %u, ms: first / mean / last\n", b->burst);
    for (uint32_t d = 0; d < N_DEPTH; d++) {
        printf("%5u", depths[d]);
        for (uint32_t i = 0; i < N_IO; i++) {
            qsort(burst[d][i], b->rounds, sizeof(struct row), by_key);
            const struct row *m = &burst[d][i][middle];
            printf("     %6.1f %6.1f %7.1f", m->first, m->key, m->last);
        }
        printf("\n");
    }
}

static const char usage[] =
    "bench_ssd FILE [--bytes N of a slice] [--total N a row] [--rounds N] [--burst N experts]";

int main(int argc, char **argv)
{
    struct bench b = {
        .slice_bytes = 1000000, .total_bytes = UINT64_C(1) << 30, .rounds = 5, .burst = 8};
    static const struct option options[] = {{"bytes", 1, NULL, 'b'},
                                            {"total", 1, NULL, 't'},
                                            {"rounds", 1, NULL, 'r'},
                                            {"burst", 1, NULL, 'u'},
                                            {NULL, 0, NULL, 0}};
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        const uint64_t value = c == '?' ? 0 : strtoull(optarg, NULL, 10);
        if (value == 0)
            die("usage", usage);
        if (c == 'b')
            b.slice_bytes = value;
        else if (c == 't')
            b.total_bytes = value;
        else if (c == 'u')
            b.burst = value < SLOTS ? (uint32_t)value : SLOTS;
        else
            b.rounds = value < MAX_ROUNDS ? (uint32_t)value : MAX_ROUNDS;
    }
    struct stat s;
    if (optind + 1 != argc || stat(argv[optind], &s) != 0)
        die("usage", usage);
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
