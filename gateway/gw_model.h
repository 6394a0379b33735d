/* What the gateway knows of the model, from the same file that the worker serves: names, shape,
 * digests, tokenizer, chat template. Immutable after gw_model_open; any thread. */
#ifndef ISLET_GW_MODEL_H
#define ISLET_GW_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "err.h"
#include "shape.h"

struct gw_template;
struct gw_tokenizer;

struct gw_model {
    struct model_shape shape;
    const char *id; /* the served id: shape.name */
    uint8_t file_digest[16], shape_digest[16];
    uint64_t file_bytes;
    int64_t created_s; /* the file's time */
    struct gw_tokenizer *tokenizer;
    struct gw_template *template; /* NULL: template_trouble says why there are no chats */
    char template_trouble[240];
};

/* Gives *ret; free with gw_model_free. Errors name file, cause and remedy. */
enum err_code gw_model_open(const char *path, struct gw_model **ret, struct err *e)
    __attribute__((warn_unused_result));
void gw_model_free(struct gw_model *m); /* NULL is fine */

/* True for the id, "", "default", and each name in `aliases` (text of model.alias). */
bool gw_model_named(const struct gw_model *m, const char *aliases, const char *name, size_t n);
/* The i-th alias; n 0: there is none. */
struct gw_model_alias {
    const char *text;
    size_t n;
};
struct gw_model_alias gw_model_alias_at(const char *aliases, size_t i);
/* The id and the aliases with commas between them, cut to n_ret bytes with their NUL. */
void gw_model_served(const struct gw_model *m, const char *aliases, char *ret, size_t n_ret);

#endif
