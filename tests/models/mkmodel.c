/* mkmodel: writes a qwen3moe GGUF of any shape with random weights, for measurements and tests of
 * size. The weights are valid blocks drawn from a counter-based stream, so that a seed gives the
 * same file whatever the threads. The text is noise; the routes are not: with embeddings of
 * deviation 1 and residual writers of 0.012 a token shares about as many experts with the one
 * before as in a trained model. */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "alloc.h"
#include "gguf.h"
#include "gguf_file.h"
#include "gguf_write.h"
#include "k_float.h"
#include "k_format.h"
#include "size.h"
#include "utf8.h"

enum {
    MAX_THREADS = 64,
    PIECE_BYTES = 4 << 20,
    N_BYTES = 256,
    N_CONTROL = 3, /* <|endoftext|> <|im_start|> <|im_end|> */
    TENSOR_ALIGN = 32
};

struct options {
    const char *out, *donor;
    uint64_t layers, hidden, experts, ff, top_k, heads, head_dim, kv_heads, vocab, context, seed;
    uint64_t threads, tied, mixed, format; /* mixed: as Q4_K_M; else all matrices of `format` */
    double emb_std, res_std;
};

struct tensor {
    char name[64];
    enum k_format format;
    uint32_t n_dims;
    uint64_t dims[3];
    uint64_t bytes, offset; /* offset: from the end of the header */
    float std;              /* 0: all ones */
};

struct plan {
    struct options o;
    struct tensor *tensors;
    size_t n;
    uint64_t data_bytes;
};

struct writing {
    const struct plan *plan;
    int fd;
    uint64_t data_offset;
    _Atomic uint64_t next; /* piece */
    uint64_t n_pieces;
    _Atomic int failed; /* errno */
};

static void __attribute__((noreturn, format(printf, 1, 2))) die(const char *format, ...)
{
    va_list args;
    fputs("mkmodel: ", stderr);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    exit(1);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

/* Bytes from splitmix64, started at a block's own number. */
struct noise {
    uint64_t state;
};

static uint64_t noise_next(struct noise *n)
{
    uint64_t z = n->state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static void noise_fill(struct noise *n, void *to, size_t bytes)
{
    uint8_t *p = to;
    for (; bytes >= 8; bytes -= 8, p += 8) {
        const uint64_t z = noise_next(n);
        memcpy(p, &z, 8);
    }
    if (bytes > 0) {
        const uint64_t z = noise_next(n);
        memcpy(p, &z, bytes);
    }
}

/* Uniform values of mean 0 and this deviation. */
static float noise_value(struct noise *n, float std)
{
    const double unit = (double)(noise_next(n) >> 11) * 0x1p-53;
    return (float)((unit * 2.0 - 1.0) * 1.7320508075688772 * (double)std);
}

/* Eight scales of 32..63, each also the sub-block's min: with dmin = mean(q) * d the mean is 0. */
static void scales_k4(struct noise *n, uint8_t scales[12])
{
    const uint64_t z = noise_next(n);
    uint8_t s[8];
    for (int j = 0; j < 8; j++)
        s[j] = (uint8_t)(32 + ((z >> (8 * j)) & 31));
    for (int j = 0; j < 4; j++) {
        scales[j] = (uint8_t)(s[j] | (s[j + 4] >> 4) << 6);
        scales[j + 4] = (uint8_t)(s[j] | (s[j + 4] >> 4) << 6);
        scales[j + 8] = (uint8_t)((s[j + 4] & 15) | (s[j + 4] & 15) << 4);
    }
}

/* Deviations: q uniform over 0..15 has 4.61, over 0..31 9.23, -32..31 18.5, -128..127 73.9; the
 * scales of 32..63 have a root mean square of 48.4. */
static void block_q4_k(struct noise *n, float std, void *to)
{
    struct k_format_q4_k b;
    const float d = std / (4.61f * 48.4f);
    b.d = k_float_to_f16(d);
    b.dmin = k_float_to_f16(7.5f * d);
    scales_k4(n, b.scales);
    noise_fill(n, b.q, sizeof(b.q));
    memcpy(to, &b, sizeof(b));
}

static void block_q5_k(struct noise *n, float std, void *to)
{
    struct k_format_q5_k b;
    const float d = std / (9.23f * 48.4f);
    b.d = k_float_to_f16(d);
    b.dmin = k_float_to_f16(15.5f * d);
    scales_k4(n, b.scales);
    noise_fill(n, b.high, sizeof(b.high));
    noise_fill(n, b.q, sizeof(b.q));
    memcpy(to, &b, sizeof(b));
}

static void block_q6_k(struct noise *n, float std, void *to)
{
    struct k_format_q6_k b;
    noise_fill(n, b.low, sizeof(b.low));
    noise_fill(n, b.high, sizeof(b.high));
    noise_fill(n, b.scales, sizeof(b.scales));
    for (int j = 0; j < 16; j++) { /* 32..63 of either sign: the mean of q is -1/2 */
        const int s = 32 + (b.scales[j] & 31);
        b.scales[j] = (int8_t)(b.scales[j] < 0 ? -s : s);
    }
    b.d = k_float_to_f16(std / (18.5f * 48.4f));
    memcpy(to, &b, sizeof(b));
}

static void block_q8_0(struct noise *n, float std, void *to)
{
    struct k_format_q8_0 b;
    noise_fill(n, b.q, sizeof(b.q));
    b.d = k_float_to_f16(std / 73.9f);
    memcpy(to, &b, sizeof(b));
}

static void block_q4_0(struct noise *n, float std, void *to)
{
    struct k_format_q4_0 b;
    noise_fill(n, b.q, sizeof(b.q));
    b.d = k_float_to_f16(std / 4.61f * (noise_next(n) & 1 ? 1.0f : -1.0f));
    memcpy(to, &b, sizeof(b));
}

static void block_fill(enum k_format format, struct noise *n, float std, void *to)
{
    const float x = format == K_F32 || format == K_F16 || format == K_BF16
                        ? (std > 0.0f ? noise_value(n, std) : 1.0f)
                        : 0.0f;
    const uint32_t bits = k_float_bits(x);
    const uint16_t half = format == K_BF16 ? (uint16_t)(bits >> 16) : k_float_to_f16(x);
    switch (format) {
    case K_F32:
        memcpy(to, &bits, sizeof(bits));
        break;
    case K_F16:
    case K_BF16:
        memcpy(to, &half, sizeof(half));
        break;
    case K_Q4_0:
        block_q4_0(n, std, to);
        break;
    case K_Q8_0:
        block_q8_0(n, std, to);
        break;
    case K_Q4_K:
        block_q4_k(n, std, to);
        break;
    case K_Q5_K:
        block_q5_k(n, std, to);
        break;
    case K_Q6_K:
        block_q6_k(n, std, to);
        break;
    }
}

/* ---- the tensors ----------------------------------------------------------------------------- */

static void add_tensor(struct plan *p, const char *name, enum k_format format, uint64_t n_in,
                       uint64_t n_out, uint64_t n_expert, float std)
{
    struct tensor *t = &p->tensors[p->n++];
    snprintf(t->name, sizeof(t->name), "%s", name);
    t->n_dims = n_expert > 0 ? 3 : n_out > 0 ? 2 : 1;
    t->dims[0] = n_in;
    t->dims[1] = n_out > 0 ? n_out : 1;
    t->dims[2] = n_expert > 0 ? n_expert : 1;
    t->format = format;
    t->std = std;
    if (n_in % k_format_block_elements(format) != 0)
        die("%s: %llu inputs are not a multiple of the format's block of %u", name,
            (unsigned long long)n_in, k_format_block_elements(format));
    uint64_t rows, place;
    if (!size_mul(t->dims[1], t->dims[2], &rows) || rows > UINT64_C(1) << 40)
        die("%s is too large", name);
    t->bytes = k_format_bytes(format, rows, n_in);
    if (!size_round_up(p->data_bytes, TENSOR_ALIGN, &place))
        die("%s is too large", name);
    t->offset = place;
    p->data_bytes = place + t->bytes;
}

/* llama.cpp's choice of the layers whose down projections get more bits. */
static bool more_bits(uint64_t layer, uint64_t n)
{
    return layer < n / 8 || layer >= 7 * n / 8 || (layer - n / 8) % 3 == 2;
}

static void add_layer(struct plan *p, unsigned layer)
{
    const struct options *o = &p->o;
    const enum k_format low = o->mixed ? K_Q4_K : (enum k_format)o->format;
    const enum k_format high =
        o->mixed ? (more_bits(layer, o->layers) ? K_Q6_K : K_Q4_K) : (enum k_format)o->format;
    const uint64_t width = o->heads * o->head_dim, width_kv = o->kv_heads * o->head_dim;
    const float in_std = 1.0f / sqrtf((float)o->hidden), res_std = (float)o->res_std;
    const struct {
        const char *name;
        enum k_format format;
        uint64_t n_in, n_out, n_expert;
        float std;
    } rows[] = {
        {"attn_norm", K_F32, o->hidden, 0, 0, 0},
        {"attn_q", low, o->hidden, width, 0, in_std},
        {"attn_k", low, o->hidden, width_kv, 0, in_std},
        {"attn_v", high, o->hidden, width_kv, 0, in_std},
        {"attn_q_norm", K_F32, o->head_dim, 0, 0, 0},
        {"attn_k_norm", K_F32, o->head_dim, 0, 0, 0},
        {"attn_output", low, width, o->hidden, 0, res_std},
        {"ffn_norm", K_F32, o->hidden, 0, 0, 0},
        {"ffn_gate_inp", K_F32, o->hidden, o->experts, 0, in_std},
        {"ffn_gate_exps", low, o->hidden, o->ff, o->experts, in_std},
        {"ffn_up_exps", low, o->hidden, o->ff, o->experts, in_std},
        {"ffn_down_exps", high, o->ff, o->hidden, o->experts, res_std},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        char name[64];
        snprintf(name, sizeof(name), "blk.%u.%s.weight", layer, rows[i].name);
        add_tensor(p, name, rows[i].format, rows[i].n_in, rows[i].n_out, rows[i].n_expert,
                   rows[i].std);
    }
}

static void plan_make(struct plan *p)
{
    const struct options *o = &p->o;
    p->tensors = alloc_zero(ALLOC_MISC, o->layers * 12 + 3, sizeof(*p->tensors));
    if (p->tensors == NULL)
        die("no memory");
    add_tensor(p, "token_embd.weight", o->mixed ? K_Q4_K : (enum k_format)o->format, o->hidden,
               o->vocab, 0, (float)o->emb_std);
    for (unsigned i = 0; i < o->layers; i++)
        add_layer(p, i);
    add_tensor(p, "output_norm.weight", K_F32, o->hidden, 0, 0, 0);
    if (!o->tied)
        add_tensor(p, "output.weight", o->mixed ? K_Q6_K : (enum k_format)o->format, o->hidden,
                   o->vocab, 0, 1.0f / sqrtf((float)o->hidden));
}

/* ---- keys ------------------------------------------------------------------------------------ */

/* The byte-level alphabet: a printable character for each byte, as in GPT-2. */
static uint32_t letter_of(unsigned byte)
{
    uint32_t other = 256;
    for (unsigned b = 0; b < N_BYTES; b++) {
        const bool printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        if (b == byte)
            return printable ? b : other;
        other += printable ? 0 : 1;
    }
    return 0;
}

struct piece {
    char text[32];
};

/* The i-th merged token: pairs of the 94 visible ASCII characters, then a pair and one more. */
static void merged(uint64_t i, struct piece *ret_text, struct piece *ret_merge)
{
    const char a = (char)('!' + i / 94 % 94), b = (char)('!' + i % 94);
    if (i < 94 * 94) {
        snprintf(ret_text->text, sizeof(ret_text->text), "%c%c", a, b);
        snprintf(ret_merge->text, sizeof(ret_merge->text), "%c %c", a, b);
        return;
    }
    const uint64_t j = i - 94 * 94;
    const char c = (char)('!' + j / (94 * 94));
    snprintf(ret_text->text, sizeof(ret_text->text), "%c%c%c", a, b, c);
    snprintf(ret_merge->text, sizeof(ret_merge->text), "%c%c %c", a, b, c);
}

static void byte_vocabulary(struct gguf_write *w, const struct options *o)
{
    static const char *const control[N_CONTROL] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
    const size_t n = o->vocab, n_merged = n - N_BYTES - N_CONTROL;
    struct piece *pieces = alloc_zero(ALLOC_MISC, n, sizeof(*pieces));
    struct piece *merges = alloc_zero(ALLOC_MISC, n_merged + 1, sizeof(*merges));
    const char **texts = alloc_zero(ALLOC_MISC, n, sizeof(*texts));
    const char **merge_texts = alloc_zero(ALLOC_MISC, n_merged + 1, sizeof(*merge_texts));
    int32_t *types = alloc_zero(ALLOC_MISC, n, sizeof(*types));
    if (pieces == NULL || merges == NULL || texts == NULL || merge_texts == NULL || types == NULL)
        die("no memory");
    for (size_t i = 0; i < n; i++) {
        texts[i] = pieces[i].text;
        types[i] = i < N_BYTES + n_merged ? 1 : 3;
        if (i < N_BYTES) {
            utf8_encode(letter_of((unsigned)i), (uint8_t *)pieces[i].text);
        } else if (i < N_BYTES + n_merged) {
            merged(i - N_BYTES, &pieces[i], &merges[i - N_BYTES]);
            merge_texts[i - N_BYTES] = merges[i - N_BYTES].text;
        } else {
            texts[i] = control[i - N_BYTES - n_merged];
        }
    }
    gguf_write_text(w, "tokenizer.ggml.model", "gpt2");
    gguf_write_text(w, "tokenizer.ggml.pre", "qwen2");
    gguf_write_texts(w, "tokenizer.ggml.tokens", texts, n);
    gguf_write_i32s(w, "tokenizer.ggml.token_type", types, n);
    gguf_write_texts(w, "tokenizer.ggml.merges", merge_texts, n_merged);
    gguf_write_u32(w, "tokenizer.ggml.bos_token_id", (uint32_t)n - 3);
    gguf_write_u32(w, "tokenizer.ggml.eos_token_id", (uint32_t)n - 1);
    gguf_write_u32(w, "tokenizer.ggml.padding_token_id", (uint32_t)n - 3);
    gguf_write_bool(w, "tokenizer.ggml.add_bos_token", false);
    gguf_write_text(w, "tokenizer.chat_template",
                    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + "
                    "message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
                    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}");
    alloc_free(pieces);
    alloc_free(merges);
    alloc_free(texts);
    alloc_free(merge_texts);
    alloc_free(types);
}

static void copy_array(struct gguf_write *w, const char *key, const struct gguf_array *a)
{
    const size_t n = gguf_array_count(a);
    const enum gguf_kind kind = gguf_array_kind(a);
    const char **texts = alloc_zero(ALLOC_MISC, n + 1, sizeof(*texts));
    int32_t *ints = alloc_zero(ALLOC_MISC, n + 1, sizeof(*ints));
    float *floats = alloc_zero(ALLOC_MISC, n + 1, sizeof(*floats));
    if (texts == NULL || ints == NULL || floats == NULL)
        die("no memory");
    for (size_t i = 0; i < n; i++) {
        struct gguf_text text;
        int64_t whole = 0;
        double real = 0;
        if (kind == GGUF_KIND_STRING && gguf_array_text_at(a, i, &text)) {
            texts[i] = alloc_text(ALLOC_MISC, text.data, text.size);
            if (texts[i] == NULL)
                die("no memory");
        } else if (gguf_array_i64_at(a, i, &whole)) {
            ints[i] = (int32_t)whole;
        } else if (gguf_array_f64_at(a, i, &real)) {
            floats[i] = (float)real;
        }
    }
    if (kind == GGUF_KIND_STRING)
        gguf_write_texts(w, key, texts, n);
    else if (kind == GGUF_KIND_F32 || kind == GGUF_KIND_F64)
        gguf_write_f32s(w, key, floats, n);
    else
        gguf_write_i32s(w, key, ints, n);
    for (size_t i = 0; i < n; i++)
        alloc_free((char *)(uintptr_t)texts[i]);
    alloc_free(texts);
    alloc_free(ints);
    alloc_free(floats);
}

static void copy_key(struct gguf_write *w, const struct gguf *from, const char *key)
{
    struct gguf_text text;
    uint64_t whole;
    bool flag;
    double real;
    if (gguf_array_get(from, key) != NULL) {
        copy_array(w, key, gguf_array_get(from, key));
    } else if (gguf_text(from, key, &text)) {
        char *copy = alloc_text(ALLOC_MISC, text.data, text.size);
        if (copy == NULL)
            die("no memory");
        gguf_write_text(w, key, copy);
        alloc_free(copy);
    } else if (gguf_bool(from, key, &flag)) {
        gguf_write_bool(w, key, flag);
    } else if (gguf_u64(from, key, &whole)) {
        gguf_write_u32(w, key, (uint32_t)whole);
    } else if (gguf_f64(from, key, &real)) {
        gguf_write_f32(w, key, (float)real);
    }
}

/* Copies the donor's tokenizer; its token count becomes the vocabulary. */
static void donor_vocabulary(struct gguf_write *w, const struct gguf *from)
{
    for (size_t i = 0; i < gguf_n_keys(from); i++) {
        const struct gguf_text name = gguf_key_at(from, i);
        char key[128];
        if (name.size >= sizeof(key) || strncmp(name.data, "tokenizer.", 10) != 0)
            continue;
        memcpy(key, name.data, name.size);
        key[name.size] = '\0';
        copy_key(w, from, key);
    }
}

static void keys_write(struct gguf_write *w, const struct options *o, const char *name)
{
    const struct {
        const char *key;
        uint64_t value;
    } counts[] = {
        {"block_count", o->layers},
        {"context_length", o->context},
        {"embedding_length", o->hidden},
        {"feed_forward_length", o->ff * o->top_k},
        {"attention.head_count", o->heads},
        {"attention.head_count_kv", o->kv_heads},
        {"attention.key_length", o->head_dim},
        {"attention.value_length", o->head_dim},
        {"expert_count", o->experts},
        {"expert_used_count", o->top_k},
        {"expert_feed_forward_length", o->ff},
    };
    gguf_write_text(w, "general.architecture", "qwen3moe");
    gguf_write_text(w, "general.name", name);
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        char key[96];
        snprintf(key, sizeof(key), "qwen3moe.%s", counts[i].key);
        gguf_write_u32(w, key, (uint32_t)counts[i].value);
    }
    gguf_write_f32(w, "qwen3moe.rope.freq_base", 1000000.0f);
    gguf_write_f32(w, "qwen3moe.attention.layer_norm_rms_epsilon", 1e-6f);
}

/* ---- the file -------------------------------------------------------------------------------- */

static uint64_t tensor_pieces(const struct tensor *t)
{
    return (t->bytes + PIECE_BYTES - 1) / PIECE_BYTES;
}

/* Fills piece `number` of all pieces of all tensors: blocks that begin inside of its bytes. */
static void piece_write(struct writing *w, uint64_t number, uint8_t *buffer)
{
    const struct plan *p = w->plan;
    size_t at = 0;
    while (number >= tensor_pieces(&p->tensors[at]))
        number -= tensor_pieces(&p->tensors[at++]);
    const struct tensor *t = &p->tensors[at];
    const uint64_t block = k_format_block_bytes(t->format), per = PIECE_BYTES / block;
    const uint64_t n_blocks = t->bytes / block, pieces = tensor_pieces(t);
    const uint64_t first = number * per;
    const uint64_t last = number + 1 == pieces ? n_blocks : first + per;
    for (uint64_t begin = first; begin < last; begin += per) {
        const uint64_t end = last - begin < per ? last : begin + per;
        for (uint64_t b = begin; b < end; b++) {
            struct noise noise = {p->o.seed * UINT64_C(0x9e3779b97f4a7c15) ^ (uint64_t)at << 44 ^
                                  b << 8};
            noise.state = noise_next(&noise);
            block_fill(t->format, &noise, t->std, buffer + (b - begin) * block);
        }
        const size_t n = (size_t)((end - begin) * block);
        const off_t place = (off_t)(w->data_offset + t->offset + begin * block);
        if (pwrite(w->fd, buffer, n, place) != (ssize_t)n)
            atomic_store(&w->failed, errno == 0 ? ENOSPC : errno);
    }
}

static void *writer(void *context)
{
    struct writing *w = context;
    uint8_t *buffer = alloc_get(ALLOC_MISC, PIECE_BYTES);
    if (buffer == NULL)
        die("no memory");
    for (;;) {
        const uint64_t piece = atomic_fetch_add(&w->next, 1);
        if (piece >= w->n_pieces || atomic_load(&w->failed) != 0)
            break;
        piece_write(w, piece, buffer);
    }
    alloc_free(buffer);
    return NULL;
}

static void data_write(const struct plan *p, int fd, uint64_t data_offset)
{
    struct writing w = {.plan = p, .fd = fd, .data_offset = data_offset};
    pthread_t threads[MAX_THREADS];
    for (size_t i = 0; i < p->n; i++)
        w.n_pieces += tensor_pieces(&p->tensors[i]);
    for (uint64_t i = 0; i < p->o.threads; i++)
        if (pthread_create(&threads[i], NULL, writer, &w) != 0)
            die("cannot start a thread");
    for (uint64_t i = 0; i < p->o.threads; i++)
        pthread_join(threads[i], NULL);
    if (atomic_load(&w.failed) != 0)
        die("%s: %s", p->o.out, strerror(atomic_load(&w.failed)));
}

static void file_write(struct plan *p, const struct gguf *donor)
{
    struct gguf_write *w = gguf_write_new();
    const char *slash = strrchr(p->o.out, '/');
    char name[128];
    snprintf(name, sizeof(name), "%s", slash != NULL ? slash + 1 : p->o.out);
    if (strlen(name) > 5 && strcmp(name + strlen(name) - 5, ".gguf") == 0)
        name[strlen(name) - 5] = '\0';
    keys_write(w, &p->o, name);
    if (donor != NULL)
        donor_vocabulary(w, donor);
    else
        byte_vocabulary(w, &p->o);
    for (size_t i = 0; i < p->n; i++) {
        const struct tensor *t = &p->tensors[i];
        gguf_write_tensor_at(w, t->name, (uint32_t)t->format, t->n_dims, t->dims, NULL, 0,
                             t->offset);
    }
    size_t size, header;
    uint8_t *bytes = gguf_write_bytes(w, &size, &header);
    uint64_t data_offset;
    if (!size_round_up(header, TENSOR_ALIGN, &data_offset))
        die("the header is too large");
    const int fd = open(p->o.out, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0 || ftruncate(fd, (off_t)(data_offset + p->data_bytes)) != 0 ||
        pwrite(fd, bytes, header, 0) != (ssize_t)header)
        die("%s: %s", p->o.out, strerror(errno));
    data_write(p, fd, data_offset);
    if (close(fd) != 0)
        die("%s: %s", p->o.out, strerror(errno));
    alloc_free(bytes);
    gguf_write_free(w);
    printf("%s: %.2f GB, %zu tensors\n", p->o.out, (double)(data_offset + p->data_bytes) / 1e9,
           p->n);
}

/* ---- options --------------------------------------------------------------------------------- */

static const struct preset {
    const char *name;
    struct options o;
} presets[] = {
    {"tiny",
     {.layers = 2,
      .hidden = 256,
      .experts = 8,
      .ff = 256,
      .top_k = 2,
      .heads = 4,
      .head_dim = 64,
      .kv_heads = 2,
      .vocab = 512,
      .context = 2048}},
    {"m16",
     {.layers = 16,
      .hidden = 2048,
      .experts = 32,
      .ff = 768,
      .top_k = 8,
      .heads = 32,
      .head_dim = 128,
      .kv_heads = 4,
      .vocab = 32768,
      .context = 32768}},
    {"m89",
     {.layers = 24,
      .hidden = 2048,
      .experts = 128,
      .ff = 768,
      .top_k = 8,
      .heads = 32,
      .head_dim = 128,
      .kv_heads = 4,
      .vocab = 32768,
      .context = 32768}},
};

static const struct {
    const char *name;
    enum k_format format;
} formats[] = {{"f32", K_F32},   {"f16", K_F16},   {"bf16", K_BF16}, {"q4_0", K_Q4_0},
               {"q8_0", K_Q8_0}, {"q4_k", K_Q4_K}, {"q5_k", K_Q5_K}, {"q6_k", K_Q6_K}};

static const char usage[] =
    "usage: mkmodel --out FILE [--preset tiny|m16|m89] [--layers N] [--hidden N] [--experts N]\n"
    "  [--ff N] [--top-k N] [--heads N] [--head-dim N] [--kv N] [--vocab N] [--context N]\n"
    "  [--format q4_k_m|f32|f16|bf16|q4_0|q8_0|q4_k|q5_k|q6_k] [--tied] [--donor FILE.gguf]\n"
    "  [--emb-std X] [--res-std X] [--seed N] [--threads N]\n"
    "A random qwen3moe model. --donor: its tokenizer, and so its vocabulary; else bytes and pairs.\n";

static void set_preset(struct options *o, const char *name)
{
    for (size_t i = 0; i < sizeof(presets) / sizeof(presets[0]); i++)
        if (strcmp(presets[i].name, name) == 0) {
            const struct options *p = &presets[i].o;
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
    die("preset %s is not known: tiny, m16, m89", name);
}

static void set_format(struct options *o, const char *name)
{
    o->mixed = strcmp(name, "q4_k_m") == 0;
    for (size_t i = 0; i < sizeof(formats) / sizeof(formats[0]); i++)
        if (strcmp(formats[i].name, name) == 0) {
            o->format = formats[i].format;
            return;
        }
    if (!o->mixed)
        die("format %s is not known\n%s", name, usage);
}

static uint64_t count_of(const char *name, const char *text, uint64_t high)
{
    char *end;
    errno = 0;
    const unsigned long long value = strtoull(text, &end, 10);
    if (errno != 0 || *end != '\0' || end == text || value > high)
        die("--%s %s: a number from 0 to %llu is needed", name, text, (unsigned long long)high);
    return value;
}

static double real_of(const char *name, const char *text)
{
    char *end;
    const double value = strtod(text, &end);
    if (*end != '\0' || end == text || !(value > 0 && value < 1e4))
        die("--%s %s: a number above 0 is needed", name, text);
    return value;
}

static void options_parse(int argc, char **argv, struct options *o)
{
    static const struct option longs[] = {
        {"out", 1, NULL, 'o'},     {"preset", 1, NULL, 'p'},  {"layers", 1, NULL, 'l'},
        {"hidden", 1, NULL, 'h'},  {"experts", 1, NULL, 'x'}, {"ff", 1, NULL, 'f'},
        {"top-k", 1, NULL, 'k'},   {"heads", 1, NULL, 'a'},   {"head-dim", 1, NULL, 'd'},
        {"kv", 1, NULL, 'v'},      {"vocab", 1, NULL, 'V'},   {"context", 1, NULL, 'c'},
        {"format", 1, NULL, 'F'},  {"tied", 0, NULL, 't'},    {"donor", 1, NULL, 'D'},
        {"emb-std", 1, NULL, 'e'}, {"res-std", 1, NULL, 'r'}, {"seed", 1, NULL, 's'},
        {"threads", 1, NULL, 'T'}, {NULL, 0, NULL, 0},
    };
    struct {
        int letter;
        uint64_t *to, high;
    } counts[] = {
        {'l', &o->layers, 512},      {'h', &o->hidden, 65536},    {'x', &o->experts, 4096},
        {'f', &o->ff, 65536},        {'k', &o->top_k, 64},        {'a', &o->heads, 1024},
        {'d', &o->head_dim, 512},    {'v', &o->kv_heads, 1024},   {'V', &o->vocab, 1 << 19},
        {'c', &o->context, 1 << 24}, {'s', &o->seed, UINT64_MAX}, {'T', &o->threads, MAX_THREADS}};
    int letter, index = 0;
    while ((letter = getopt_long(argc, argv, "", longs, &index)) != -1) {
        if (letter == 'o')
            o->out = optarg;
        else if (letter == 'p')
            set_preset(o, optarg);
        else if (letter == 'F')
            set_format(o, optarg);
        else if (letter == 't')
            o->tied = 1;
        else if (letter == 'D')
            o->donor = optarg;
        else if (letter == 'e')
            o->emb_std = real_of(longs[index].name, optarg);
        else if (letter == 'r')
            o->res_std = real_of(longs[index].name, optarg);
        else if (letter == '?')
            die("%s", usage);
        for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++)
            if (counts[i].letter == letter)
                *counts[i].to = count_of(longs[index].name, optarg, counts[i].high);
    }
    if (o->out == NULL || optind != argc)
        die("%s", usage);
}

int main(int argc, char **argv)
{
    struct plan p = {.o = {.emb_std = 1.0, .res_std = 0.012, .seed = 1, .mixed = 1}};
    struct gguf_file *donor = NULL;
    struct err e = {.code = ERR_OK};
    struct options *o = &p.o;
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    o->threads = cores < 1 ? 1 : cores > MAX_THREADS ? MAX_THREADS : (uint64_t)cores;
    set_preset(o, "tiny");
    options_parse(argc, argv, o);
    if (o->donor != NULL) {
        enum gguf_kind kind;
        if (gguf_file_open(o->donor, &donor, &e) != ERR_OK)
            die("%s", e.text);
        if (!gguf_array(gguf_file_keys(donor), "tokenizer.ggml.tokens", &kind, &o->vocab))
            die("%s has no tokenizer", o->donor);
    }
    if (o->layers == 0 || o->hidden == 0 || o->ff == 0 || o->threads == 0 || o->context == 0 ||
        o->head_dim == 0 || o->head_dim % 2 != 0 || o->kv_heads == 0 ||
        o->heads % o->kv_heads != 0 || o->heads == 0 || o->top_k == 0 || o->top_k > o->experts ||
        o->vocab < N_BYTES + N_CONTROL)
        die("the shape cannot be: top-k <= experts, heads a multiple of kv, head-dim even, "
            "vocab >= %d, nothing 0",
            N_BYTES + N_CONTROL);
    plan_make(&p);
    file_write(&p, donor != NULL ? gguf_file_keys(donor) : NULL);
    gguf_file_close(donor);
    alloc_free(p.tensors);
    return 0;
}
