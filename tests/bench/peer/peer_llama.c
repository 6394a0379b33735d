/* peer_llama MODEL.gguf --backends FOLDER [--threads N] [--prompt N] [--tokens N] [--clients N]
 * [--passes N] [--seconds N] [--feed FILE]: tokens a second of llama.cpp for make bench-outofcore.
 *
 * The engine is the prebuilt one of node-llama-cpp, called by its C interface: its JavaScript one
 * cannot turn repacking off, which copies Q4_K weights into anonymous memory and so stands still
 * where the memory is less than the model. Everything else is at its default: mmap with its
 * read-ahead of the whole file while loading, flash attention by choice of the library.
 *
 * Each pass takes `prompt` tokens of each client, then decodes `tokens` steps of one row a client;
 * the first pass is cold, the next ones find what the one before left in memory. Token ids are
 * what --feed says (lines of: number of prompt ids, then all ids), and uniform noise where it says
 * no more, different in each pass and row. A pass is one line of JSON. Ends with an error on a logit
 * that is not finite. */
#include <getopt.h>
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <ggml-backend.h>
#include <llama.h>

#include "read_counters.h"

enum {
    MAX_CLIENTS = 16,
    MAX_TEXT = 4096,
    LINE_BYTES = 64 << 10
};

struct options {
    const char *model, *backends, *feed;
    long threads, prompt, tokens, clients, passes, seconds;
};

struct bench {
    struct options o;
    struct llama_model *model;
    struct llama_context *context;
    struct llama_batch batch;
    int32_t n_vocab;
    struct read_counters_source source;
    FILE *feed;
    llama_token text[MAX_CLIENTS][MAX_TEXT]; /* prompt, then the ids to decode */
};

struct measured {
    double seconds;
    long tokens;
    struct read_counters read;
};

static void __attribute__((noreturn)) die(const char *what, const char *why)
{
    fprintf(stderr, "peer_llama: %s: %s\n", what, why);
    exit(1);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static struct read_counters counters(const struct bench *b)
{
    struct read_counters c;
    struct err e = {.code = ERR_OK};
    if (read_counters_take(&b->source, &c, &e) != ERR_OK)
        die("counters", e.text);
    return c;
}

static void quiet(enum ggml_log_level level, const char *text, void *context)
{
    (void)context;
    if (level == GGML_LOG_LEVEL_ERROR)
        fputs(text, stderr);
}

/* ---- text ---- */

/* False: no more lines (the run that wrote them was cut short). */
static bool text_of_feed(struct bench *b, long client)
{
    static char line[LINE_BYTES];
    if (b->feed == NULL || fgets(line, sizeof line, b->feed) == NULL)
        return false;
    char *at = line;
    long n = -1, wanted = b->o.prompt + b->o.tokens;
    for (char *end = at; n < wanted; at = end, n++) {
        const long id = strtol(at, &end, 10);
        if (end == at)
            break;
        if (n < 0 && id != b->o.prompt)
            die(b->o.feed, "another length of prompt");
        if (n >= 0 && (id < 0 || id >= b->n_vocab))
            die(b->o.feed, "an id outside of the vocabulary");
        if (n >= 0)
            b->text[client][n] = (llama_token)id;
    }
    if (n < wanted)
        die(b->o.feed, "a line with fewer ids than prompt and tokens");
    return true;
}

static void text_of_noise(struct bench *b, long pass, long client)
{
    uint64_t state = 1 + (uint64_t)pass * MAX_CLIENTS + (uint64_t)client;
    for (long i = 0; i < b->o.prompt + b->o.tokens; i++) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        b->text[client][i] = (llama_token)((state >> 33) % (uint64_t)b->n_vocab);
    }
}

/* ---- a pass ---- */

static void batch_add(struct llama_batch *batch, llama_token id, long position, long client,
                      bool logits)
{
    const int32_t i = batch->n_tokens++;
    batch->token[i] = id;
    batch->pos[i] = (llama_pos)position;
    batch->n_seq_id[i] = 1;
    batch->seq_id[i][0] = (llama_seq_id)client;
    batch->logits[i] = logits;
}

static void decode(struct bench *b)
{
    if (llama_decode(b->context, b->batch) != 0)
        die("llama_decode", "failed");
    for (int32_t i = 0; i < b->batch.n_tokens; i++) {
        const float *logits = b->batch.logits[i] ? llama_get_logits_ith(b->context, i) : NULL;
        for (int32_t k = 0; logits != NULL && k < b->n_vocab; k++)
            if (!isfinite(logits[k]))
                die(b->o.model, "a logit is not finite");
    }
    b->batch.n_tokens = 0;
}

static struct measured run_prompts(struct bench *b)
{
    const struct read_counters before = counters(b);
    const double start = now();
    for (long c = 0; c < b->o.clients; c++) {
        for (long i = 0; i < b->o.prompt; i++)
            batch_add(&b->batch, b->text[c][i], i, c, i + 1 == b->o.prompt);
        decode(b);
    }
    struct measured m = {.seconds = now() - start, .tokens = b->o.clients * b->o.prompt};
    const struct read_counters after = counters(b);
    m.read = read_counters_since(&before, &after);
    return m;
}

static struct measured run_decode(struct bench *b)
{
    const struct read_counters before = counters(b);
    const double start = now();
    struct measured m = {.seconds = 0};
    for (long i = 0; i < b->o.tokens && m.seconds < (double)b->o.seconds; i++) {
        const long position = b->o.prompt + i;
        for (long c = 0; c < b->o.clients; c++)
            batch_add(&b->batch, b->text[c][position], position, c, true);
        decode(b);
        m.tokens += b->o.clients;
        m.seconds = now() - start;
    }
    const struct read_counters after = counters(b);
    m.read = read_counters_since(&before, &after);
    return m;
}

static void print_measured(const char *name, const struct measured *m)
{
    printf("\"%s\":{\"tokens\":%ld,\"seconds\":%.6f,\"disk_bytes\":%" PRIu64
           ",\"process_bytes\":%" PRIu64 ",\"major_faults\":%" PRIu64 "}",
           name, m->tokens, m->seconds, m->read.disk_bytes, m->read.process_bytes,
           m->read.major_faults);
}

static void run_pass(struct bench *b, long pass)
{
    llama_memory_clear(llama_get_memory(b->context), true);
    for (long c = 0; c < b->o.clients; c++)
        if (!text_of_feed(b, c))
            text_of_noise(b, pass, c);
    const struct measured prompt = run_prompts(b), answer = run_decode(b);
    printf("{\"pass\":%ld,", pass);
    print_measured("prompt", &prompt);
    putchar(',');
    print_measured("decode", &answer);
    puts("}");
    fflush(stdout);
}

/* ---- set-up ---- */

static struct options read_options(int argc, char **argv)
{
    struct options o = {
        .threads = 2, .prompt = 16, .tokens = 32, .clients = 1, .passes = 1, .seconds = 600};
    static const struct option names[] = {
        {"backends", 1, NULL, 'b'}, {"threads", 1, NULL, 't'}, {"prompt", 1, NULL, 'p'},
        {"tokens", 1, NULL, 'n'},   {"clients", 1, NULL, 'c'}, {"passes", 1, NULL, 'a'},
        {"seconds", 1, NULL, 's'},  {"feed", 1, NULL, 'f'},    {NULL, 0, NULL, 0}};
    for (int c; (c = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        long *number = c == 't'   ? &o.threads
                       : c == 'p' ? &o.prompt
                       : c == 'n' ? &o.tokens
                       : c == 'c' ? &o.clients
                       : c == 'a' ? &o.passes
                       : c == 's' ? &o.seconds
                                  : NULL;
        if (number != NULL)
            *number = strtol(optarg, NULL, 10);
        else if (c == 'b')
            o.backends = optarg;
        else if (c == 'f')
            o.feed = optarg;
        else
            exit(2);
    }
    o.model = optind < argc ? argv[optind] : NULL;
    if (o.model == NULL || o.backends == NULL || o.threads < 1 || o.prompt < 1 || o.tokens < 0 ||
        o.clients < 1 || o.clients > MAX_CLIENTS || o.prompt + o.tokens > MAX_TEXT)
        die("usage", "peer_llama MODEL.gguf --backends FOLDER [--prompt N] [--tokens N] ...");
    return o;
}

static void load(struct bench *b)
{
    llama_log_set(quiet, NULL);
    ggml_backend_load_all_from_path(b->o.backends);
    llama_backend_init();
    struct llama_model_params m = llama_model_default_params();
    m.load_mode = LLAMA_LOAD_MODE_MMAP;
    m.use_extra_bufts = false;
    m.n_gpu_layers = 0;
    b->model = llama_model_load_from_file(b->o.model, m);
    if (b->model == NULL)
        die(b->o.model, "could not be loaded");
    b->n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(b->model));
    struct llama_context_params c = llama_context_default_params();
    const uint32_t each = ((uint32_t)(b->o.prompt + b->o.tokens) + 255) / 256 * 256;
    c.n_ctx = each * (uint32_t)b->o.clients;
    c.n_seq_max = (uint32_t)b->o.clients;
    c.n_batch = each;
    c.n_threads = c.n_threads_batch = (int32_t)b->o.threads;
    b->context = llama_init_from_model(b->model, c);
    if (b->context == NULL)
        die(b->o.model, "no context");
    b->batch = llama_batch_init((int32_t)each, 0, 1);
}

int main(int argc, char **argv)
{
    static struct bench b;
    struct err e = {.code = ERR_OK};
    b.o = read_options(argc, argv);
    if (b.o.feed != NULL && (b.feed = fopen(b.o.feed, "re")) == NULL)
        die(b.o.feed, "cannot be opened");
    if (read_counters_init(&b.source, b.o.model, 0, &e) != ERR_OK)
        die("counters", e.text);
    load(&b);
    for (long pass = 0; pass < b.o.passes; pass++)
        run_pass(&b, pass);
    llama_batch_free(b.batch);
    llama_free(b.context);
    llama_model_free(b.model);
    if (b.feed != NULL)
        fclose(b.feed);
    return 0;
}
