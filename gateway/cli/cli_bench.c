#include "cli_bench.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "alloc.h"
#include "cli_answer.h"
#include "cli_options.h"
#include "cli_server.h"
#include "cli_stop.h"
#include "cli_term.h"
#include "ticks.h"

enum {
    MAX_CLIENTS = 64,
    MAX_ROUNDS = 16,
    MAX_GAPS = 65536,
    MAX_FIRSTS = 10000
};
enum {
    DEFAULT_REQUESTS = 4,
    DEFAULT_TOKENS = 64,
    EXIT_NO_SERVER = 69,
    EXIT_USAGE = 2
};

struct samples { /* microseconds */
    uint32_t *us;
    size_t n, capacity;
};

struct client {
    pthread_t thread;
    const struct cli_options *o;
    const struct cli_server *server;
    unsigned index, requests;
    int stop_fd;
    struct samples gaps, firsts;
    uint64_t tokens, last_ns;
    struct err e;
};

struct figures {
    unsigned clients, requests;
    double seconds, tokens_per_second, first_p50_ms, first_p95_ms, gap_p50_ms, gap_p95_ms;
    uint64_t tokens;
};

static void sample_add(struct samples *s, uint64_t ns)
{
    if (s->n < s->capacity)
        s->us[s->n++] = ns / 1000 > UINT32_MAX ? UINT32_MAX : (uint32_t)(ns / 1000);
}

static int compare(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* The smallest value that `percent` of all do not exceed; s is sorted. In milliseconds. */
static double percentile(const struct samples *s, unsigned percent)
{
    if (s->n == 0)
        return 0;
    size_t rank = (s->n * percent + 99) / 100;
    return s->us[rank > 0 ? rank - 1 : 0] / 1e3;
}

static void on_text(void *context, const char *text, size_t n, bool is_reasoning)
{
    struct client *c = context;
    uint64_t now = ticks_ns(ticks_real());
    (void)text;
    (void)n;
    (void)is_reasoning;
    if (c->last_ns != 0)
        sample_add(&c->gaps, now - c->last_ns);
    c->last_ns = now;
}

/* Questions differ from the first words on, so that no client lives on another's prefix. */
static json_t *question(const struct client *c, unsigned request)
{
    static const char *const topics[] = {
        "the capital of Norway", "how to boil an egg",    "the word for cat in German",
        "what 64 minus 27 is",   "the colour of the sky", "a short story about a lighthouse",
        "how many days May has", "the opposite of warm"};
    char text[160];
    snprintf(text, sizeof text, "%u. Number %u asks: tell me %s, and then tell me more.", request,
             c->index, topics[(c->index + request) % (sizeof topics / sizeof topics[0])]);
    json_t *messages = json_pack("[{s:s, s:s}]", "role", "user", "content", text);
    json_t *body = messages != NULL ? cli_answer_body(c->o, messages, NULL) : NULL;
    json_decref(messages);
    if (body != NULL) {
        json_object_set_new(body, "ignore_eos", json_true());
        if (c->o->max_tokens == CLI_NOT_GIVEN)
            json_object_set_new(body, "max_tokens", json_integer(DEFAULT_TOKENS));
    }
    return body;
}

static void *client_run(void *context)
{
    struct client *c = context;
    for (unsigned i = 0; i < c->requests && c->e.code == ERR_OK; i++) {
        struct cli_answer answer;
        json_t *body = question(c, i);
        if (body == NULL) {
            err_set(&c->e, ERR_NOMEM, "no memory");
            break;
        }
        c->last_ns = 0;
        if (cli_answer_ask(c->server, body, c->stop_fd, on_text, c, &answer, &c->e) == ERR_OK) {
            c->tokens += answer.tokens;
            sample_add(&c->firsts, answer.first_ns);
        }
        json_decref(body);
    }
    return NULL;
}

static enum err_code client_init(struct client *c, struct err *e)
{
    c->gaps = (struct samples){.us = alloc_zero(ALLOC_MISC, MAX_GAPS, sizeof(uint32_t)),
                               .capacity = MAX_GAPS};
    c->firsts = (struct samples){.us = alloc_zero(ALLOC_MISC, MAX_FIRSTS, sizeof(uint32_t)),
                                 .capacity = MAX_FIRSTS};
    if (c->gaps.us == NULL || c->firsts.us == NULL)
        return err_set(e, ERR_NOMEM, "no memory for %d samples", MAX_GAPS);
    return ERR_OK;
}

static enum err_code all_join(struct samples *all, const struct client *clients, unsigned n,
                              bool gaps, struct err *e)
{
    size_t total = 0;
    for (unsigned i = 0; i < n; i++)
        total += gaps ? clients[i].gaps.n : clients[i].firsts.n;
    *all = (struct samples){.us = alloc_zero(ALLOC_MISC, total + 1, sizeof(uint32_t)),
                            .capacity = total};
    if (all->us == NULL)
        return err_set(e, ERR_NOMEM, "no memory for %zu samples", total);
    for (unsigned i = 0; i < n; i++) {
        const struct samples *s = gaps ? &clients[i].gaps : &clients[i].firsts;
        memcpy(all->us + all->n, s->us, s->n * sizeof(uint32_t));
        all->n += s->n;
    }
    qsort(all->us, all->n, sizeof(uint32_t), compare);
    return ERR_OK;
}

static enum err_code figures_make(const struct client *clients, unsigned n, double seconds,
                                  struct figures *ret, struct err *e)
{
    struct samples gaps = {0}, firsts = {0};
    enum err_code code = all_join(&gaps, clients, n, true, e);
    if (code == ERR_OK)
        code = all_join(&firsts, clients, n, false, e);
    if (code == ERR_OK) {
        *ret = (struct figures){.clients = n,
                                .requests = n * clients[0].requests,
                                .seconds = seconds,
                                .first_p50_ms = percentile(&firsts, 50),
                                .first_p95_ms = percentile(&firsts, 95),
                                .gap_p50_ms = percentile(&gaps, 50),
                                .gap_p95_ms = percentile(&gaps, 95)};
        for (unsigned i = 0; i < n; i++)
            ret->tokens += clients[i].tokens;
        ret->tokens_per_second = (double)ret->tokens / seconds;
    }
    alloc_free(gaps.us);
    alloc_free(firsts.us);
    return code;
}

static enum err_code round_run(const struct cli_options *o, const struct cli_server *server,
                               unsigned n, int stop_fd, struct figures *ret, struct err *e)
{
    enum err_code code = ERR_OK;
    unsigned started = 0;
    struct client *clients = alloc_zero(ALLOC_MISC, n, sizeof *clients);
    if (clients == NULL)
        return err_set(e, ERR_NOMEM, "no memory for %u clients", n);
    for (unsigned i = 0; i < n && code == ERR_OK; i++) {
        clients[i].o = o;
        clients[i].server = server;
        clients[i].index = i;
        clients[i].requests =
            o->requests != CLI_NOT_GIVEN ? (unsigned)o->requests : DEFAULT_REQUESTS;
        clients[i].stop_fd = stop_fd;
        code = client_init(&clients[i], e);
    }
    uint64_t start = ticks_ns(ticks_real());
    for (; started < n && code == ERR_OK; started++)
        if (pthread_create(&clients[started].thread, NULL, client_run, &clients[started]) != 0) {
            code = err_set(e, ERR_LIMIT, "cannot start thread %u of %u", started + 1, n);
            break;
        }
    for (unsigned i = 0; i < started; i++) {
        pthread_join(clients[i].thread, NULL);
        if (code == ERR_OK && clients[i].e.code != ERR_OK)
            code = err_set(e, clients[i].e.code, "client %u: %s", i, clients[i].e.text);
    }
    double seconds = (double)(ticks_ns(ticks_real()) - start) / 1e9;
    if (code == ERR_OK)
        code = figures_make(clients, n, seconds, ret, e);
    for (unsigned i = 0; i < n; i++) {
        alloc_free(clients[i].gaps.us);
        alloc_free(clients[i].firsts.us);
    }
    alloc_free(clients);
    return code;
}

static enum err_code clients_parse(const char *text, unsigned *counts, unsigned *ret_n,
                                   struct err *e)
{
    const char *all = text;
    unsigned n = 0;
    while (*text != '\0') {
        char *end;
        unsigned long value = strtoul(text, &end, 10);
        if (end == text || value < 1 || value > MAX_CLIENTS || n == MAX_ROUNDS ||
            (*end != ',' && *end != '\0'))
            return err_set(e, ERR_ARGUMENT,
                           "--clients: '%s' should be at most %d numbers from 1 to %d, as 1,4,16",
                           all, MAX_ROUNDS, MAX_CLIENTS);
        counts[n++] = (unsigned)value;
        text = end + (*end == ',');
    }
    if (n == 0)
        return err_set(e, ERR_ARGUMENT, "--clients is empty; say how many, as 1,4,16");
    *ret_n = n;
    return ERR_OK;
}

static void row_print(const struct figures *f)
{
    printf("%7u %9u %8llu %9.1f %10.1f %10.1f %9.2f %9.2f\n", f->clients, f->requests,
           (unsigned long long)f->tokens, f->tokens_per_second, f->first_p50_ms, f->first_p95_ms,
           f->gap_p50_ms, f->gap_p95_ms);
    fflush(stdout);
}

static json_t *row_json(const struct figures *f)
{
    return json_pack("{s:i, s:i, s:I, s:f, s:f, s:f, s:f, s:f, s:f}", "clients", (int)f->clients,
                     "requests", (int)f->requests, "tokens", (json_int_t)f->tokens, "seconds",
                     f->seconds, "tokens_per_second", f->tokens_per_second, "first_ms_p50",
                     f->first_p50_ms, "first_ms_p95", f->first_p95_ms, "gap_ms_p50", f->gap_p50_ms,
                     "gap_ms_p95", f->gap_p95_ms);
}

static enum err_code rounds_run(const struct cli_options *o, const struct cli_server *server,
                                const unsigned *counts, unsigned n, int stop_fd, struct err *e)
{
    struct cli_term term;
    json_t *rows = json_array();
    enum err_code code = ERR_OK;
    cli_term_init(&term);
    if (!o->json)
        printf("%7s %9s %8s %9s %10s %10s %9s %9s\n", "clients", "requests", "tokens", "tok/s",
               "first p50", "first p95", "gap p50", "gap p95");
    for (unsigned i = 0; i < n && code == ERR_OK; i++) {
        struct figures f = {0};
        char label[48];
        snprintf(label, sizeof label, "%u client%s", counts[i], counts[i] == 1 ? "" : "s");
        cli_term_progress(&term, label, -1);
        code = round_run(o, server, counts[i], stop_fd, &f, e);
        cli_term_progress_clear(&term);
        if (code == ERR_OK && o->json)
            json_array_append_new(rows, row_json(&f));
        else if (code == ERR_OK)
            row_print(&f);
    }
    if (code == ERR_OK && o->json) {
        json_dumpf(rows, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
        putchar('\n');
    } else if (code == ERR_OK) {
        puts("(milliseconds; first: request to first text; gap: between pieces of text)");
    }
    json_decref(rows);
    return code;
}

int cli_bench_main(const struct cli_options *o)
{
    unsigned counts[MAX_ROUNDS], n = 0;
    struct cli_server server;
    struct err e = {0};
    int stop_fd = -1, fd, status = 1;
    if (clients_parse(o->clients != NULL ? o->clients : "1,4,16", counts, &n, &e) != ERR_OK) {
        status = EXIT_USAGE;
        goto out;
    }
    enum err_code code = cli_server_find(o, &server, &e);
    if (code == ERR_OK)
        code = cli_server_connect(&server, &fd, &e);
    if (code != ERR_OK) {
        status = EXIT_NO_SERVER;
        goto out;
    }
    close(fd);
    if (cli_stop_open(&stop_fd, &e) == ERR_OK &&
        rounds_run(o, &server, counts, n, stop_fd, &e) == ERR_OK)
        status = 0;
out:
    cli_stop_close(stop_fd);
    if (status != 0)
        fprintf(stderr, "islet bench: %s\n", e.text);
    return status;
}
