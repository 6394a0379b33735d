/* From logits to a token and to log-probabilities (ARITHMETIC A20, A21), in integers after one
 * exponential, so that no sum depends on its order. Nothing is allocated after sample_start. The
 * engine thread's. */
#ifndef ISLET_SAMPLE_H
#define ISLET_SAMPLE_H

#include "proto_message.h"

struct sample {
    uint32_t n_vocab;
    float *x;         /* [n_vocab] logits after bias and penalties */
    uint64_t *weight; /* [n_vocab] */
    uint32_t *order;  /* [n_vocab] candidates */
    uint32_t *count;  /* [n_vocab] zero between calls */
    uint8_t *keep;    /* [n_vocab] */
    uint64_t *sum;    /* of the weights, by pieces of the vocabulary */
};

enum err_code sample_start(struct sample *s, uint32_t n_vocab, struct err *e)
    __attribute__((warn_unused_result));
void sample_done(struct sample *s);

/* Chooses token `index` of the answer. tokens[n]: prompt and answer so far. ERR_ARGUMENT: every
 * logit is -inf. */
enum err_code sample_pick(struct sample *s, const float *logits, const struct proto_run *run,
                          const uint32_t *tokens, uint32_t n, uint32_t index, uint32_t *ret,
                          struct err *e) __attribute__((warn_unused_result));
/* Neither filters nor changes the logits, nor are log-probabilities wanted: the logits themselves
 * and a random number give the token. */
bool sample_plain(const struct proto_run *run);
/* Log-probability of ret->id and the n_top best, of the raw logits. */
void sample_logprobs(const float *logits, uint32_t n_vocab, uint8_t n_top, struct proto_token *ret);

#endif
