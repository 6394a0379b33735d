#include "gw_pretoken.h"

#include <stdint.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "alloc.h"
#include "utf8.h"

/* White space as Unicode defines it. PCRE2's own \s also takes U+180E, which the trained
 * tokenizers do not. */
#define SPACE                                                             \
    "\\x09-\\x0d\\x20\\x85\\xa0\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{" \
    "2029}\\x{202f}\\x{205f}\\x{3000}"

/* Each pattern matches at every character of valid text, and in time linear in what it looks at:
 * the only backtracking is over a run of white space, which the match then consumes but for its
 * last character. */
static const struct pattern {
    const char *name, *text;
} patterns[] = {
    {"qwen2", "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
              "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+"
              "|\\p{N}"
              "| ?[^" SPACE "\\p{L}\\p{N}]+[\\r\\n]*"
              "|[" SPACE "]*[\\r\\n]+"
              "|[" SPACE "]+(?![^" SPACE "])"
              "|[" SPACE "]+"},
};

struct gw_pretoken {
    pcre2_general_context *general;
    pcre2_code *code;
};

struct gw_pretoken_scan {
    const struct gw_pretoken *pattern;
    pcre2_match_data *match;
    pcre2_match_context *limits;
    const char *text;
    size_t size, at;
    size_t valid_end; /* text[at, valid_end) is valid UTF-8; 0 when that must be looked for */
};

static void *pcre_get(size_t bytes, void *context)
{
    (void)context;
    return alloc_get(ALLOC_MODEL, bytes);
}

static void pcre_free(void *block, void *context)
{
    (void)context;
    alloc_free(block);
}

static const struct pattern *pattern_find(const char *name, size_t n)
{
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++)
        if (strlen(patterns[i].name) == n && memcmp(patterns[i].name, name, n) == 0)
            return &patterns[i];
    return NULL;
}

enum err_code gw_pretoken_new(const char *name, size_t n, struct gw_pretoken **ret, struct err *e)
{
    const struct pattern *pattern = pattern_find(name, n);
    struct gw_pretoken *p;
    int code;
    PCRE2_SIZE at;

    if (!pattern)
        return err_set(e, ERR_UNSUPPORTED,
                       "tokenizer.ggml.pre is \"%.*s\"; this version has \"qwen2\" only",
                       n > 60 ? 60 : (int)n, name);
    p = alloc_zero(ALLOC_MODEL, 1, sizeof *p);
    if (!p)
        return err_set(e, ERR_NOMEM, "no memory for the pre-tokenizer");
    p->general = pcre2_general_context_create(pcre_get, pcre_free, NULL);
    if (p->general) {
        pcre2_compile_context *context = pcre2_compile_context_create(p->general);
        if (context)
            p->code = pcre2_compile((PCRE2_SPTR)pattern->text, PCRE2_ZERO_TERMINATED,
                                    PCRE2_UTF | PCRE2_UCP | PCRE2_ANCHORED, &code, &at, context);
        pcre2_compile_context_free(context);
    }
    if (!p->code) {
        gw_pretoken_free(p);
        return err_set(e, ERR_NOMEM, "no memory for the pre-tokenizer's pattern");
    }
    /* Where the system forbids executable pages the interpreter does the same work slower. */
    (void)pcre2_jit_compile(p->code, PCRE2_JIT_COMPLETE);
    *ret = p;
    return ERR_OK;
}

void gw_pretoken_free(struct gw_pretoken *p)
{
    if (!p)
        return;
    pcre2_code_free(p->code);
    pcre2_general_context_free(p->general);
    alloc_free(p);
}

enum err_code gw_pretoken_scan_new(const struct gw_pretoken *p, struct gw_pretoken_scan **ret,
                                   struct err *e)
{
    struct gw_pretoken_scan *s = alloc_zero(ALLOC_REQUEST, 1, sizeof *s);
    if (!s)
        return err_set(e, ERR_NOMEM, "no memory for a scan of text");
    s->pattern = p;
    s->match = pcre2_match_data_create(1, p->general);
    s->limits = pcre2_match_context_create(p->general);
    if (!s->match || !s->limits) {
        gw_pretoken_scan_free(s);
        return err_set(e, ERR_NOMEM, "no memory for a scan of text");
    }
    /* The patterns are linear, so PCRE2's guards would only refuse long texts. */
    pcre2_set_match_limit(s->limits, UINT32_MAX);
    pcre2_set_depth_limit(s->limits, UINT32_MAX);
    *ret = s;
    return ERR_OK;
}

void gw_pretoken_scan_free(struct gw_pretoken_scan *s)
{
    if (!s)
        return;
    pcre2_match_data_free(s->match);
    pcre2_match_context_free(s->limits);
    alloc_free(s);
}

void gw_pretoken_scan_text(struct gw_pretoken_scan *s, const char *text, size_t n)
{
    s->text = text;
    s->size = n;
    s->at = 0;
    s->valid_end = 0;
}

static size_t valid_until(const struct gw_pretoken_scan *s)
{
    size_t at = s->at;
    while (at < s->size) {
        int n = utf8_sequence((const uint8_t *)s->text + at, s->size - at);
        if (n <= 0)
            break;
        at += (size_t)n;
    }
    return at;
}

/* A run of bytes that are not UTF-8 is a piece of its own. */
static size_t invalid_run(const struct gw_pretoken_scan *s)
{
    size_t at = s->at;
    while (at < s->size) {
        int n = utf8_sequence((const uint8_t *)s->text + at, s->size - at);
        if (n > 0)
            break;
        at += n < 0 ? (size_t)-n : s->size - at;
    }
    return at - s->at;
}

enum err_code gw_pretoken_scan_next(struct gw_pretoken_scan *s, size_t *ret_size, struct err *e)
{
    if (s->at == s->size) {
        *ret_size = 0;
        return ERR_OK;
    }
    if (s->at >= s->valid_end)
        s->valid_end = valid_until(s);
    if (s->valid_end == s->at) {
        *ret_size = invalid_run(s);
        s->at += *ret_size;
        return ERR_OK;
    }
    const pcre2_code *code = s->pattern->code;
    PCRE2_SPTR subject = (PCRE2_SPTR)s->text;
    int rc =
        pcre2_match(code, subject, s->valid_end, s->at, PCRE2_NO_UTF_CHECK, s->match, s->limits);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
        rc = pcre2_match(code, subject, s->valid_end, s->at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                         s->match, s->limits);
    if (rc < 0)
        return err_set(e, rc == PCRE2_ERROR_NOMEMORY ? ERR_NOMEM : ERR_LIMIT,
                       "pre-tokenizer stopped at byte %zu of %zu (PCRE2 error %d)", s->at, s->size,
                       rc);
    size_t end = pcre2_get_ovector_pointer(s->match)[1];
    if (end <= s->at)
        return err_set(e, ERR_LIMIT, "pre-tokenizer made no progress at byte %zu", s->at);
    *ret_size = end - s->at;
    s->at = end;
    return ERR_OK;
}
