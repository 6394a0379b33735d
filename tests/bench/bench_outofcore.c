/* The parts of make bench-outofcore that need C:
 *
 *   bench_outofcore drop FILE      drops a file from the page cache; exit code 1 and the number of
 *                                  pages if some stay
 *   bench_outofcore touch BYTES    makes so much free memory present: a virtual machine's free pages
 *                                  may be its host's, and the first process to take them would
 *                                  wait for them
 *   bench_outofcore client SOCKET --pid N --model FILE [--prompt N] [--tokens N] [--clients N]
 *                   [--passes N] [--seconds N] [--resident 1] [--out FILE]
 *                                  tokens a second of a running isletd, a line of JSON for each
 *                                  pass, as tests/bench/peer/peer_llama.c prints them
 *
 * Prompts are uniform noise, different in each pass and client, of one topic each where the model
 * has some (mkmodel --topics); answers are drawn at temperature 1, so that random weights do not
 * run in circles. --out writes the ids (a line a pass and client:
 * number of prompt ids, then all ids): the peer computes the same text from it, and runs with
 * different budgets must write the same file. The decode phase is from the moment when every client
 * has its first token to the last token of all. --resident 1 waits first until every expert is in
 * memory, as an idle isletd with room for all of them reads them. */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "alloc.h"
#include "gguf.h"
#include "gguf_file.h"
#include "proto_client.h"
#include "read_counters.h"
#include "ticks.h"

enum {
    MAX_CLIENTS = 16,
    MAX_TEXT = 4096,
    DROP_TRIES = 5,
    MAX_TOPICS = 64,
    CONNECT_MS = 300000,
    RETRY_MS = 5
};

static void __attribute__((noreturn)) die(const char *what, const char *why)
{
    fprintf(stderr, "bench_outofcore: %s: %s\n", what, why);
    exit(1);
}

/* ---- drop ---- */

/* Pages of the open file in the page cache, of anybody. */
static uint64_t cached_pages(const char *path, int fd, size_t bytes, size_t page)
{
    const size_t pages = (bytes + page - 1) / page;
    void *map = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    unsigned char *in = alloc_get(ALLOC_MISC, pages);
    if (map == MAP_FAILED || in == NULL || mincore(map, bytes, in) != 0)
        die(path, strerror(errno));
    uint64_t n = 0;
    for (size_t i = 0; i < pages; i++)
        n += in[i] & 1u;
    munmap(map, bytes);
    alloc_free(in);
    return n;
}

static int drop(const char *path)
{
    struct stat at;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &at) != 0 || at.st_size <= 0)
        die(path, fd < 0 ? strerror(errno) : "empty");
    uint64_t left = 1;
    /* Pages under read-ahead or write-back stay at the first call. */
    for (int i = 0; i < DROP_TRIES && left > 0; i++) {
        if (i > 0)
            sleep(1);
        if (fsync(fd) != 0 || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) != 0)
            die(path, "cannot be dropped from the page cache");
        left = cached_pages(path, fd, (size_t)at.st_size, (size_t)sysconf(_SC_PAGESIZE));
    }
    close(fd);
    if (left > 0)
        fprintf(stderr,
                "bench_outofcore: %s: %" PRIu64 " pages stay in the page cache: is it in use?\n",
                path, left);
    return left > 0;
}

static int touch(const char *text)
{
    char *end;
    errno = 0;
    const unsigned long long n = strtoull(text, &end, 10);
    if (errno != 0 || *end != '\0' || n == 0 || n > SIZE_MAX)
        die(text, "not a number of bytes");
    char *p = mmap(NULL, (size_t)n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        die(text, strerror(errno));
    (void)madvise(p, (size_t)n, MADV_HUGEPAGE);
    for (size_t i = 0; i < (size_t)n; i += 4096)
        *(volatile char *)(p + i) = 1;
    munmap(p, (size_t)n);
    return 0;
}

/* ---- client ---- */

struct answer {
    uint64_t id;
    uint32_t text[MAX_TEXT]; /* prompt, then the answer */
    uint32_t n;              /* of the answer */
    bool done;
    struct proto_usage usage;
};

/* What is known at a moment: time, counters of the machine, counters of the worker. */
struct moment {
    uint64_t at_ns;
    struct read_counters read;
    uint64_t steps, groups, hits, misses, ssd_bytes, ssd_wait_us, host_us;
    uint64_t slots_bytes;       /* of the arena */
    uint64_t resident, experts; /* in RAM or all in VRAM; of the model */
};

struct client {
    const char *socket, *model, *out_path;
    long pid, prompt, tokens, clients, passes, seconds, resident;
    struct proto_client *connection;
    struct proto_welcome welcome; /* its texts are not kept */
    struct read_counters_source source;
    uint32_t topics[MAX_TOPICS + 1]; /* topic t has the ids from topics[t] to below topics[t + 1] */
    uint32_t n_topics;
    FILE *out;
    struct answer answers[MAX_CLIENTS];
};

static uint64_t now_ns(void)
{
    return ticks_ns(ticks_real());
}

static void next_event(struct client *c, struct proto_event *event)
{
    struct err e = {.code = ERR_OK};
    const int code = proto_client_wait(c->connection, CONNECT_MS, event, &e);
    if (code <= 0)
        die("isletd", code == 0 ? "silent for five minutes" : e.text);
    if (event->kind == PROTO_EVENT_ERROR) {
        fprintf(stderr, "bench_outofcore: isletd: %.*s\n", (int)event->error.text.size,
                event->error.text.data);
        exit(1);
    }
}

static struct answer *answer_of(struct client *c, uint64_t id)
{
    for (long i = 0; i < c->clients; i++)
        if (c->answers[i].id == id)
            return &c->answers[i];
    return NULL;
}

static void take_event(struct client *c, const struct proto_event *event)
{
    struct answer *a = answer_of(c, event->request_id);
    if (a == NULL)
        return;
    for (unsigned i = 0; event->kind == PROTO_EVENT_TOKENS && i < event->tokens.n; i++)
        if (c->prompt + (long)a->n < MAX_TEXT)
            a->text[c->prompt + (long)a->n++] = event->tokens.tokens[i].id;
    if (event->kind == PROTO_EVENT_DONE) {
        a->done = true;
        a->usage = event->done.usage;
    }
}

/* Asks for the status record and takes what arrives before it. */
static struct moment moment_now(struct client *c)
{
    struct moment m = {.at_ns = now_ns()};
    struct err e = {.code = ERR_OK};
    if (read_counters_take(&c->source, &m.read, &e) != ERR_OK ||
        proto_client_status(c->connection, &e) != ERR_OK)
        die("isletd", e.text);
    struct proto_event event = {.kind = PROTO_EVENT_NOTICE};
    for (; event.kind != PROTO_EVENT_STATUS; take_event(c, &event))
        next_event(c, &event);
    m.steps = event.status.steps_total;
    m.groups = event.status.expert_groups_total;
    m.hits = event.status.expert_hits_ram_total;
    m.misses = event.status.expert_misses_total;
    m.ssd_bytes = event.status.ssd_bytes_total;
    m.ssd_wait_us = event.status.ssd_wait_us_total;
    m.host_us = event.status.host_us_total;
    m.slots_bytes = event.status.ram_slots_bytes;
    m.resident = event.status.experts_in_vram > event.status.experts_resident
                     ? event.status.experts_in_vram
                     : event.status.experts_resident;
    m.experts = event.status.experts_total;
    return m;
}

static bool all_have(const struct client *c, bool done)
{
    for (long i = 0; i < c->clients; i++)
        if (done ? !c->answers[i].done : c->answers[i].n == 0)
            return false;
    return true;
}

static long count_tokens(const struct client *c)
{
    long n = 0;
    for (long i = 0; i < c->clients; i++)
        n += (long)c->answers[i].n;
    return n;
}

/* The model's topics; all ids are one where it has none. */
static void read_topics(struct client *c)
{
    struct gguf_file *file = NULL;
    struct err e = {.code = ERR_OK};
    if (gguf_file_open(c->model, &file, &e) != ERR_OK)
        die("model", e.text);
    const struct gguf_array *bounds = gguf_array_get(gguf_file_keys(file), "islet.topics");
    const uint64_t n = bounds != NULL ? gguf_array_count(bounds) : 0;
    c->topics[1] = c->welcome.n_vocab;
    c->n_topics = 1;
    for (uint64_t i = 0; n >= 2 && n <= MAX_TOPICS + 1 && i < n; i++) {
        int64_t id = 0;
        const int64_t least = i > 0 ? (int64_t)c->topics[i - 1] + 1 : 0;
        if (!gguf_array_i64_at(bounds, i, &id) || id < least || id > c->welcome.n_vocab)
            die("model", "islet.topics does not rise within the vocabulary");
        c->topics[i] = (uint32_t)id;
        c->n_topics = (uint32_t)n - 1;
    }
    gguf_file_close(file);
}

static void submit(struct client *c, long pass)
{
    for (long i = 0; i < c->clients; i++) {
        struct answer *a = &c->answers[i];
        struct err e = {.code = ERR_OK};
        uint64_t state = 1 + (uint64_t)pass * MAX_CLIENTS + (uint64_t)i;
        const uint32_t topic = (uint32_t)(pass * c->clients + i) % c->n_topics;
        const uint32_t first = c->topics[topic], n_ids = c->topics[topic + 1] - first;
        *a = (struct answer){.n = 0};
        for (long k = 0; k < c->prompt; k++) {
            state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            a->text[k] = first + (uint32_t)((state >> 33) % n_ids);
        }
        struct proto_run run = {.tokens = a->text,
                                .n_tokens = (uint32_t)c->prompt,
                                .n_prompt = (uint32_t)c->prompt,
                                .max_new = (uint32_t)c->tokens + 1,
                                .temperature = 1,
                                .top_p = 1,
                                .repeat = 1,
                                .seed = (uint64_t)(pass * MAX_CLIENTS + i),
                                .flags = PROTO_RUN_NO_CACHE};
        if (proto_client_run(c->connection, &run, &a->id, &e) != ERR_OK)
            die("isletd", e.text);
    }
}

static void print_phase(const char *name, const struct moment *from, const struct moment *to,
                        long tokens)
{
    const struct read_counters read = read_counters_since(&from->read, &to->read);
    printf("\"%s\":{\"tokens\":%ld,\"seconds\":%.6f,\"disk_bytes\":%" PRIu64
           ",\"process_bytes\":%" PRIu64 ",\"major_faults\":%" PRIu64 ",\"ssd_bytes\":%" PRIu64
           ",\"ssd_wait_us\":%" PRIu64 ",\"hits\":%" PRIu64 ",\"misses\":%" PRIu64
           ",\"steps\":%" PRIu64 ",\"groups\":%" PRIu64 ",\"host_us\":%" PRIu64 "}",
           name, tokens, (double)(to->at_ns - from->at_ns) * 1e-9, read.disk_bytes,
           read.process_bytes, read.major_faults, to->ssd_bytes - from->ssd_bytes,
           to->ssd_wait_us - from->ssd_wait_us, to->hits - from->hits, to->misses - from->misses,
           to->steps - from->steps, to->groups - from->groups, to->host_us - from->host_us);
}

static void write_text(const struct client *c)
{
    for (long i = 0; i < c->clients; i++) {
        fprintf(c->out, "%ld", c->prompt);
        for (long k = 0; k < c->prompt + (long)c->answers[i].n; k++)
            fprintf(c->out, " %" PRIu32, c->answers[i].text[k]);
        fputc('\n', c->out);
    }
}

static void run_pass(struct client *c, long pass)
{
    struct proto_event event;
    const struct moment start = moment_now(c);
    submit(c, pass);
    while (!all_have(c, false)) {
        next_event(c, &event);
        take_event(c, &event);
    }
    const long before = count_tokens(c);
    const struct moment first = moment_now(c);
    const uint64_t limit_ns = first.at_ns + (uint64_t)c->seconds * UINT64_C(1000000000);
    while (!all_have(c, true) && now_ns() < limit_ns) {
        next_event(c, &event);
        take_event(c, &event);
    }
    const bool whole = all_have(c, true);
    const struct moment last = moment_now(c);
    printf("{\"pass\":%ld,\"whole\":%s,\"answers\":%ld,\"first_token_ns\":%" PRIu64 ",", pass,
           whole ? "true" : "false", count_tokens(c), first.at_ns);
    print_phase("prompt", &start, &first, c->clients * c->prompt);
    putchar(',');
    print_phase("decode", &first, &last, count_tokens(c) - before);
    uint64_t hits = 0, misses = 0, bytes = 0;
    for (long i = 0; i < c->clients; i++) {
        hits += c->answers[i].usage.hits_ram;
        misses += c->answers[i].usage.misses;
        bytes += c->answers[i].usage.ssd_bytes;
    }
    printf(",\"slots_bytes\":%" PRIu64 ",\"resident\":%" PRIu64 ",\"experts\":%" PRIu64,
           last.slots_bytes, last.resident, last.experts);
    printf(",\"usage\":{\"hits\":%" PRIu64 ",\"misses\":%" PRIu64 ",\"ssd_bytes\":%" PRIu64 "}}\n",
           hits, misses, bytes);
    fflush(stdout);
    if (!whole)
        exit(0);
    if (c->out != NULL)
        write_text(c);
}

static void connect_to_worker(struct client *c)
{
    struct err e = {.code = ERR_OK};
    const uint64_t limit_ns = now_ns() + (uint64_t)CONNECT_MS * 1000000u;
    while (proto_client_connect(c->socket, "bench", &c->connection, &e) != ERR_OK) {
        if (now_ns() > limit_ns || kill((pid_t)c->pid, 0) != 0)
            die("isletd", e.text);
        e = (struct err){.code = ERR_OK};
        usleep(RETRY_MS * 1000);
    }
    struct proto_event event = {.kind = PROTO_EVENT_NOTICE};
    do
        next_event(c, &event);
    while (event.kind != PROTO_EVENT_WELCOME || event.welcome.state == PROTO_LOADING);
    if (event.welcome.state != PROTO_SERVING) {
        fprintf(stderr, "bench_outofcore: isletd: %.*s\n", (int)event.welcome.reason.size,
                event.welcome.reason.data);
        exit(1);
    }
    c->welcome = event.welcome;
}

/* Polls, so that isletd is idle in between. Before the model is there it has no experts. */
static void wait_until_resident(struct client *c)
{
    const uint64_t limit_ns = now_ns() + (uint64_t)CONNECT_MS * 1000000u;
    for (struct moment m = moment_now(c); m.experts == 0 || m.resident < m.experts;
         m = moment_now(c)) {
        if (now_ns() > limit_ns)
            die("isletd", "not every expert came into memory within five minutes");
        usleep(RETRY_MS * 1000);
    }
}

static void read_options(struct client *c, int argc, char **argv)
{
    static const struct option names[] = {{"pid", 1, NULL, 'i'},      {"model", 1, NULL, 'm'},
                                          {"prompt", 1, NULL, 'p'},   {"tokens", 1, NULL, 'n'},
                                          {"clients", 1, NULL, 'c'},  {"passes", 1, NULL, 'a'},
                                          {"seconds", 1, NULL, 's'},  {"out", 1, NULL, 'o'},
                                          {"resident", 1, NULL, 'r'}, {NULL, 0, NULL, 0}};
    for (int o; (o = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        long *number = o == 'i'   ? &c->pid
                       : o == 'p' ? &c->prompt
                       : o == 'n' ? &c->tokens
                       : o == 'c' ? &c->clients
                       : o == 'a' ? &c->passes
                       : o == 's' ? &c->seconds
                       : o == 'r' ? &c->resident
                                  : NULL;
        if (number != NULL)
            *number = strtol(optarg, NULL, 10);
        else if (o == 'm')
            c->model = optarg;
        else if (o == 'o')
            c->out_path = optarg;
        else
            exit(2);
    }
    c->socket = optind < argc ? argv[optind] : NULL;
    if (c->socket == NULL || c->model == NULL || c->pid <= 0 || c->prompt < 1 || c->tokens < 0 ||
        c->clients < 1 || c->clients > MAX_CLIENTS || c->prompt + c->tokens >= MAX_TEXT)
        die("usage", "bench_outofcore client SOCKET --pid N --model FILE [--tokens N] ...");
}

static int client(int argc, char **argv)
{
    static struct client c = {
        .prompt = 16, .tokens = 32, .clients = 1, .passes = 1, .seconds = 600};
    struct err e = {.code = ERR_OK};
    read_options(&c, argc, argv);
    if (c.out_path != NULL && (c.out = fopen(c.out_path, "we")) == NULL)
        die(c.out_path, strerror(errno));
    if (read_counters_init(&c.source, c.model, (pid_t)c.pid, &e) != ERR_OK)
        die("counters", e.text);
    connect_to_worker(&c);
    read_topics(&c);
    if (c.resident != 0)
        wait_until_resident(&c);
    for (long pass = 0; pass < c.passes; pass++)
        run_pass(&c, pass);
    proto_client_close(c.connection);
    if (c.out != NULL && fclose(c.out) != 0)
        die(c.out_path, strerror(errno));
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "drop") == 0)
        return drop(argv[2]);
    if (argc == 3 && strcmp(argv[1], "touch") == 0)
        return touch(argv[2]);
    if (argc > 2 && strcmp(argv[1], "client") == 0)
        return client(argc - 1, argv + 1);
    fprintf(stderr, "usage: bench_outofcore drop FILE | touch BYTES | client SOCKET --pid N ...\n");
    return 2;
}
