#include "gw_tokenizer.h"

#include <string.h>

#include "alloc.h"
#include "gguf_file.h"
#include "gw_pretoken.h"
#include "gw_vocab.h"

enum {
    MAX_TEXT = 1 << 30,
    NONE = -1
};

/* Control tokens that end an answer whatever the file's eos says: the ends of turns and texts of
 * the model families. */
static const char *const end_texts[] = {
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|eot|>",
    "<|endofprompt|>",
    "<|fim_pad|>",
    "<EOT>",
    "<|repo_name|>",
    "<|file_sep|>",
    "</s>",
    "[EOS]",
};

struct gw_tokenizer {
    struct gw_vocab *vocab;
    struct gw_pretoken *pretoken;
    uint32_t *ends; /* ascending */
    size_t n_ends;
    int64_t bos, eos; /* or NONE */
    int64_t think[2]; /* <think> and </think>, or NONE */
    bool adds_bos;
};

/* ---- loading ---- */

static bool text_is(const struct gguf_text *text, const char *word)
{
    return text->size == strlen(word) && memcmp(text->data, word, text->size) == 0;
}

static int shown(const struct gguf_text *text)
{
    return text->size > 60 ? 60 : (int)text->size;
}

static enum err_code check_kind(const struct gguf *keys, struct gguf_text *ret_pre, struct err *e)
{
    struct gguf_text model;
    if (!gguf_text(keys, "tokenizer.ggml.model", &model) || text_is(&model, "none"))
        return err_set(
            e, ERR_UNSUPPORTED,
            "the model file has no tokenizer (tokenizer.ggml.model); convert it again with its "
            "tokenizer");
    if (!text_is(&model, "gpt2"))
        return err_set(
            e, ERR_UNSUPPORTED,
            "tokenizer.ggml.model is \"%.*s\"; this version has \"gpt2\" (byte-level BPE) only",
            shown(&model), model.data);
    if (!gguf_text(keys, "tokenizer.ggml.pre", ret_pre))
        return err_set(e, ERR_UNSUPPORTED,
                       "the model file does not name its pre-tokenizer (tokenizer.ggml.pre); this "
                       "version has \"qwen2\" only");
    return ERR_OK;
}

static enum err_code read_id(const struct gw_tokenizer *t, const struct gguf *keys, const char *key,
                             int64_t *ret, struct err *e)
{
    uint64_t id;
    *ret = NONE;
    if (!gguf_has(keys, key))
        return ERR_OK;
    if (!gguf_u64(keys, key, &id) || id >= t->vocab->n)
        return err_set(e, ERR_FORMAT, "%s is not one of the %u tokens", key, t->vocab->n);
    *ret = (int64_t)id;
    return ERR_OK;
}

static bool has_end_text(const struct gw_vocab *v, uint32_t id)
{
    size_t n;
    const char *text = gw_vocab_bytes(v, id, &n);
    if (v->kinds[id] != GW_VOCAB_CONTROL)
        return false;
    for (size_t i = 0; i < sizeof end_texts / sizeof *end_texts; i++)
        if (strlen(end_texts[i]) == n && memcmp(end_texts[i], text, n) == 0)
            return true;
    return false;
}

static enum err_code collect_ends(struct gw_tokenizer *t, const struct gguf *keys, struct err *e)
{
    int64_t eot, eom;
    enum err_code code = read_id(t, keys, "tokenizer.ggml.eot_token_id", &eot, e);
    if (code == ERR_OK)
        code = read_id(t, keys, "tokenizer.ggml.eom_token_id", &eom, e);
    if (code != ERR_OK)
        return code;
    size_t n = 3;
    for (uint32_t id = 0; id < t->vocab->n; id++)
        n += has_end_text(t->vocab, id);
    t->ends = alloc_zero(ALLOC_MODEL, n, sizeof *t->ends);
    if (!t->ends)
        return err_set(e, ERR_NOMEM, "no memory for the end tokens");
    for (uint32_t id = 0; id < t->vocab->n; id++)
        if (id == t->eos || id == eot || id == eom || has_end_text(t->vocab, id))
            t->ends[t->n_ends++] = id;
    return ERR_OK;
}

enum err_code gw_tokenizer_new(const struct gguf_file *file, struct gw_tokenizer **ret,
                               struct err *e)
{
    const struct gguf *keys = gguf_file_keys(file);
    struct gw_tokenizer *t = NULL;
    struct gguf_text pre;
    enum err_code code = check_kind(keys, &pre, e);

    if (code != ERR_OK)
        return code;
    t = alloc_zero(ALLOC_MODEL, 1, sizeof *t);
    if (!t)
        return err_set(e, ERR_NOMEM, "no memory for the tokenizer");
    code = gw_pretoken_new(pre.data, pre.size, &t->pretoken, e);
    if (code == ERR_OK)
        code = gw_vocab_new(keys, &t->vocab, e);
    if (code == ERR_OK)
        code = read_id(t, keys, "tokenizer.ggml.bos_token_id", &t->bos, e);
    if (code == ERR_OK)
        code = read_id(t, keys, "tokenizer.ggml.eos_token_id", &t->eos, e);
    if (code == ERR_OK)
        code = collect_ends(t, keys, e);
    if (code != ERR_OK) {
        gw_tokenizer_free(t);
        return code;
    }
    uint32_t open = gw_vocab_find(t->vocab, "<think>", 7);
    uint32_t close = gw_vocab_find(t->vocab, "</think>", 8);
    t->think[0] = open == UINT32_MAX ? NONE : (int64_t)open;
    t->think[1] = close == UINT32_MAX ? NONE : (int64_t)close;
    if (!gguf_bool(keys, "tokenizer.ggml.add_bos_token", &t->adds_bos))
        t->adds_bos = false;
    *ret = t;
    return ERR_OK;
}

void gw_tokenizer_free(struct gw_tokenizer *t)
{
    if (!t)
        return;
    gw_vocab_free(t->vocab);
    gw_pretoken_free(t->pretoken);
    alloc_free(t->ends);
    alloc_free(t);
}

/* ---- encoding ---- */

void gw_tokenizer_ids_done(struct gw_tokenizer_ids *ids)
{
    alloc_free(ids->ids);
    *ids = (struct gw_tokenizer_ids){0};
}

static bool ids_room(struct gw_tokenizer_ids *ids, size_t n)
{
    if (n <= ids->capacity - ids->n)
        return true;
    size_t capacity = ids->capacity + ids->capacity / 2 + n + 16;
    uint32_t *grown = alloc_resize(ALLOC_REQUEST, ids->ids, capacity * sizeof *grown);
    if (!grown)
        return false;
    ids->ids = grown;
    ids->capacity = capacity;
    return true;
}

/* Merging one piece: its symbols are a linked list in an array, and a heap holds the merges that
 * were possible when they were found, lowest rank first and among equal ones leftmost. An entry is
 * checked again when it comes up, since its symbols may have merged with others meanwhile. n
 * symbols make at most 3n entries: O(n log n). */
struct symbol {
    uint32_t id;
    int32_t before, after; /* places of the neighbours, NONE at the ends */
};

struct merging {
    const struct gw_vocab *vocab;
    struct symbol *symbols;
    size_t n_symbols; /* room */
    uint64_t *heap;   /* rank << 32 | place of the left symbol */
    size_t n_heap, heap_room;
};

static void merging_done(struct merging *m)
{
    alloc_free(m->symbols);
    alloc_free(m->heap);
}

static bool heap_push(struct merging *m, uint64_t entry)
{
    if (m->n_heap == m->heap_room) {
        size_t room = m->heap_room * 2 + 64;
        uint64_t *grown = alloc_resize(ALLOC_REQUEST, m->heap, room * sizeof *grown);
        if (!grown)
            return false;
        m->heap = grown;
        m->heap_room = room;
    }
    size_t i = m->n_heap++;
    while (i > 0 && m->heap[(i - 1) / 2] > entry) {
        m->heap[i] = m->heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    m->heap[i] = entry;
    return true;
}

static uint64_t heap_pop(struct merging *m)
{
    uint64_t top = m->heap[0], last = m->heap[--m->n_heap];
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= m->n_heap)
            break;
        if (child + 1 < m->n_heap && m->heap[child + 1] < m->heap[child])
            child++;
        if (m->heap[child] >= last)
            break;
        m->heap[i] = m->heap[child];
        i = child;
    }
    m->heap[i] = last;
    return top;
}

static const struct gw_vocab_merge *merge_at(const struct merging *m, int32_t left)
{
    const struct symbol *s = &m->symbols[left];
    return s->after == NONE ? NULL : gw_vocab_merge_find(m->vocab, s->id, m->symbols[s->after].id);
}

static bool offer(struct merging *m, int32_t left)
{
    const struct gw_vocab_merge *rule = left == NONE ? NULL : merge_at(m, left);
    return !rule || heap_push(m, (uint64_t)rule->rank << 32 | (uint32_t)left);
}

/* The symbol right of `left` becomes part of it; its own place is marked dead by the id
 * UINT32_MAX. */
static void join(struct merging *m, int32_t left, uint32_t id)
{
    struct symbol *s = &m->symbols[left];
    struct symbol *gone = &m->symbols[s->after];
    s->id = id;
    s->after = gone->after;
    if (s->after != NONE)
        m->symbols[s->after].before = left;
    gone->id = UINT32_MAX;
    gone->after = NONE;
}

static bool merge_piece(struct merging *m, const char *piece, size_t n,
                        struct gw_tokenizer_ids *ret)
{
    if (n > m->n_symbols) {
        struct symbol *grown =
            alloc_resize(ALLOC_REQUEST, m->symbols, (n + 64) * sizeof *m->symbols);
        if (!grown)
            return false;
        m->symbols = grown;
        m->n_symbols = n + 64;
    }
    for (size_t i = 0; i < n; i++)
        m->symbols[i] = (struct symbol){m->vocab->byte_ids[(uint8_t)piece[i]], (int32_t)i - 1,
                                        i + 1 < n ? (int32_t)i + 1 : NONE};
    m->n_heap = 0;
    for (size_t i = 0; i + 1 < n; i++)
        if (!offer(m, (int32_t)i))
            return false;
    while (m->n_heap > 0) {
        uint64_t entry = heap_pop(m);
        int32_t left = (int32_t)(uint32_t)entry;
        const struct gw_vocab_merge *rule = merge_at(m, left);
        if (!rule || rule->rank != entry >> 32)
            continue;
        join(m, left, rule->id);
        if (!offer(m, m->symbols[left].before) || !offer(m, left))
            return false;
    }
    size_t left = 0;
    for (int32_t i = 0; i != NONE; i = m->symbols[i].after)
        left++;
    if (!ids_room(ret, left))
        return false;
    for (int32_t i = 0; i != NONE; i = m->symbols[i].after)
        ret->ids[ret->n++] = m->symbols[i].id;
    return true;
}

static enum err_code encode_plain(struct gw_pretoken_scan *scan, struct merging *m,
                                  const char *text, size_t n, struct gw_tokenizer_ids *ret,
                                  struct err *e)
{
    size_t size;
    gw_pretoken_scan_text(scan, text, n);
    for (;;) {
        enum err_code code = gw_pretoken_scan_next(scan, &size, e);
        if (code != ERR_OK || size == 0)
            return code;
        if (!merge_piece(m, text, size, ret))
            return err_set(e, ERR_NOMEM, "no memory to tokenise %zu bytes", size);
        text += size;
    }
}

static enum err_code encode_text(const struct gw_tokenizer *t, struct gw_pretoken_scan *scan,
                                 struct merging *m, const char *text, size_t n, bool parse_special,
                                 struct gw_tokenizer_ids *ret, struct err *e)
{
    size_t start = 0, at = 0;
    while (at < n) {
        uint32_t id = gw_vocab_special_at(t->vocab, text + at, n - at, parse_special);
        if (id == UINT32_MAX) {
            at++;
            continue;
        }
        enum err_code code = encode_plain(scan, m, text + start, at - start, ret, e);
        if (code != ERR_OK)
            return code;
        if (!ids_room(ret, 1))
            return err_set(e, ERR_NOMEM, "no memory for %zu tokens", ret->n);
        ret->ids[ret->n++] = id;
        at += t->vocab->starts[id + 1] - t->vocab->starts[id];
        start = at;
    }
    return encode_plain(scan, m, text + start, n - start, ret, e);
}

enum err_code gw_tokenizer_encode(const struct gw_tokenizer *t, const char *text, size_t n,
                                  bool parse_special, bool add_bos, struct gw_tokenizer_ids *ret,
                                  struct err *e)
{
    struct merging merging = {.vocab = t->vocab};
    struct gw_pretoken_scan *scan = NULL;
    size_t before = ret->n;
    enum err_code code;

    if (n >= MAX_TEXT)
        return err_set(e, ERR_LIMIT, "text of %zu bytes; the tokenizer takes less than %d", n,
                       MAX_TEXT);
    code = gw_pretoken_scan_new(t->pretoken, &scan, e);
    if (code == ERR_OK && add_bos && t->bos != NONE) {
        if (ids_room(ret, 1))
            ret->ids[ret->n++] = (uint32_t)t->bos;
        else
            code = err_set(e, ERR_NOMEM, "no memory for tokens");
    }
    if (code == ERR_OK)
        code = encode_text(t, scan, &merging, text, n, parse_special, ret, e);
    if (code != ERR_OK)
        ret->n = before;
    merging_done(&merging);
    gw_pretoken_scan_free(scan);
    return code;
}

/* ---- what a token is ---- */

/* It yields no text in answers. */
static bool is_special(const struct gw_tokenizer *t, uint32_t id)
{
    if (id >= t->vocab->n || id == t->think[0] || id == t->think[1])
        return false;
    return t->vocab->kinds[id] == GW_VOCAB_CONTROL || t->vocab->kinds[id] == GW_VOCAB_UNKNOWN;
}

bool gw_tokenizer_piece(const struct gw_tokenizer *t, uint32_t id, bool with_special,
                        const char **ret_text, size_t *ret_size)
{
    if (id >= t->vocab->n)
        return false;
    *ret_text = gw_vocab_bytes(t->vocab, id, ret_size);
    if (!with_special && is_special(t, id))
        *ret_size = 0;
    return true;
}

size_t gw_tokenizer_end_ids(const struct gw_tokenizer *t, const uint32_t **ret)
{
    *ret = t->ends;
    return t->n_ends;
}

bool gw_tokenizer_bos(const struct gw_tokenizer *t, uint32_t *ret)
{
    if (t->bos == NONE)
        return false;
    *ret = (uint32_t)t->bos;
    return true;
}

bool gw_tokenizer_eos(const struct gw_tokenizer *t, uint32_t *ret)
{
    if (t->eos == NONE)
        return false;
    *ret = (uint32_t)t->eos;
    return true;
}

bool gw_tokenizer_adds_bos(const struct gw_tokenizer *t)
{
    return t->adds_bos;
}

uint32_t gw_tokenizer_n_vocab(const struct gw_tokenizer *t)
{
    return t->vocab->n;
}

bool gw_tokenizer_find(const struct gw_tokenizer *t, const char *text, size_t n, uint32_t *ret)
{
    uint32_t id = gw_vocab_find(t->vocab, text, n);
    if (id == UINT32_MAX)
        return false;
    *ret = id;
    return true;
}
