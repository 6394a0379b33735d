/* Text to token ids and back, from the vocabulary in a GGUF: byte-level BPE (`gpt2`) with the
 * `qwen2` pre-tokenizer. Immutable after gw_tokenizer_new: any thread may encode and decode at the
 * same time.
 *
 * Kinds of token. *Special* (control and unknown tokens of the file) yield no text in answers;
 * user-defined ones are found whole in text as special ones are, but are ordinary text in answers,
 * and so are the thinking markers "<think>" and "</think>" whatever their kind, because the
 * gateway splits answers by them. *End* tokens: tokenizer.ggml.eos_token_id, eot_token_id,
 * eom_token_id, and control tokens whose text is one of the usual end marks (<|im_end|>,
 * <|endoftext|>, <|eot_id|>, <end_of_turn>, ...: the table in gw_tokenizer.c). */
#ifndef ISLET_GW_TOKENIZER_H
#define ISLET_GW_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "err.h"

struct gguf_file;
struct gw_tokenizer;

/* Token ids that grow. Zero-initialise; gw_tokenizer_ids_done frees. */
struct gw_tokenizer_ids {
    uint32_t *ids;
    size_t n, capacity;
};
void gw_tokenizer_ids_done(struct gw_tokenizer_ids *ids);

/* Borrows `file` for the call. Gives *ret; free with gw_tokenizer_free. Errors: UNSUPPORTED (no
 * tokenizer in the file, or another one than gpt2/qwen2: names both), FORMAT (what is wrong in the
 * vocabulary), NOMEM. */
enum err_code gw_tokenizer_new(const struct gguf_file *file, struct gw_tokenizer **ret,
                               struct err *e) __attribute__((warn_unused_result));
void gw_tokenizer_free(struct gw_tokenizer *t);

/* Appends the ids of text[n] to *ret (which keeps what it held). Any bytes are taken: what is not
 * UTF-8 is encoded byte by byte. parse_special: special tokens written in the text become their
 * ids; without it they are plain text (user-defined tokens are found either way). add_bos: the
 * begin token first, where the model has one. On failure *ret is as before. Errors: NOMEM, LIMIT
 * (text of 1 GiB and more). */
enum err_code gw_tokenizer_encode(const struct gw_tokenizer *t, const char *text, size_t n,
                                  bool parse_special, bool add_bos, struct gw_tokenizer_ids *ret,
                                  struct err *e) __attribute__((warn_unused_result));

/* Bytes of a token, perhaps not whole UTF-8; lent for the tokenizer's life, not NUL-terminated.
 * with_special false: special tokens give no bytes (answers); true: their text (/detokenize,
 * logprobs, pieces). False: no such id. */
bool gw_tokenizer_piece(const struct gw_tokenizer *t, uint32_t id, bool with_special,
                        const char **ret_text, size_t *ret_size);

/* End tokens, ascending; lent. */
size_t gw_tokenizer_end_ids(const struct gw_tokenizer *t, const uint32_t **ret);
bool gw_tokenizer_bos(const struct gw_tokenizer *t, uint32_t *ret); /* false: the model has none */
bool gw_tokenizer_eos(const struct gw_tokenizer *t, uint32_t *ret);
bool gw_tokenizer_adds_bos(
    const struct gw_tokenizer *t); /* tokenizer.ggml.add_bos_token; false where missing */
uint32_t gw_tokenizer_n_vocab(const struct gw_tokenizer *t);
/* The id whose whole text is `text`, special or not. */
bool gw_tokenizer_find(const struct gw_tokenizer *t, const char *text, size_t n, uint32_t *ret);

#endif
