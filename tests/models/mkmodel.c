/* mkmodel: writes a GGUF model of any shape with random weights, for measurements and tests of
 * size. The weights are valid blocks that depend on the seed and their place alone, so that a seed
 * gives the same file whatever the threads. The text is noise; the routes are not: with embeddings
 * of deviation 1 and residual writers of 0.012 a token shares about as many experts with the one
 * before as in a trained model, and popularity, locality and topics can be set. */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "gguf.h"
#include "gguf_file.h"
#include "mkmodel_block.h"
#include "mkmodel_keys.h"
#include "mkmodel_plan.h"
#include "mkmodel_router.h"
#include "mkmodel_write.h"

static const struct preset {
    const char *name, *about;
    uint64_t layers, hidden, experts, ff, top_k, heads, head_dim, kv_heads, vocab, context;
} presets[] = {
    {"tiny", "2 MB, 2 layers", 2, 256, 8, 256, 2, 4, 64, 2, 512, 2048},
    {"m16", "1.73 GB, 16 layers, 32 experts", 16, 2048, 32, 768, 8, 32, 128, 4, 32768, 32768},
    {"m89", "9.15 GB, 24 layers, 128 experts", 24, 2048, 128, 768, 8, 32, 128, 4, 32768, 32768},
    {"h30", "18.6 GB, 48 layers, 128 experts", 48, 2048, 128, 768, 8, 32, 128, 4, 151936, 32768},
    {"h75", "45 GB, 60 layers, 256 experts", 60, 2048, 256, 768, 8, 32, 128, 4, 151936, 32768},
};

static const char usage[] =
    "usage: mkmodel --out FILE.gguf [--preset NAME] [OPTION...]\n"
    "Writes a random model. The later option wins, so a preset comes first.\n"
    "\n"
    "Shape\n"
    "  --preset NAME    one of the shapes at the end; default tiny\n"
    "  --arch NAME      architecture; default qwen3moe\n"
    "  --layers N  --hidden N  --experts N  --ff N (width of an expert)  --top-k N\n"
    "  --heads N  --head-dim N  --kv N (heads of keys and values)  --vocab N  --context N\n"
    "  --tied           no output matrix: the head is the embedding\n"
    "  --format F       q4_k_m (default: Q4_K, with Q6_K where llama.cpp has it), or all matrices\n"
    "                   of f32 f16 bf16 q4_0 q8_0 q4_k q5_k q6_k\n"
    "  --donor FILE     takes the tokenizer, and so the vocabulary, of another GGUF file; without\n"
    "                   it tokens are bytes, pairs and triples of characters\n"
    "  --emb-std X      deviation of the embedding; default 1\n"
    "  --res-std X      deviation of what writes to the residual; default 0.012. With much more\n"
    "                   the hidden state collapses and a few experts serve every token\n"
    "  --seed N         the same seed gives the same bytes, whatever the threads; default 1\n"
    "\n"
    "Routing. With none of these the routers are noise, and text itself makes locality, more with\n"
    "each layer (in m89 from 6 to 57 %, 29 % over all). With any of them, in every layer alike:\n"
    "  --zipf S         popularity: the expert of rank r is chosen in proportion to r^-S, by at\n"
    "                   most 98 % of tokens. 0 (default): even; 1: strong\n"
    "  --locality P     share of a token's experts that the token before had too; default 0.31.\n"
    "                   0: as few as popularity allows. What stays is drawn from the last 10 to 20\n"
    "                   tokens, so that working sets drift\n"
    "  --topics T       equal blocks of token ids are topics (at most 60): in each layer a topic\n"
    "                   has its own preferred quarter of the experts, which gets 80 % of its\n"
    "                   choices, so that a change of topic changes the working set. Topic t has the\n"
    "                   ids from a[t] to below a[t+1], where a is the array `islet.topics` in the\n"
    "                   file. For text of one topic draw ids from its block; answers that are\n"
    "                   sampled stay in the topic of the last token (not with --tied)\n"
    "  Such routers read what a layer does not change: a look-ahead to the next layer is always\n"
    "  right there. Measure look-ahead with routers of noise.\n"
    "\n"
    "Writing\n"
    "  --split N        N files FILE-00001-of-0000N.gguf\n"
    "  --threads N      default: all processors\n"
    "  --sync           returns when the data is on the disk\n"
    "\n"
    "Presets\n";

static void help(FILE *to)
{
    fputs(usage, to);
    for (size_t i = 0; i < sizeof(presets) / sizeof(presets[0]); i++)
        fprintf(to, "  %-6s %s\n", presets[i].name, presets[i].about);
}

/* A wrong option ends the program. */
static void __attribute__((noreturn)) refuse(const char *name, const char *text, const char *wanted)
{
    fprintf(stderr, "mkmodel: --%s %s: %s\n", name, text, wanted);
    exit(2);
}

static void set_preset(struct mkmodel_options *o, const char *name)
{
    for (size_t i = 0; i < sizeof(presets) / sizeof(presets[0]); i++) {
        const struct preset *p = &presets[i];
        if (strcmp(p->name, name) != 0)
            continue;
        o->layers = p->layers;
        o->hidden = p->hidden;
        o->experts = p->experts;
        o->ff = p->ff;
        o->top_k = p->top_k;
        o->heads = p->heads;
        o->head_dim = p->head_dim;
        o->kv_heads = p->kv_heads;
        o->vocab = p->vocab;
        o->context = p->context;
        return;
    }
    refuse("preset", name, "not known; --help lists them");
}

static void set_format(struct mkmodel_options *o, const char *name)
{
    o->mixed = strcmp(name, "q4_k_m") == 0;
    if (!o->mixed && !mkmodel_block_format(name, &o->format))
        refuse("format", name, "not known; --help lists them");
}

static uint64_t count_of(const char *name, const char *text, uint64_t high)
{
    char *end, wanted[64];
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    snprintf(wanted, sizeof(wanted), "a number from 0 to %llu is needed", (unsigned long long)high);
    if (errno != 0 || *end != '\0' || end == text || value > high || strchr(text, '-') != NULL)
        refuse(name, text, wanted);
    return value;
}

static double real_of(const char *name, const char *text, double low, double high)
{
    char *end, wanted[64];
    const double value = strtod(text, &end);
    snprintf(wanted, sizeof(wanted), "a number from %g to %g is needed", low, high);
    if (*end != '\0' || end == text || !(value >= low && value <= high))
        refuse(name, text, wanted);
    return value;
}

static const struct option longs[] = {
    {"out", 1, NULL, 'o'},      {"preset", 1, NULL, 'p'},  {"arch", 1, NULL, 'A'},
    {"layers", 1, NULL, 'l'},   {"hidden", 1, NULL, 'h'},  {"experts", 1, NULL, 'x'},
    {"ff", 1, NULL, 'f'},       {"top-k", 1, NULL, 'k'},   {"heads", 1, NULL, 'a'},
    {"head-dim", 1, NULL, 'd'}, {"kv", 1, NULL, 'v'},      {"vocab", 1, NULL, 'V'},
    {"context", 1, NULL, 'c'},  {"format", 1, NULL, 'F'},  {"tied", 0, NULL, 't'},
    {"donor", 1, NULL, 'D'},    {"emb-std", 1, NULL, 'e'}, {"res-std", 1, NULL, 'r'},
    {"seed", 1, NULL, 's'},     {"threads", 1, NULL, 'T'}, {"zipf", 1, NULL, 'z'},
    {"locality", 1, NULL, 'L'}, {"topics", 1, NULL, 'C'},  {"split", 1, NULL, 'S'},
    {"sync", 0, NULL, 'y'},     {"help", 0, NULL, 'H'},    {NULL, 0, NULL, 0},
};

static void set_count(struct mkmodel_options *o, int letter, const char *name)
{
    const struct {
        int letter;
        uint64_t *to, high;
    } counts[] = {{'l', &o->layers, 512},
                  {'h', &o->hidden, 65536},
                  {'x', &o->experts, 4096},
                  {'f', &o->ff, 65536},
                  {'k', &o->top_k, 64},
                  {'a', &o->heads, 1024},
                  {'d', &o->head_dim, 512},
                  {'v', &o->kv_heads, 1024},
                  {'V', &o->vocab, 1 << 20},
                  {'c', &o->context, 1 << 24},
                  {'s', &o->seed, UINT64_MAX},
                  {'T', &o->threads, MKMODEL_MAX_THREADS},
                  {'S', &o->split, MKMODEL_MAX_PARTS},
                  {'C', &o->topics, MKMODEL_MAX_TOPICS}};
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++)
        if (counts[i].letter == letter)
            *counts[i].to = count_of(name, optarg, counts[i].high);
}

static void set_option(struct mkmodel_options *o, int letter, const char *name)
{
    switch (letter) {
    case 'o':
        o->out = optarg;
        break;
    case 'p':
        set_preset(o, optarg);
        break;
    case 'A':
        o->arch = optarg;
        break;
    case 'F':
        set_format(o, optarg);
        break;
    case 't':
        o->tied = true;
        break;
    case 'y':
        o->sync = true;
        break;
    case 'D':
        o->donor = optarg;
        break;
    case 'e':
        o->emb_std = real_of(name, optarg, 1e-3, 100);
        break;
    case 'r':
        o->res_std = real_of(name, optarg, 1e-6, 100);
        break;
    case 'z':
        o->zipf = real_of(name, optarg, 0, 4);
        break;
    case 'L':
        o->locality = real_of(name, optarg, 0, 1);
        break;
    default:
        set_count(o, letter, name);
    }
    o->set_router = o->set_router || letter == 'z' || letter == 'L' || letter == 'C';
}

static void options_parse(int argc, char **argv, struct mkmodel_options *o)
{
    int letter, index = 0;
    while ((letter = getopt_long(argc, argv, "", longs, &index)) != -1) {
        if (letter == '?')
            exit(2);
        if (letter == 'H') {
            help(stdout);
            exit(0);
        }
        set_option(o, letter, longs[index].name);
    }
    if (o->out == NULL || optind != argc) {
        help(stderr);
        exit(2);
    }
    if (o->threads == 0)
        refuse("threads", "0", "at least 1");
}

static enum err_code make(const struct mkmodel_options *o, const struct gguf *donor, struct err *e)
{
    struct mkmodel_plan *plan = NULL;
    struct mkmodel_router *router = NULL;
    struct mkmodel_write_figures figures;
    enum err_code rc = mkmodel_plan_new(o, &plan, e);
    if (rc == ERR_OK)
        rc = mkmodel_keys_make(plan, donor, e);
    if (rc == ERR_OK && o->set_router)
        rc = mkmodel_router_new(o, &router, e);
    if (rc == ERR_OK && router != NULL) {
        const struct mkmodel_router_figures f = mkmodel_router_figures(router);
        printf("routers: locality %.3f (popularity alone gives %.3f, the highest is %.3f), what "
               "stays is of the last %.0f tokens%s\n",
               f.locality, f.base, f.highest, f.window,
               o->locality > 0 && f.locality > o->locality + 0.005
                   ? "; more locality than was asked for"
                   : "");
    }
    if (rc == ERR_OK)
        rc = mkmodel_write_files(plan, router, isatty(STDERR_FILENO), &figures, e);
    if (rc == ERR_OK)
        printf("%s%s: %.2f GB, %zu tensors, %.1f s, %.0f MB/s%s\n", plan->parts[0].path,
               plan->n_parts > 1 ? " and the other parts" : "", (double)figures.bytes / 1e9,
               plan->n, figures.seconds, (double)figures.bytes / 1e6 / figures.seconds,
               figures.direct ? "" : ", through the page cache");
    mkmodel_router_free(router);
    mkmodel_plan_free(plan);
    return rc;
}

int main(int argc, char **argv)
{
    struct mkmodel_options o = {.arch = mkmodel_plan_arch(0),
                                .emb_std = 1.0,
                                .res_std = 0.012,
                                .locality = 0.31,
                                .seed = 1,
                                .mixed = true,
                                .format = K_Q4_K};
    struct gguf_file *donor = NULL;
    struct err e = {.code = ERR_OK};
    enum err_code rc = ERR_OK;
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    o.threads = cores < 1 ? 1 : cores > MKMODEL_MAX_THREADS ? MKMODEL_MAX_THREADS : (uint64_t)cores;
    set_preset(&o, "tiny");
    options_parse(argc, argv, &o);
    if (o.donor != NULL) {
        const struct gguf_array *tokens = NULL;
        rc = gguf_file_open(o.donor, &donor, &e);
        if (rc == ERR_OK)
            tokens = gguf_array_get(gguf_file_keys(donor), "tokenizer.ggml.tokens");
        if (tokens != NULL)
            o.vocab = gguf_array_count(tokens);
        else if (rc == ERR_OK)
            rc = err_set(&e, ERR_FORMAT, "%s has no tokenizer", o.donor);
    }
    if (rc == ERR_OK)
        rc = make(&o, donor != NULL ? gguf_file_keys(donor) : NULL, &e);
    gguf_file_close(donor);
    if (rc != ERR_OK)
        fprintf(stderr, "mkmodel: %s\n", e.text);
    return rc == ERR_OK ? 0 : 1;
}
