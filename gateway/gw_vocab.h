/* The vocabulary of a byte-level BPE tokenizer, read from GGUF keys: bytes of each token, tokens
 * by their bytes, merge rules by pair, special tokens for search in text. Immutable after
 * gw_vocab_new; any thread. Used by gw_tokenizer. */
#ifndef ISLET_GW_VOCAB_H
#define ISLET_GW_VOCAB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "err.h"

struct gguf;

enum gw_vocab_kind { /* numbers of tokenizer.ggml.token_type */
    GW_VOCAB_NORMAL = 1,
    GW_VOCAB_UNKNOWN = 2,
    GW_VOCAB_CONTROL = 3,
    GW_VOCAB_USER = 4,
    GW_VOCAB_UNUSED = 5,
    GW_VOCAB_BYTE = 6,
};

struct gw_vocab_merge {
    uint32_t left, right; /* right = UINT32_MAX: free place of the table */
    uint32_t rank, id;    /* lower ranks merge first; id = the token of both joined */
};

struct gw_vocab {
    uint32_t n;         /* tokens */
    char *bytes;        /* of all tokens, one behind the other */
    uint32_t *starts;   /* [n + 1] places in bytes */
    uint8_t *kinds;     /* [n] enum gw_vocab_kind */
    uint32_t *by_bytes; /* hash table of id + 1, 0 = free: tokens that are made from plain text */
    uint32_t by_bytes_mask;
    struct gw_vocab_merge *merges; /* hash table */
    uint32_t merges_mask;
    uint32_t byte_ids[256]; /* token of each single byte */
    uint32_t *specials;     /* tokens found whole in text, sorted by their bytes */
    uint32_t n_specials;
    bool special_first[256]; /* some special token begins with this byte */
};

/* Borrows `keys` for the call. Gives *ret; free with gw_vocab_free. Errors: FORMAT, UNSUPPORTED,
 * NOMEM. */
enum err_code gw_vocab_new(const struct gguf *keys, struct gw_vocab **ret, struct err *e)
    __attribute__((warn_unused_result));
void gw_vocab_free(struct gw_vocab *v);

static inline const char *gw_vocab_bytes(const struct gw_vocab *v, uint32_t id, size_t *ret_size)
{
    *ret_size = v->starts[id + 1] - v->starts[id];
    return v->bytes + v->starts[id];
}

/* The token with these bytes; special ones are found too. UINT32_MAX: none. */
uint32_t gw_vocab_find(const struct gw_vocab *v, const char *bytes, size_t n);
/* The rule that joins two neighbours, or NULL. */
const struct gw_vocab_merge *gw_vocab_merge_find(const struct gw_vocab *v, uint32_t left,
                                                 uint32_t right);
/* The longest special token that text[n] begins with; UINT32_MAX: none. all false: only
 * user-defined ones. */
uint32_t gw_vocab_special_at(const struct gw_vocab *v, const char *text, size_t n, bool all);

#endif
