/* The headers of a generated model's parts: keys, vocabulary and tensor table. */
#ifndef ISLET_MKMODEL_KEYS_H
#define ISLET_MKMODEL_KEYS_H

#include "mkmodel_plan.h"

struct gguf;

/* Fills header and data_offset of each part. donor: its tokenizer keys are copied; NULL: bytes,
 * pairs and three control tokens. */
enum err_code mkmodel_keys_make(struct mkmodel_plan *p, const struct gguf *donor, struct err *e)
    __attribute__((warn_unused_result));
/* First token of topic t; t = topics gives the vocabulary. Topics are equal blocks of ids. */
uint64_t mkmodel_keys_topic(const struct mkmodel_options *o, uint64_t t);

#endif
