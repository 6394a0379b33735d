/* Splitting text into the pieces that BPE merges within, by the model's pattern (PCRE2 with JIT).
 * Immutable after gw_pretoken_new; scans hold their own state, so any number of threads may scan
 * at once. */
#ifndef ISLET_GW_PRETOKEN_H
#define ISLET_GW_PRETOKEN_H

#include <stdbool.h>
#include <stddef.h>

#include "err.h"

struct gw_pretoken;
struct gw_pretoken_scan;

/* `name` as in tokenizer.ggml.pre; ERR_UNSUPPORTED names it and what is there. Gives *ret;
 * gw_pretoken_free. */
enum err_code gw_pretoken_new(const char *name, size_t n, struct gw_pretoken **ret, struct err *e)
    __attribute__((warn_unused_result));
void gw_pretoken_free(struct gw_pretoken *p);

/* A scan over text[n], which is borrowed until gw_pretoken_scan_free. Gives *ret. */
enum err_code gw_pretoken_scan_new(const struct gw_pretoken *p, struct gw_pretoken_scan **ret,
                                   struct err *e) __attribute__((warn_unused_result));
void gw_pretoken_scan_free(struct gw_pretoken_scan *s);
void gw_pretoken_scan_text(struct gw_pretoken_scan *s, const char *text, size_t n);
/* Size of the next piece; pieces follow each other without gaps, so that their bytes joined are
 * the text. 0: end. A run of bytes that are not UTF-8 is a piece of its own. Linear in n, whatever
 * the text. */
enum err_code gw_pretoken_scan_next(struct gw_pretoken_scan *s, size_t *ret_size, struct err *e)
    __attribute__((warn_unused_result));

#endif
