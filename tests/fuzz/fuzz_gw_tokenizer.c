/* Input: a flag byte, then any text. The pieces of its tokens, joined, must be the text. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gguf_file.h"
#include "gw_tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct gw_tokenizer *load(void)
{
    struct gguf_file *file;
    struct gw_tokenizer *t = NULL;
    struct err e = {0};
    if (gguf_file_open(ISLET_TEST_DIR "/models/tinymoe-q8_0.gguf", &file, &e) != ERR_OK ||
        gw_tokenizer_new(file, &t, &e) != ERR_OK) {
        (void)fprintf(stderr, "%s\n", e.text);
        abort();
    }
    gguf_file_close(file);
    return t;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct gw_tokenizer *tokenizer; /* loaded once, kept to the end */
    struct gw_tokenizer_ids ids = {0};
    size_t at = 0, n;
    const char *piece;
    if (!tokenizer)
        tokenizer = load();
    if (size == 0)
        return 0;
    const char *text = (const char *)data + 1;
    if (gw_tokenizer_encode(tokenizer, text, size - 1, data[0] & 1, false, &ids, NULL) != ERR_OK)
        abort();
    for (size_t i = 0; i < ids.n; i++) {
        if (!gw_tokenizer_piece(tokenizer, ids.ids[i], true, &piece, &n) || n > size - 1 - at ||
            memcmp(piece, text + at, n) != 0)
            abort();
        at += n;
    }
    if (at != size - 1)
        abort();
    gw_tokenizer_ids_done(&ids);
    return 0;
}
