#include "mkmodel_keys.h"

#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "gguf.h"
#include "gguf_write.h"
#include "size.h"
#include "utf8.h"

enum {
    N_BYTES = 256,
    N_CONTROL = 3, /* <|endoftext|> <|im_start|> <|im_end|> */
    MAX_MERGED = 94 * 94 + 94 * 94 * 94
};
_Static_assert(MKMODEL_MIN_VOCAB == (int)N_BYTES + (int)N_CONTROL, "bytes and control tokens");

uint64_t mkmodel_keys_topic(const struct mkmodel_options *o, uint64_t t)
{
    return (t * o->vocab + o->topics - 1) / o->topics;
}

/* ---- a vocabulary of its own -------------------------------------------------------------------- */

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

/* The texts of a vocabulary of n tokens; all arrays are of the caller. */
static void name_tokens(size_t n, struct piece *pieces, struct piece *merges, const char **texts,
                        const char **merge_texts, int32_t *types)
{
    static const char *const control[N_CONTROL] = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
    const size_t n_merged = n - N_BYTES - N_CONTROL;
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
}

static enum err_code byte_vocabulary(struct gguf_write *w, size_t n, struct err *e)
{
    const size_t n_merged = n - N_BYTES - N_CONTROL;
    struct piece *pieces = NULL, *merges = NULL;
    const char **texts = NULL, **merge_texts = NULL;
    int32_t *types = NULL;
    enum err_code rc = ERR_OK;
    if (n_merged > MAX_MERGED)
        return err_set(e, ERR_ARGUMENT, "vocab %zu: the tokens of a file without --donor end at %d",
                       n, MAX_MERGED + N_BYTES + N_CONTROL);
    pieces = alloc_zero(ALLOC_MISC, n, sizeof(*pieces));
    merges = alloc_zero(ALLOC_MISC, n_merged + 1, sizeof(*merges));
    texts = alloc_zero(ALLOC_MISC, n, sizeof(*texts));
    merge_texts = alloc_zero(ALLOC_MISC, n_merged + 1, sizeof(*merge_texts));
    types = alloc_zero(ALLOC_MISC, n, sizeof(*types));
    if (pieces == NULL || merges == NULL || texts == NULL || merge_texts == NULL || types == NULL) {
        rc = err_set(e, ERR_NOMEM, "no memory for %zu tokens", n);
        goto out;
    }
    name_tokens(n, pieces, merges, texts, merge_texts, types);
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
out:
    alloc_free(pieces);
    alloc_free(merges);
    alloc_free(texts);
    alloc_free(merge_texts);
    alloc_free(types);
    return rc;
}

/* ---- the donor's tokenizer ------------------------------------------------------------------- */

static enum err_code copy_array(struct gguf_write *w, const char *key, const struct gguf_array *a,
                                struct err *e)
{
    const size_t n = gguf_array_count(a);
    const enum gguf_kind kind = gguf_array_kind(a);
    char **texts = alloc_zero(ALLOC_MISC, n + 1, sizeof(*texts));
    int32_t *ints = alloc_zero(ALLOC_MISC, n + 1, sizeof(*ints));
    float *floats = alloc_zero(ALLOC_MISC, n + 1, sizeof(*floats));
    bool full = texts != NULL && ints != NULL && floats != NULL;
    for (size_t i = 0; full && i < n; i++) {
        struct gguf_text text;
        int64_t whole = 0;
        double real = 0;
        if (kind == GGUF_KIND_STRING && gguf_array_text_at(a, i, &text)) {
            texts[i] = alloc_text(ALLOC_MISC, text.data, text.size);
            full = texts[i] != NULL;
        } else if (gguf_array_i64_at(a, i, &whole)) {
            ints[i] = (int32_t)whole;
        } else if (gguf_array_f64_at(a, i, &real)) {
            floats[i] = (float)real;
        }
    }
    if (full && kind == GGUF_KIND_STRING)
        gguf_write_texts(w, key, (const char *const *)texts, n);
    else if (full && (kind == GGUF_KIND_F32 || kind == GGUF_KIND_F64))
        gguf_write_f32s(w, key, floats, n);
    else if (full)
        gguf_write_i32s(w, key, ints, n);
    for (size_t i = 0; texts != NULL && i < n; i++)
        alloc_free(texts[i]);
    alloc_free(texts);
    alloc_free(ints);
    alloc_free(floats);
    return full ? ERR_OK : err_set(e, ERR_NOMEM, "no memory for the donor's %s", key);
}

static enum err_code copy_key(struct gguf_write *w, const struct gguf *from, const char *key,
                              struct err *e)
{
    struct gguf_text text;
    uint64_t whole;
    bool flag;
    double real;
    if (gguf_array_get(from, key) != NULL)
        return copy_array(w, key, gguf_array_get(from, key), e);
    if (gguf_text(from, key, &text)) {
        char *copy = alloc_text(ALLOC_MISC, text.data, text.size);
        if (copy == NULL)
            return err_set(e, ERR_NOMEM, "no memory for the donor's %s", key);
        gguf_write_text(w, key, copy);
        alloc_free(copy);
    } else if (gguf_bool(from, key, &flag)) {
        gguf_write_bool(w, key, flag);
    } else if (gguf_u64(from, key, &whole)) {
        gguf_write_u32(w, key, (uint32_t)whole);
    } else if (gguf_f64(from, key, &real)) {
        gguf_write_f32(w, key, (float)real);
    }
    return ERR_OK;
}

static enum err_code donor_vocabulary(struct gguf_write *w, const struct gguf *from, struct err *e)
{
    enum err_code rc = ERR_OK;
    for (size_t i = 0; rc == ERR_OK && i < gguf_n_keys(from); i++) {
        const struct gguf_text name = gguf_key_at(from, i);
        char key[128];
        if (name.size >= sizeof(key) || strncmp(name.data, "tokenizer.", 10) != 0)
            continue;
        memcpy(key, name.data, name.size);
        key[name.size] = '\0';
        rc = copy_key(w, from, key, e);
    }
    return rc;
}

/* ---- headers --------------------------------------------------------------------------------- */

static void shape_keys(struct gguf_write *w, const struct mkmodel_plan *p)
{
    const char *slash = strrchr(p->o.out, '/'), *key;
    char name[128], full[96];
    uint64_t value;
    snprintf(name, sizeof(name), "%s", slash != NULL ? slash + 1 : p->o.out);
    if (strlen(name) > 5 && strcmp(name + strlen(name) - 5, ".gguf") == 0)
        name[strlen(name) - 5] = '\0';
    gguf_write_text(w, "general.architecture", p->o.arch);
    gguf_write_text(w, "general.name", name);
    for (size_t i = 0; (key = mkmodel_plan_key(p, i, &value)) != NULL; i++) {
        snprintf(full, sizeof(full), "%s.%s", p->o.arch, key);
        gguf_write_u32(w, full, (uint32_t)value);
    }
    snprintf(full, sizeof(full), "%s.rope.freq_base", p->o.arch);
    gguf_write_f32(w, full, MKMODEL_ROPE_BASE);
    snprintf(full, sizeof(full), "%s.attention.layer_norm_rms_epsilon", p->o.arch);
    gguf_write_f32(w, full, 1e-6f);
}

/* How the routers were made, for benches that choose their text by it. */
static void router_keys(struct gguf_write *w, const struct mkmodel_options *o)
{
    int32_t bounds[MKMODEL_MAX_TOPICS + 1];
    if (!o->set_router)
        return;
    gguf_write_f32(w, "islet.router.zipf", (float)o->zipf);
    gguf_write_f32(w, "islet.router.locality", (float)o->locality);
    for (uint64_t t = 0; o->topics > 0 && t <= o->topics; t++)
        bounds[t] = (int32_t)mkmodel_keys_topic(o, t);
    if (o->topics > 0)
        gguf_write_i32s(w, "islet.topics", bounds, o->topics + 1);
}

static enum err_code make_header(struct mkmodel_plan *p, size_t i, const struct gguf *donor,
                                 struct err *e)
{
    struct mkmodel_part *part = &p->parts[i];
    struct gguf_write *w = gguf_write_new();
    uint8_t *bytes = NULL;
    size_t size, header;
    enum err_code rc = ERR_OK;
    if (i == 0) {
        shape_keys(w, p);
        rc = donor != NULL ? donor_vocabulary(w, donor, e) : byte_vocabulary(w, p->o.vocab, e);
        router_keys(w, &p->o);
    }
    if (rc != ERR_OK)
        goto out;
    if (p->n_parts > 1) {
        gguf_write_u16(w, "split.no", (uint16_t)i);
        gguf_write_u16(w, "split.count", (uint16_t)p->n_parts);
        gguf_write_i32(w, "split.tensors.count", (int32_t)p->n);
    }
    for (size_t k = part->first; k < part->first + part->n; k++) {
        const struct mkmodel_tensor *t = &p->tensors[k];
        gguf_write_tensor_at(w, t->name, (uint32_t)t->format, t->n_dims, t->dims, NULL, 0,
                             t->offset);
    }
    bytes = gguf_write_bytes(w, &size, &header);
    if (!size_round_up(header, MKMODEL_ALIGN, &part->data_offset) ||
        (part->header = alloc_zero(ALLOC_MISC, 1, part->data_offset)) == NULL) {
        rc = err_set(e, ERR_NOMEM, "no memory for a header of %zu bytes", header);
        goto out;
    }
    memcpy(part->header, bytes, header);
out:
    alloc_free(bytes);
    gguf_write_free(w);
    return rc;
}

enum err_code mkmodel_keys_make(struct mkmodel_plan *p, const struct gguf *donor, struct err *e)
{
    enum err_code rc = ERR_OK;
    for (size_t i = 0; rc == ERR_OK && i < p->n_parts; i++)
        rc = make_header(p, i, donor, e);
    return rc;
}
