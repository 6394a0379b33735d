/* Texts to ids: at once where they are short, on libuv's thread pool where they would hold up the
 * loop. Lies inside its owner, who waits for `done` before freeing it. Thread: loop. */
#ifndef ISLET_GW_ENCODE_H
#define ISLET_GW_ENCODE_H

#include <stdbool.h>
#include <stddef.h>
#include <uv.h>

#include "err.h"
#include "gw_chat_request.h"
#include "gw_tokenizer.h"

enum {
    GW_ENCODE_MAX_TEXTS = GW_CHAT_REQUEST_MAX_PROMPTS,
    GW_ENCODE_INLINE_BYTES = 64 * 1024
};

struct gw_encode {
    /* filled by the owner */
    const struct gw_tokenizer *tokenizer; /* borrowed until done */
    struct {
        const char *text; /* borrowed until done; NULL: left out */
        size_t n;
    } texts[GW_ENCODE_MAX_TEXTS];
    unsigned n_texts;
    bool parse_special, add_bos;
    void (*done)(struct gw_encode *e); /* called once, perhaps before gw_encode_start returns */

    /* results; ids are the owner's to free */
    struct gw_tokenizer_ids ids[GW_ENCODE_MAX_TEXTS];
    enum err_code code;
    struct err error;

    uv_work_t work;
};

void gw_encode_start(struct gw_encode *e, uv_loop_t *loop);

#endif
