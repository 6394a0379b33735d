/* The objects of the OpenAI-style API as text: what is common to whole answers and chunks. Pure;
 * appends to a buf. */
#ifndef ISLET_GW_OPENAI_H
#define ISLET_GW_OPENAI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "buf.h"
#include "gw_request.h"

struct gw_tokenizer;

struct gw_openai_usage {
    uint64_t prompt, completion, cached, reasoning;
    uint64_t seed, hits_vram, hits_ram, misses, ssd_bytes, queue_ms, resumed;
    bool context_full;
};

struct gw_openai_timings {
    uint64_t cache_n, prompt_n, predicted_n;
    double prompt_ms, predicted_ms;
};

/* Everything in front of the first choice: {"id":...,"choices":[ */
void gw_openai_head(struct buf *out, const struct gw_request *q, const char *model,
                    const uint8_t file_digest[16], bool is_chunk);
/* {"prompt_tokens":...} */
void gw_openai_usage(struct buf *out, const struct gw_openai_usage *u);
/* {"cache_n":...} */
void gw_openai_timings(struct buf *out, const struct gw_openai_timings *t);
/* "stop", "length": in quotes. */
void gw_openai_finish(struct buf *out, enum proto_finish finish, bool matched);

/* One token of chat logprobs: {"token":...,"logprob":...,"bytes":[..],"top_logprobs":[..]} */
void gw_openai_logprob(struct buf *out, const struct gw_tokenizer *t, uint32_t id,
                       const struct gw_request_lp *lp);

/* Logprobs of a completion: four arrays that grow together; each text is without its brackets. */
struct gw_openai_columns {
    struct buf tokens, logprobs, tops, offsets;
};
void gw_openai_columns_init(struct gw_openai_columns *c, size_t ceiling);
void gw_openai_columns_done(struct gw_openai_columns *c);
bool gw_openai_columns_failed(const struct gw_openai_columns *c); /* no memory */
void gw_openai_columns_clear(struct gw_openai_columns *c);
/* lp NULL: no logprobs for this token. offset: code points in front of it. */
void gw_openai_columns_add(struct gw_openai_columns *c, const struct gw_tokenizer *t, uint32_t id,
                           const struct gw_request_lp *lp, uint64_t offset);
/* {"tokens":[..],...} */
void gw_openai_columns_write(struct buf *out, const struct gw_openai_columns *c, bool has_tops);

#endif
