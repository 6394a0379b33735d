#include "gw_vocab.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "alloc.h"
#include "gguf.h"
#include "utf8.h"

enum {
    MAX_TOKENS = 1 << 24,
    MAX_BYTES = 1 << 30
};

/* GPT-2's byte alphabet: printable Latin-1 bytes stand for themselves, the other 68 take U+0100
 * upwards. */
static bool byte_is_itself(unsigned byte)
{
    return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

/* The byte for each code point below 0x200, or -1. */
static void alphabet(int16_t ret[0x200])
{
    unsigned next = 0x100;
    for (unsigned i = 0; i < 0x200; i++)
        ret[i] = -1;
    for (unsigned byte = 0; byte < 256; byte++)
        ret[byte_is_itself(byte) ? byte : next++] = (int16_t)byte;
}

/* Undoes the alphabet; false if some character is not of it. out: room for n bytes. */
static bool alphabet_undo(const int16_t *map, const char *text, size_t n, char *out, size_t *ret_n)
{
    const uint8_t *p = (const uint8_t *)text;
    size_t made = 0;
    for (size_t at = 0; at < n;) {
        int k = utf8_sequence(p + at, n - at);
        if (k <= 0)
            return false;
        uint32_t code = utf8_decode(p + at, (size_t)k);
        if (code >= 0x200 || map[code] < 0)
            return false;
        out[made++] = (char)map[code];
        at += (size_t)k;
    }
    *ret_n = made;
    return true;
}

static bool is_searched(uint8_t kind)
{
    return kind == GW_VOCAB_CONTROL || kind == GW_VOCAB_USER || kind == GW_VOCAB_UNKNOWN;
}

static uint32_t table_size(uint64_t n)
{
    uint32_t size = 16;
    while (size < n + n / 2 + 1)
        size *= 2;
    return size;
}

static bool bytes_equal(const struct gw_vocab *v, uint32_t id, const char *bytes, size_t n)
{
    size_t size;
    const char *own = gw_vocab_bytes(v, id, &size);
    return size == n && memcmp(own, bytes, n) == 0;
}

/* Finds the token, or the free place for it. */
static uint32_t *by_bytes_slot(const struct gw_vocab *v, const char *bytes, size_t n)
{
    uint32_t i = (uint32_t)XXH3_64bits(bytes, n) & v->by_bytes_mask;
    while (v->by_bytes[i] != 0 && !bytes_equal(v, v->by_bytes[i] - 1, bytes, n))
        i = (i + 1) & v->by_bytes_mask;
    return &v->by_bytes[i];
}

static uint32_t merge_slot(const struct gw_vocab *v, uint32_t left, uint32_t right)
{
    uint64_t key = ((uint64_t)left << 32 | right) * 0x9E3779B97F4A7C15u;
    uint32_t i = (uint32_t)(key >> 32) & v->merges_mask;
    while (v->merges[i].right != UINT32_MAX &&
           (v->merges[i].left != left || v->merges[i].right != right))
        i = (i + 1) & v->merges_mask;
    return i;
}

static enum err_code read_kinds(struct gw_vocab *v, const struct gguf *keys, struct err *e)
{
    const struct gguf_array *types = gguf_array_get(keys, "tokenizer.ggml.token_type");
    int64_t kind;
    if (!types) {
        memset(v->kinds, GW_VOCAB_NORMAL, v->n);
        return ERR_OK;
    }
    if (gguf_array_count(types) != v->n)
        return err_set(e, ERR_FORMAT,
                       "tokenizer.ggml.token_type has %llu entries, tokenizer.ggml.tokens %u",
                       (unsigned long long)gguf_array_count(types), v->n);
    for (uint32_t i = 0; i < v->n; i++) {
        if (!gguf_array_i64_at(types, i, &kind) || kind < 0 || kind > GW_VOCAB_BYTE)
            return err_set(e, ERR_FORMAT, "tokenizer.ggml.token_type[%u] is not a type 1 to 6", i);
        v->kinds[i] = (uint8_t)kind;
    }
    return ERR_OK;
}

/* Special tokens stand in the file as they look in text, all others in the byte alphabet. */
static enum err_code read_tokens(struct gw_vocab *v, const struct gguf_array *tokens, struct err *e)
{
    int16_t map[0x200];
    uint64_t total = 0;
    size_t at = 0, n;
    struct gguf_text text;

    alphabet(map);
    for (uint32_t i = 0; i < v->n; i++) {
        if (!gguf_array_text_at(tokens, i, &text))
            return err_set(e, ERR_FORMAT, "tokenizer.ggml.tokens[%u] is not a text", i);
        total += text.size;
        if (total > MAX_BYTES)
            return err_set(e, ERR_FORMAT, "tokenizer.ggml.tokens: more than %d bytes", MAX_BYTES);
    }
    v->bytes = alloc_get(ALLOC_MODEL, (size_t)total);
    if (!v->bytes)
        return err_set(e, ERR_NOMEM, "no memory for %u tokens", v->n);
    for (uint32_t i = 0; i < v->n; i++) {
        if (!gguf_array_text_at(tokens, i, &text))
            return err_set(e, ERR_FORMAT, "tokenizer.ggml.tokens[%u] is not a text", i);
        v->starts[i] = (uint32_t)at;
        if (is_searched(v->kinds[i]) ||
            !alphabet_undo(map, text.data, text.size, v->bytes + at, &n)) {
            memcpy(v->bytes + at, text.data, text.size);
            n = text.size;
        }
        at += n;
    }
    v->starts[v->n] = (uint32_t)at;
    return ERR_OK;
}

/* Only tokens that plain text is made of are found by their bytes first; a special token of the
 * same text is another thing. Of equal ones the first wins. */
static enum err_code index_tokens(struct gw_vocab *v, struct err *e)
{
    uint32_t size = table_size(v->n);
    v->by_bytes_mask = size - 1;
    v->by_bytes = alloc_zero(ALLOC_MODEL, size, sizeof *v->by_bytes);
    if (!v->by_bytes)
        return err_set(e, ERR_NOMEM, "no memory to index %u tokens", v->n);
    for (int searched = 0; searched < 2; searched++) {
        for (uint32_t i = 0; i < v->n; i++) {
            size_t n;
            const char *bytes = gw_vocab_bytes(v, i, &n);
            uint32_t *slot =
                is_searched(v->kinds[i]) == searched ? by_bytes_slot(v, bytes, n) : NULL;
            if (slot && *slot == 0)
                *slot = i + 1;
        }
    }
    for (unsigned byte = 0; byte < 256; byte++) {
        char text = (char)byte;
        uint32_t id = gw_vocab_find(v, &text, 1);
        if (id == UINT32_MAX)
            return err_set(e, ERR_FORMAT, "tokenizer.ggml.tokens has no token for byte 0x%02x",
                           byte);
        v->byte_ids[byte] = id;
    }
    return ERR_OK;
}

/* One rule "left right" in the byte alphabet. work: at least the rule's size. */
static enum err_code add_merge(struct gw_vocab *v, const int16_t *map, uint32_t rank,
                               struct gguf_text rule, char *work, struct err *e)
{
    const char *gap = rule.size > 1 ? memchr(rule.data + 1, ' ', rule.size - 1) : NULL;
    size_t n_left, n_right;
    if (!gap || !alphabet_undo(map, rule.data, (size_t)(gap - rule.data), work, &n_left) ||
        !alphabet_undo(map, gap + 1, rule.size - (size_t)(gap + 1 - rule.data), work + n_left,
                       &n_right) ||
        n_right == 0)
        return err_set(e, ERR_FORMAT, "tokenizer.ggml.merges[%u] is not two pieces of text", rank);
    uint32_t left = gw_vocab_find(v, work, n_left);
    uint32_t right = gw_vocab_find(v, work + n_left, n_right);
    uint32_t joined = gw_vocab_find(v, work, n_left + n_right);
    if (left == UINT32_MAX || right == UINT32_MAX || joined == UINT32_MAX)
        return err_set(e, ERR_FORMAT,
                       "tokenizer.ggml.merges[%u] \"%.*s\": a piece or the joined text is no token",
                       rank, rule.size > 60 ? 60 : (int)rule.size, rule.data);
    struct gw_vocab_merge *place = &v->merges[merge_slot(v, left, right)];
    if (place->right == UINT32_MAX)
        *place = (struct gw_vocab_merge){left, right, rank, joined};
    return ERR_OK;
}

static enum err_code read_merges(struct gw_vocab *v, const struct gguf *keys, struct err *e)
{
    const struct gguf_array *rules = gguf_array_get(keys, "tokenizer.ggml.merges");
    uint64_t n = rules ? gguf_array_count(rules) : 0;
    struct gguf_text rule;
    int16_t map[0x200];
    size_t longest = 1;
    enum err_code code = ERR_OK;
    char *work;

    if (n > MAX_TOKENS)
        return err_set(e, ERR_FORMAT, "tokenizer.ggml.merges: %llu entries, more than %d",
                       (unsigned long long)n, MAX_TOKENS);
    uint32_t size = table_size(n);
    v->merges_mask = size - 1;
    v->merges = alloc_zero(ALLOC_MODEL, size, sizeof *v->merges);
    for (uint32_t i = 0; i < n; i++) {
        if (!gguf_array_text_at(rules, i, &rule))
            return err_set(e, ERR_FORMAT, "tokenizer.ggml.merges[%u] is not a text", i);
        if (rule.size > longest)
            longest = rule.size;
    }
    work = alloc_get(ALLOC_MODEL, longest);
    if (!v->merges || !work) {
        alloc_free(work);
        return err_set(e, ERR_NOMEM, "no memory for %llu merges", (unsigned long long)n);
    }
    for (uint32_t i = 0; i < size; i++)
        v->merges[i].right = UINT32_MAX;
    alphabet(map);
    for (uint32_t i = 0; i < n && code == ERR_OK; i++) {
        bool is_text = gguf_array_text_at(rules, i, &rule);
        assert(is_text);
        (void)is_text;
        code = add_merge(v, map, i, rule, work, e);
    }
    alloc_free(work);
    return code;
}

static int compare_specials(const void *a, const void *b, void *context)
{
    const struct gw_vocab *v = context;
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    size_t n_x, n_y;
    const char *t_x = gw_vocab_bytes(v, x, &n_x), *t_y = gw_vocab_bytes(v, y, &n_y);
    int order = memcmp(t_x, t_y, n_x < n_y ? n_x : n_y);
    if (order != 0)
        return order;
    if (n_x != n_y)
        return n_x < n_y ? -1 : 1;
    return x < y ? -1 : x > y;
}

static enum err_code collect_specials(struct gw_vocab *v, struct err *e)
{
    uint32_t n = 0;
    size_t size;
    for (uint32_t i = 0; i < v->n; i++)
        n += is_searched(v->kinds[i]);
    v->specials = alloc_zero(ALLOC_MODEL, n ? n : 1, sizeof *v->specials);
    if (!v->specials)
        return err_set(e, ERR_NOMEM, "no memory for %u special tokens", n);
    for (uint32_t i = 0; i < v->n; i++) {
        const char *text = gw_vocab_bytes(v, i, &size);
        if (!is_searched(v->kinds[i]) || size == 0)
            continue;
        v->specials[v->n_specials++] = i;
        v->special_first[(uint8_t)text[0]] = true;
    }
    qsort_r(v->specials, v->n_specials, sizeof *v->specials, compare_specials, v);
    return ERR_OK;
}

enum err_code gw_vocab_new(const struct gguf *keys, struct gw_vocab **ret, struct err *e)
{
    const struct gguf_array *tokens = gguf_array_get(keys, "tokenizer.ggml.tokens");
    uint64_t n = tokens ? gguf_array_count(tokens) : 0;
    struct gw_vocab *v;
    enum err_code code;

    if (n == 0 || n > MAX_TOKENS)
        return err_set(e, ERR_FORMAT,
                       "tokenizer.ggml.tokens has %llu entries; 1 to %d are possible",
                       (unsigned long long)n, MAX_TOKENS);
    v = alloc_zero(ALLOC_MODEL, 1, sizeof *v);
    if (!v)
        return err_set(e, ERR_NOMEM, "no memory for the vocabulary");
    v->n = (uint32_t)n;
    v->starts = alloc_zero(ALLOC_MODEL, n + 1, sizeof *v->starts);
    v->kinds = alloc_zero(ALLOC_MODEL, n, sizeof *v->kinds);
    code = v->starts && v->kinds ? ERR_OK : err_set(e, ERR_NOMEM, "no memory for %u tokens", v->n);
    if (code == ERR_OK)
        code = read_kinds(v, keys, e);
    if (code == ERR_OK)
        code = read_tokens(v, tokens, e);
    if (code == ERR_OK)
        code = index_tokens(v, e);
    if (code == ERR_OK)
        code = read_merges(v, keys, e);
    if (code == ERR_OK)
        code = collect_specials(v, e);
    if (code != ERR_OK)
        gw_vocab_free(v);
    else
        *ret = v;
    return code;
}

void gw_vocab_free(struct gw_vocab *v)
{
    if (!v)
        return;
    alloc_free(v->bytes);
    alloc_free(v->starts);
    alloc_free(v->kinds);
    alloc_free(v->by_bytes);
    alloc_free(v->merges);
    alloc_free(v->specials);
    alloc_free(v);
}

uint32_t gw_vocab_find(const struct gw_vocab *v, const char *bytes, size_t n)
{
    return *by_bytes_slot(v, bytes, n) - 1;
}

const struct gw_vocab_merge *gw_vocab_merge_find(const struct gw_vocab *v, uint32_t left,
                                                 uint32_t right)
{
    const struct gw_vocab_merge *m = &v->merges[merge_slot(v, left, right)];
    return m->right == UINT32_MAX ? NULL : m;
}

/* First of specials[low, high), which share `depth` bytes, whose byte at `depth` is >= byte. */
static uint32_t narrow(const struct gw_vocab *v, uint32_t low, uint32_t high, size_t depth,
                       unsigned byte)
{
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        size_t n;
        const char *text = gw_vocab_bytes(v, v->specials[middle], &n);
        if (n <= depth || (uint8_t)text[depth] < byte)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

uint32_t gw_vocab_special_at(const struct gw_vocab *v, const char *text, size_t n, bool all)
{
    uint32_t low = 0, high = v->n_specials, best = UINT32_MAX;
    if (n == 0 || !v->special_first[(uint8_t)text[0]])
        return UINT32_MAX;
    for (size_t depth = 0; depth < n && low < high; depth++) {
        unsigned byte = (uint8_t)text[depth];
        low = narrow(v, low, high, depth, byte);
        high = narrow(v, low, high, depth, byte + 1);
        /* Those that end here stand first; the first that is allowed is taken. */
        for (uint32_t i = low; i < high; i++) {
            uint32_t id = v->specials[i];
            if (v->starts[id + 1] - v->starts[id] != depth + 1)
                break;
            if (all || v->kinds[id] == GW_VOCAB_USER) {
                best = id;
                break;
            }
        }
    }
    return best;
}
