/* mkthink FILE [strict]: writes a small qwen3moe GGUF that "thinks". It has no knowledge: the next token
 * depends on the current one only (one-hot embeddings, attention and experts that add zero, and an
 * output matrix that is the table of successors), so that every answer is known beforehand:
 *
 *   chat                       <think> LF, a thought, LF </think> LF LF, an answer with an emoji
 *                              of 4 tokens
 *   chat, enable_thinking off  the answer alone
 *   text that ends with '#'    characters that break naive JSON and line readers, then the end
 *   text that ends with '@'    "a b c ... " over and over, never an end
 *
 * strict: its chat template refuses a system message that is not the first, and roles that do not
 * alternate, as templates of the field do. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "alloc.h"
#include "gguf.h"
#include "gguf_write.h"
#include "utf8.h"

enum {
    N_EMBD = 512,
    N_LAYER = 1,
    N_HEAD = 2,
    N_HEAD_KV = 1,
    HEAD = 64,
    N_EXPERT = 4,
    N_FF = 64
};
enum {
    N_BYTES = 256,
    MAX_VOCAB = N_EMBD,
    PIECE = 64
};

struct vocab {
    char pieces[MAX_VOCAB][PIECE]; /* in the byte-level alphabet */
    int32_t types[MAX_VOCAB];
    uint32_t next[MAX_VOCAB]; /* successor of each token */
    uint32_t n;
};

/* The byte-level alphabet: a printable character for each byte, as in GPT-2. */
static uint32_t letter_of(unsigned byte)
{
    uint32_t other = 256;
    for (unsigned b = 0; b < N_BYTES; b++) {
        bool printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        if (b == byte)
            return printable ? b : other;
        other += printable ? 0 : 1;
    }
    return 0;
}

static void encode(const char *text, char *ret)
{
    size_t n = 0;
    for (; *text != '\0'; text++)
        n += utf8_encode(letter_of((unsigned char)*text), (uint8_t *)ret + n);
    ret[n] = '\0';
}

static uint32_t add(struct vocab *v, const char *text, int32_t type)
{
    if (v->n == MAX_VOCAB) {
        fputs("mkthink: too many tokens\n", stderr);
        exit(1);
    }
    if (type == 1)
        encode(text, v->pieces[v->n]);
    else
        snprintf(v->pieces[v->n], PIECE, "%s", text);
    v->types[v->n] = type;
    return v->n++;
}

/* Each piece a token of its own that follows the one before; `from` is followed by the first.
 * Returns the last. */
static uint32_t chain(struct vocab *v, uint32_t from, const char *const *pieces, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t id = add(v, pieces[i], 1);
        v->next[from] = id;
        from = id;
    }
    return from;
}

#define CHAIN(v, from, ...)                            \
    chain(v, from, (const char *const[]){__VA_ARGS__}, \
          sizeof((const char *const[]){__VA_ARGS__}) / sizeof(char *))

static void vocab_make(struct vocab *v, uint32_t *ret_eos, uint32_t *ret_bos)
{
    for (unsigned b = 0; b < N_BYTES; b++) {
        uint32_t id = add(v, "", 1);
        size_t n = utf8_encode(letter_of(b), (uint8_t *)v->pieces[id]);
        v->pieces[id][n] = '\0';
    }
    uint32_t blank_line = add(v, "\n\n", 1);
    uint32_t open = add(v, "<think>", 4), close = add(v, "</think>", 4);
    *ret_bos = add(v, "<|endoftext|>", 3);
    add(v, "<|im_start|>", 3);
    *ret_eos = add(v, "<|im_end|>", 3);
    for (uint32_t i = 0; i < MAX_VOCAB; i++)
        v->next[i] = *ret_eos;

    v->next['\n'] = open;
    uint32_t last =
        CHAIN(v, open, "\nThe", " user", " wants", " a", " number", "; I", " know", " one", ".\n");
    v->next[last] = close;
    v->next[close] = blank_line;
    last = CHAIN(v, blank_line, "It", " is", " forty", "-two");
    static const unsigned char smile[] = {0xF0, 0x9F, 0x98, 0x80};
    v->next[last] = ' ';
    v->next[' '] = smile[0];
    for (unsigned i = 0; i + 1 < sizeof smile; i++)
        v->next[smile[i]] = smile[i + 1];
    last = CHAIN(v, smile[3], "!");
    v->next[last] = *ret_eos;

    last = CHAIN(v, '#', "say \"", "hi\\", "\x01", "\x7f", "\xC2\x85", "\xE2\x80\xA8",
                 "\xE2\x80\xA9", "<tab>\t", "</x>", "end");
    v->next[last] = *ret_eos;
    last = CHAIN(v, '@', "a ", "b ", "c ", "d ", "e ", "f ", "g ", "h ");
    v->next[last] = v->next['@'];
}

static const char template[] =
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + "
    "'<|im_end|>' + '\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- "
    "'<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}";

static const char strict_template[] =
    "{%- for message in messages %}{%- if message.role == 'system' and not loop.first %}{{- "
    "raise_exception('System message must be at the beginning') }}{%- endif %}{%- endfor %}"
    "{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}"
    "{%- for message in rest %}{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{- "
    "raise_exception('Roles must alternate user/assistant') }}{%- endif %}{%- endfor %}";

static void keys_write(struct gguf_write *w, const struct vocab *v, uint32_t eos, uint32_t bos,
                       bool strict)
{
    static const char *const merges[] = {"\xC4\x8A \xC4\x8A"}; /* two line feeds */
    const char *texts[MAX_VOCAB];
    for (uint32_t i = 0; i < v->n; i++)
        texts[i] = v->pieces[i];
    gguf_write_text(w, "general.architecture", "qwen3moe");
    gguf_write_text(w, "general.name", "think");
    gguf_write_u32(w, "qwen3moe.block_count", N_LAYER);
    gguf_write_u32(w, "qwen3moe.context_length", 1024);
    gguf_write_u32(w, "qwen3moe.embedding_length", N_EMBD);
    gguf_write_u32(w, "qwen3moe.feed_forward_length", N_FF);
    gguf_write_u32(w, "qwen3moe.attention.head_count", N_HEAD);
    gguf_write_u32(w, "qwen3moe.attention.head_count_kv", N_HEAD_KV);
    gguf_write_u32(w, "qwen3moe.attention.key_length", HEAD);
    gguf_write_u32(w, "qwen3moe.attention.value_length", HEAD);
    gguf_write_f32(w, "qwen3moe.rope.freq_base", 10000.0f);
    gguf_write_f32(w, "qwen3moe.attention.layer_norm_rms_epsilon", 1e-6f);
    gguf_write_u32(w, "qwen3moe.expert_count", N_EXPERT);
    gguf_write_u32(w, "qwen3moe.expert_used_count", 2);
    gguf_write_u32(w, "qwen3moe.expert_feed_forward_length", N_FF);
    gguf_write_text(w, "tokenizer.ggml.model", "gpt2");
    gguf_write_text(w, "tokenizer.ggml.pre", "qwen2");
    gguf_write_texts(w, "tokenizer.ggml.tokens", texts, v->n);
    gguf_write_i32s(w, "tokenizer.ggml.token_type", v->types, v->n);
    gguf_write_texts(w, "tokenizer.ggml.merges", merges, 1);
    gguf_write_u32(w, "tokenizer.ggml.eos_token_id", eos);
    gguf_write_u32(w, "tokenizer.ggml.bos_token_id", bos);
    gguf_write_bool(w, "tokenizer.ggml.add_bos_token", false);
    char text[sizeof strict_template + sizeof template];
    snprintf(text, sizeof text, "%s%s", strict ? strict_template : "", template);
    gguf_write_text(w, "tokenizer.chat_template", text);
}

/* F32; NULL data: zeros. */
static void tensor(struct gguf_write *w, const char *name, const float *data, uint64_t a,
                   uint64_t b, uint64_t c)
{
    const uint64_t dims[3] = {a, b, c};
    uint32_t n_dims = c > 0 ? 3 : b > 0 ? 2 : 1;
    size_t n = a * (b > 0 ? b : 1) * (c > 0 ? c : 1);
    gguf_write_tensor(w, name, 0, n_dims, dims, data, n * sizeof(float));
}

static void layer_write(struct gguf_write *w, const float *ones)
{
    tensor(w, "blk.0.attn_norm.weight", ones, N_EMBD, 0, 0);
    tensor(w, "blk.0.ffn_norm.weight", ones, N_EMBD, 0, 0);
    tensor(w, "blk.0.attn_q.weight", NULL, N_EMBD, N_HEAD * HEAD, 0);
    tensor(w, "blk.0.attn_k.weight", NULL, N_EMBD, N_HEAD_KV * HEAD, 0);
    tensor(w, "blk.0.attn_v.weight", NULL, N_EMBD, N_HEAD_KV * HEAD, 0);
    tensor(w, "blk.0.attn_output.weight", NULL, N_HEAD * HEAD, N_EMBD, 0);
    tensor(w, "blk.0.attn_q_norm.weight", ones, HEAD, 0, 0);
    tensor(w, "blk.0.attn_k_norm.weight", ones, HEAD, 0, 0);
    tensor(w, "blk.0.ffn_gate_inp.weight", NULL, N_EMBD, N_EXPERT, 0);
    tensor(w, "blk.0.ffn_gate_exps.weight", NULL, N_EMBD, N_FF, N_EXPERT);
    tensor(w, "blk.0.ffn_up_exps.weight", NULL, N_EMBD, N_FF, N_EXPERT);
    tensor(w, "blk.0.ffn_down_exps.weight", NULL, N_FF, N_EMBD, N_EXPERT);
}

int main(int argc, char **argv)
{
    uint32_t eos, bos;
    float ones[N_EMBD];
    const bool strict = argc == 3 && strcmp(argv[2], "strict") == 0;
    if (argc != 2 && !strict) {
        fputs("usage: mkthink FILE [strict]\n", stderr);
        return 2;
    }
    struct vocab *v = alloc_zero(ALLOC_MISC, 1, sizeof *v);
    float *embd = alloc_zero(ALLOC_MISC, (size_t)MAX_VOCAB * N_EMBD, sizeof *embd);
    float *output = alloc_zero(ALLOC_MISC, (size_t)MAX_VOCAB * N_EMBD, sizeof *output);
    if (v == NULL || embd == NULL || output == NULL) {
        fputs("mkthink: no memory\n", stderr);
        return 1;
    }
    vocab_make(v, &eos, &bos);
    for (uint32_t i = 0; i < v->n; i++) {
        embd[(size_t)i * N_EMBD + i] = 1.0f;
        output[(size_t)v->next[i] * N_EMBD + i] = 2.0f;
    }
    for (unsigned i = 0; i < N_EMBD; i++)
        ones[i] = 1.0f;
    struct gguf_write *w = gguf_write_new();
    keys_write(w, v, eos, bos, strict);
    tensor(w, "token_embd.weight", embd, N_EMBD, v->n, 0);
    layer_write(w, ones);
    tensor(w, "output_norm.weight", ones, N_EMBD, 0, 0);
    tensor(w, "output.weight", output, N_EMBD, v->n, 0);
    gguf_write_file(w, argv[1]);
    gguf_write_free(w);
    alloc_free(output);
    alloc_free(embd);
    alloc_free(v);
    return 0;
}
