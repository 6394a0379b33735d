/* bench_gateway: what the gateway adds. The real islet-gateway in a process of its own, a worker
 * that echoes on a thread here, and clients on its Unix socket: time from the first request byte to
 * the run_inference frame (p50, p99), the gateway's CPU time per token at 32 streams, its resident
 * memory, and how that grows over 10,000 requests. Prints a table and writes
 * build/bench/gateway.json; exit code 1 where a target is missed. */
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fake_worker.h"
#include "gguf_file.h"
#include "shape.h"
#include "stats.h"
#include "ticks.h"

enum {
    LATENCY_REQUESTS = 2000,
    GROWTH_REQUESTS = 10000,
    STREAMS = 32,
    STREAM_TOKENS = 1000,
    INTERVAL_MS = 2
};

struct bench {
    char dir[64], http[100], worker[100];
    pid_t gateway;
    struct stats_counter frame_ns; /* when the last run arrived; 0: not yet */
};

static void must(bool ok, const char *what)
{
    if (ok)
        return;
    perror(what);
    exit(1);
}

static uint64_t now_ns(void)
{
    return ticks_ns(ticks_real());
}

static void on_run(void *context, uint64_t id, const struct proto_run *run)
{
    struct bench *b = context;
    (void)id;
    (void)run;
    stats_set(&b->frame_ns, now_ns());
}

/* ---- the gateway's process ---- */

static void gateway_start(struct bench *b, const char *model)
{
    char sets[4][256];
    snprintf(sets[0], sizeof sets[0], "model.path=%s", model);
    snprintf(sets[1], sizeof sets[1], "server.socket=%s", b->http);
    snprintf(sets[2], sizeof sets[2], "worker.socket=%s", b->worker);
    snprintf(sets[3], sizeof sets[3], "log.level=warn");
    b->gateway = fork();
    must(b->gateway >= 0, "fork");
    if (b->gateway > 0)
        return;
    execl(ISLET_BUILD_DIR "/bin/islet-gateway", "islet-gateway", "--config", "/dev/null", "--set",
          "server.listen=none", "--set", sets[0], "--set", sets[1], "--set", sets[2], "--set",
          sets[3], (char *)NULL);
    _exit(127);
}

/* CPU time of its loop thread; requests this short use no other. */
static uint64_t gateway_cpu_ns(const struct bench *b)
{
    char path[64];
    unsigned long long ns = 0;
    snprintf(path, sizeof path, "/proc/%d/schedstat", (int)b->gateway);
    FILE *f = fopen(path, "re");
    must(f && fscanf(f, "%llu", &ns) == 1, path);
    fclose(f);
    return ns;
}

static uint64_t gateway_rss(const struct bench *b)
{
    char path[64];
    unsigned long all = 0, resident = 0;
    snprintf(path, sizeof path, "/proc/%d/statm", (int)b->gateway);
    FILE *f = fopen(path, "re");
    must(f && fscanf(f, "%lu %lu", &all, &resident) == 2, path);
    fclose(f);
    return (uint64_t)resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* ---- clients ---- */

static int client_connect(const struct bench *b)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    must(fd >= 0, "socket");
    snprintf(address.sun_path, sizeof address.sun_path, "%s", b->http);
    for (int i = 0; connect(fd, (const struct sockaddr *)&address, sizeof address) != 0; i++) {
        must(i < 500, b->http);
        poll(NULL, 0, 10); /* the gateway is starting */
    }
    return fd;
}

static void client_ask(int fd, const char *extra)
{
    char body[512], head[1024];
    int n = snprintf(body, sizeof body,
                     "{\"messages\":[{\"role\":\"system\",\"content\":\"Answer briefly.\"},"
                     "{\"role\":\"user\",\"content\":\"What is the capital of Norway, and which "
                     "language is spoken there?\"}],\"temperature\":0,\"ignore_eos\":true%s}",
                     extra);
    n = snprintf(head, sizeof head,
                 "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                 "Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
                 n, body);
    must(write(fd, head, (size_t)n) == n, "write");
}

/* Reads one whole JSON response. */
static void client_answer(int fd)
{
    char text[16384];
    size_t n = 0, wanted = 0;
    while (wanted == 0 || n < wanted) {
        ssize_t got = read(fd, text + n, sizeof text - 1 - n);
        must(got > 0, "read");
        n += (size_t)got;
        text[n] = '\0';
        const char *end = strstr(text, "\r\n\r\n"), *length = strstr(text, "Content-Length: ");
        if (end && length)
            wanted = (size_t)(end + 4 - text) + strtoul(length + 16, NULL, 10);
    }
    must(strncmp(text, "HTTP/1.1 200", 12) == 0, text);
}

static void ready_wait(const struct bench *b)
{
    int fd = client_connect(b);
    client_ask(fd, ",\"max_tokens\":1");
    client_answer(fd);
    close(fd);
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

static void latency_measure(struct bench *b, double *ret_p50_us, double *ret_p99_us)
{
    static uint64_t took[LATENCY_REQUESTS];
    int fd = client_connect(b);
    for (int i = -100; i < LATENCY_REQUESTS; i++) {
        uint64_t start = now_ns();
        client_ask(fd, ",\"max_tokens\":1");
        client_answer(fd);
        if (i >= 0)
            took[i] = stats_get(&b->frame_ns) - start;
    }
    close(fd);
    qsort(took, LATENCY_REQUESTS, sizeof *took, by_value);
    *ret_p50_us = (double)took[LATENCY_REQUESTS / 2] / 1e3;
    *ret_p99_us = (double)took[LATENCY_REQUESTS * 99 / 100] / 1e3;
}

static bool ends_stream(char tail[8], const char *bytes, size_t n)
{
    static const char end[] = "\r\n0\r\n\r\n";
    char joined[16];
    size_t keep = n < 8 ? 8 - n : 0, used = n < 8 ? n : 8;
    memcpy(joined, tail + 8 - keep, keep);
    memcpy(joined + keep, bytes + n - used, used);
    memcpy(tail, joined, 8);
    return memcmp(tail + 1, end, 7) == 0;
}

/* CPU time of the gateway per token at STREAMS streams. */
static double stream_measure(struct bench *b)
{
    struct pollfd fds[STREAMS];
    char tails[STREAMS][8] = {{0}}, text[65536], extra[64];
    unsigned open = STREAMS;
    snprintf(extra, sizeof extra, ",\"stream\":true,\"max_tokens\":%d", STREAM_TOKENS);
    for (unsigned i = 0; i < STREAMS; i++)
        fds[i] = (struct pollfd){.fd = client_connect(b), .events = POLLIN};
    uint64_t before = gateway_cpu_ns(b);
    for (unsigned i = 0; i < STREAMS; i++)
        client_ask(fds[i].fd, extra);
    while (open > 0) {
        must(poll(fds, STREAMS, 20000) > 0, "poll");
        for (unsigned i = 0; i < STREAMS; i++) {
            if (fds[i].fd < 0 || fds[i].revents == 0)
                continue;
            ssize_t n = read(fds[i].fd, text, sizeof text);
            must(n > 0, "stream");
            if (!ends_stream(tails[i], text, (size_t)n))
                continue;
            close(fds[i].fd);
            fds[i].fd = -1;
            open--;
        }
    }
    return (double)(gateway_cpu_ns(b) - before) / 1e3 / (STREAMS * STREAM_TOKENS);
}

/* Growth of the resident set over GROWTH_REQUESTS, after a first 1,000 that fill what is kept. */
static int64_t growth_measure(struct bench *b)
{
    int fd = client_connect(b);
    uint64_t before = 0;
    for (int i = -1000; i < GROWTH_REQUESTS; i++) {
        if (i == 0)
            before = gateway_rss(b);
        client_ask(fd, ",\"max_tokens\":4");
        client_answer(fd);
    }
    close(fd);
    return (int64_t)(gateway_rss(b) - before);
}

/* ---- the whole ---- */

static struct fake_worker *worker_start(struct bench *b, const char *model, uint32_t interval_ms)
{
    struct gguf_file *file = NULL;
    struct model_shape shape;
    struct err e = {0};
    struct fake_worker_options o = fake_worker_defaults(b->worker);
    if (gguf_file_open(model, &file, &e) != ERR_OK || shape_from_file(file, &shape, &e) != ERR_OK ||
        gguf_file_digest(file, o.welcome.file_digest, &e) != ERR_OK) {
        fprintf(stderr, "bench_gateway: %s\n", e.text);
        exit(1);
    }
    gguf_file_shape_digest(file, &shape, o.welcome.shape_digest);
    gguf_file_close(file);
    o.welcome.n_ctx = shape.n_ctx_train;
    o.welcome.n_vocab = shape.n_vocab;
    o.on_run = on_run;
    o.context = b;
    o.interval_ms = interval_ms;
    return fake_worker_start(&o);
}

static bool target(const char *what, const char *unit, double value, double limit)
{
    printf("  %-44s %10.1f %-4s target %8.1f  %s\n", what, value, unit, limit,
           value < limit ? "met" : "MISSED");
    return value < limit;
}

int main(int argc, char **argv)
{
    const char *model = argc > 1 ? argv[1] : ISLET_TEST_DIR "/models/tinymoe-q8_0.gguf";
    struct bench b = {.dir = "/tmp/islet-bench-XXXXXX"};
    double p50, p99;
    signal(SIGPIPE, SIG_IGN);
    must(mkdtemp(b.dir) != NULL, b.dir);
    snprintf(b.http, sizeof b.http, "%s/http.sock", b.dir);
    snprintf(b.worker, sizeof b.worker, "%s/worker.sock", b.dir);
    struct fake_worker *worker = worker_start(&b, model, 0);
    gateway_start(&b, model);
    ready_wait(&b);
    latency_measure(&b, &p50, &p99);
    double growth_kib = (double)growth_measure(&b) / 1024;
    fake_worker_stop(worker);
    worker = worker_start(&b, model, INTERVAL_MS);
    ready_wait(&b);
    double token_us = stream_measure(&b);
    double rss_mib = (double)gateway_rss(&b) / 1048576;
    kill(b.gateway, SIGTERM);
    waitpid(b.gateway, NULL, 0);
    fake_worker_stop(worker);
    rmdir(b.dir);

    printf("gateway in front of an echoing worker, %s\n", gguf_file_label(model));
    bool ok = target("request bytes to run_inference frame, p50", "us", p50, 1000);
    ok &= target("request bytes to run_inference frame, p99", "us", p99, 1000);
    ok &= target("gateway CPU per token at 32 streams", "us", token_us, 50);
    ok &= target("resident memory", "MiB", rss_mib, 40);
    ok &= target("growth of it over 10,000 requests", "KiB", growth_kib, 512);
    mkdir(ISLET_BUILD_DIR "/bench", 0777);
    FILE *f = fopen(ISLET_BUILD_DIR "/bench/gateway.json", "we");
    must(f != NULL, ISLET_BUILD_DIR "/bench/gateway.json");
    fprintf(f,
            "{\"frame_p50_us\":%.1f,\"frame_p99_us\":%.1f,\"token_us\":%.2f,\"resident_mib\":%.1f,"
            "\"growth_kib\":%.0f}\n",
            p50, p99, token_us, rss_mib, growth_kib);
    fclose(f);
    return ok ? 0 : 1;
}
