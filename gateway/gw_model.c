#include "gw_model.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "alloc.h"
#include "gguf_file.h"
#include "gw_template.h"
#include "gw_tokenizer.h"

/* Text of a token, for the template; NULL: there is none. Gives a copy. */
static char *token_text(const struct gw_tokenizer *t, bool has, uint32_t id)
{
    const char *text;
    size_t n;
    if (!has || !gw_tokenizer_piece(t, id, true, &text, &n))
        return NULL;
    return alloc_text(ALLOC_MODEL, text, n);
}

/* A template that cannot be used does not keep the model from being served. */
static void template_load(struct gw_model *m, const struct gguf *keys)
{
    struct gguf_text text;
    struct err e = {0};
    uint32_t bos = 0, eos = 0, id;
    bool has_bos = gw_tokenizer_bos(m->tokenizer, &bos);
    bool has_eos = gw_tokenizer_eos(m->tokenizer, &eos);
    if (!gguf_text(keys, "tokenizer.chat_template", &text)) {
        snprintf(m->template_trouble, sizeof m->template_trouble,
                 "the model file has no chat template (tokenizer.chat_template)");
        return;
    }
    char *bos_text = token_text(m->tokenizer, has_bos, bos);
    char *eos_text = token_text(m->tokenizer, has_eos, eos);
    struct gw_template_model facts = {
        .bos = bos_text,
        .eos = eos_text,
        .think_tokens = gw_tokenizer_find(m->tokenizer, "<think>", 7, &id) &&
                        gw_tokenizer_find(m->tokenizer, "</think>", 8, &id),
    };
    if (gw_template_compile(text.data, text.size, &facts, &m->template, &e) != ERR_OK)
        snprintf(m->template_trouble, sizeof m->template_trouble,
                 "the model's chat template cannot be used: %.180s", e.text);
    alloc_free(bos_text);
    alloc_free(eos_text);
}

static void file_facts(struct gw_model *m, const struct gguf_file *file)
{
    struct stat status;
    for (uint32_t i = 0; i < file->n_files; i++)
        m->file_bytes += file->file_sizes[i];
    if (fstat(file->fds[0], &status) == 0)
        m->created_s = status.st_mtime;
}

enum err_code gw_model_open(const char *path, struct gw_model **ret, struct err *e)
{
    struct gguf_file *file = NULL;
    struct gw_model *m = alloc_zero(ALLOC_MODEL, 1, sizeof *m);
    if (!m)
        return err_set(e, ERR_NOMEM, "no memory for the model's header");
    enum err_code code = gguf_file_open(path, &file, e);
    if (code == ERR_OK)
        code = shape_from_file(file, &m->shape, e);
    if (code == ERR_OK)
        code = gguf_file_digest(file, m->file_digest, e);
    if (code == ERR_OK)
        code = gw_tokenizer_new(file, &m->tokenizer, e);
    if (code != ERR_OK)
        goto out;
    gguf_file_shape_digest(file, &m->shape, m->shape_digest);
    m->id = m->shape.name;
    file_facts(m, file);
    template_load(m, gguf_file_keys(file));
    *ret = m;
    m = NULL;
out:
    gw_model_free(m);
    gguf_file_close(file);
    return code;
}

void gw_model_free(struct gw_model *m)
{
    if (!m)
        return;
    gw_template_free(m->template);
    gw_tokenizer_free(m->tokenizer);
    alloc_free(m);
}

struct gw_model_alias gw_model_alias_at(const char *aliases, size_t i)
{
    const char *p = aliases;
    for (;;) {
        p += strspn(p, ", \t");
        size_t n = strcspn(p, ",");
        size_t used = n;
        while (used > 0 && (p[used - 1] == ' ' || p[used - 1] == '\t'))
            used--;
        if (n == 0 || i-- == 0)
            return (struct gw_model_alias){p, used};
        p += n;
    }
}

void gw_model_served(const struct gw_model *m, const char *aliases, char *ret, size_t n_ret)
{
    snprintf(ret, n_ret, "%s", m->id);
    for (size_t i = 0;; i++) {
        struct gw_model_alias alias = gw_model_alias_at(aliases, i);
        size_t used = strlen(ret);
        if (alias.n == 0)
            return;
        snprintf(ret + used, n_ret - used, ", %.*s", (int)alias.n, alias.text);
    }
}

static bool equals(const char *a, size_t n_a, const char *b, size_t n_b)
{
    return n_a == n_b && memcmp(a, b, n_b) == 0;
}

bool gw_model_named(const struct gw_model *m, const char *aliases, const char *name, size_t n)
{
    if (n == 0 || equals("default", 7, name, n) || equals(m->id, strlen(m->id), name, n))
        return true;
    for (size_t i = 0;; i++) {
        struct gw_model_alias alias = gw_model_alias_at(aliases, i);
        if (alias.n == 0)
            return false;
        if (equals(alias.text, alias.n, name, n))
            return true;
    }
}
