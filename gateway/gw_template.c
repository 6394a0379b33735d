#include "gw_template.h"

#include <string.h>

#include "alloc.h"
#include "gw_jinja_eval.h"
#include "gw_jinja_json.h"
#include "gw_jinja_parse.h"
#include "gw_jinja_run.h"

enum {
    MAX_TEMPLATE = 1 << 20,
    MAX_MEMORY = 256 << 20, /* of one rendering; a body has 16 MiB at most */
    MAX_OUT = 64 << 20,
};

struct gw_template {
    struct gw_jinja_run run; /* owns the tree */
    const struct gw_jinja_node *tree;
    struct gw_template_facts facts;
    char *bos, *eos;
};

/* ---- messages as the template wants them ---- */

static bool role_is(const json_t *message, const char *role)
{
    const char *own = json_string_value(json_object_get(message, "role"));
    return own && strcmp(own, role) == 0;
}

static bool is_system(const json_t *message)
{
    return role_is(message, "system") || role_is(message, "developer");
}

/* Arguments of calls as objects, where the string holds one. *calls is an own copy. */
static void open_arguments(json_t *calls)
{
    size_t i;
    json_t *call;
    json_array_foreach(calls, i, call)
    {
        json_t *function = json_object_get(call, "function");
        json_t *text = json_object_get(function ? function : call, "arguments");
        json_t *object = json_is_string(text)
                             ? json_loadb(json_string_value(text), json_string_length(text),
                                          JSON_ALLOW_NUL, NULL)
                             : NULL;
        if (json_is_object(object))
            (void)json_object_set(function ? function : call, "arguments", object);
        json_decref(object);
    }
}

/* A copy of one message; NULL: no memory. */
static json_t *adapted(const struct gw_template *t, const json_t *message)
{
    json_t *copy = json_copy((json_t *)(uintptr_t)message), *calls;
    bool failed = !copy;
    if (copy && role_is(copy, "developer") && !t->facts.developer_role)
        failed = json_object_set_new(copy, "role", json_string("system")) != 0;
    if (copy && role_is(copy, "assistant") && !json_is_string(json_object_get(copy, "content")))
        failed = json_object_set_new(copy, "content", json_string("")) != 0;
    calls = json_object_get(copy, "tool_calls");
    if (json_is_array(calls)) {
        calls = json_deep_copy(calls);
        if (calls)
            open_arguments(calls);
        failed = failed || json_object_set_new(copy, "tool_calls", calls) != 0;
    }
    if (!failed)
        return copy;
    json_decref(copy);
    return NULL;
}

/* Appends "\n\n" + text to the content of `to`. */
static bool append_content(json_t *to, const json_t *from)
{
    const json_t *a = json_object_get(to, "content"), *b = json_object_get(from, "content");
    struct buf text = BUF_INIT(MAX_OUT);
    bool done;
    buf_append(&text, json_string_value(a), json_string_length(a));
    buf_text(&text, "\n\n");
    buf_append(&text, json_string_value(b), json_string_length(b));
    done =
        !buf_failed(&text) &&
        json_object_set_new(to, "content", json_stringn((const char *)text.data, text.size)) == 0;
    buf_done(&text);
    return done;
}

/* System messages that the template would refuse are joined in front. */
static json_t *adapt_messages(const struct gw_template *t, const json_t *messages)
{
    json_t *all = json_array(), *message, *front = NULL;
    size_t i, n_system = 0, n = json_array_size(messages);
    bool failed = !all;
    for (i = 0; i < n; i++)
        n_system += is_system(json_array_get(messages, i));
    bool join = !t->facts.system_anywhere &&
                (n_system > 1 || (n_system == 1 && !is_system(json_array_get(messages, 0))));
    for (i = 0; i < n && !failed; i++) {
        message = adapted(t, json_array_get(messages, i));
        failed = !message;
        if (join && message && is_system(message)) {
            if (front) {
                failed = !append_content(front, message);
                json_decref(message);
            } else {
                failed = json_object_set_new(message, "role", json_string("system")) != 0 ||
                         json_array_insert_new(all, 0, message) != 0;
                front = failed ? NULL : message;
            }
        } else if (message) {
            failed = json_array_append_new(all, message) != 0;
        }
    }
    if (!failed)
        return all;
    json_decref(all);
    return NULL;
}

/* ---- running ---- */

static void put(struct gw_jinja_run *r, struct gw_jinja_dict *d, const char *name, size_t n,
                struct gw_jinja_value v)
{
    if (gw_jinja_run_ok(r))
        gw_jinja_value_put(r, d, gw_jinja_value_text(name, n), v);
}

static void put_variables(struct gw_jinja_run *r, const struct gw_template *t,
                          const struct gw_template_input *input, const json_t *messages,
                          bool prompt, struct gw_jinja_dict *d)
{
    json_t *kwargs = (json_t *)(uintptr_t)input->kwargs;
    put(r, d, "messages", 8, gw_jinja_json_read(r, messages));
    put(r, d, "add_generation_prompt", 21, gw_jinja_value_bool(prompt));
    put(r, d, "bos_token", 9, gw_jinja_value_text(t->bos, strlen(t->bos)));
    put(r, d, "eos_token", 9, gw_jinja_value_text(t->eos, strlen(t->eos)));
    put(r, d, "tools", 5, gw_jinja_value_none());
    put(r, d, "documents", 9, gw_jinja_value_none());
    for (void *it = kwargs ? json_object_iter(kwargs) : NULL; it;
         it = json_object_iter_next(kwargs, it)) {
        const char *key = json_object_iter_key(it);
        put(r, d, key, strlen(key), gw_jinja_json_read(r, json_object_iter_value(it)));
    }
}

static enum err_code run(const struct gw_template *t, const struct gw_template_input *input,
                         const json_t *messages, bool prompt, struct buf *ret, struct err *e)
{
    struct gw_jinja_run r;
    struct gw_jinja_dict variables = {0};
    enum err_code code;
    gw_jinja_run_init(&r, MAX_MEMORY, MAX_OUT, e);
    r.now_s = input->now_s;
    put_variables(&r, t, input, messages, prompt, &variables);
    if (gw_jinja_run_ok(&r))
        gw_jinja_eval(&r, t->tree, &variables);
    code = r.code;
    if (code == ERR_OK) {
        *ret = r.out;
        r.out = BUF_INIT(0);
    }
    gw_jinja_run_done(&r);
    return code;
}

/* ---- continuing the assistant's last message ---- */

static const char mark[] =
    "\xEE\x80\x80islet-continues-here\xEE\x80\x80"; /* in private use characters */

/* Renders with a mark behind the last content and cuts there. What stands in front of the mark
 * must be what the unmarked conversation renders too, or the template changes its output by the
 * content. */
static enum err_code run_continued(const struct gw_template *t,
                                   const struct gw_template_input *input, json_t *messages,
                                   struct buf *ret, struct err *e)
{
    json_t *last = json_array_get(messages, json_array_size(messages) - 1);
    const json_t *content = json_object_get(last, "content");
    struct buf plain = {0}, marked = {0}, text = BUF_INIT(MAX_OUT);
    enum err_code code = run(t, input, messages, false, &plain, e);
    const char *cut;
    buf_append(&text, json_string_value(content), json_string_length(content));
    buf_text(&text, mark);
    if (code == ERR_OK &&
        (buf_failed(&text) ||
         json_object_set_new(last, "content", json_stringn((const char *)text.data, text.size))))
        code = err_set(e, ERR_NOMEM, "no memory for the prompt");
    if (code == ERR_OK)
        code = run(t, input, messages, false, &marked, e);
    if (code == ERR_OK) {
        cut = marked.size ? memmem(marked.data, marked.size, mark, sizeof mark - 1) : NULL;
        size_t n = cut ? (size_t)(cut - (const char *)marked.data) : 0;
        /* A template that trims the content kept its last white space only because of the mark. */
        while (cut && n > 0 && (n > plain.size || memcmp(plain.data, marked.data, n) != 0) &&
               strchr(" \t\r\n", marked.data[n - 1]))
            n--;
        if (!cut || n > plain.size || memcmp(plain.data, marked.data, n) != 0)
            code =
                err_set(e, ERR_UNSUPPORTED,
                        "the model's chat template changes the last assistant message, so that it "
                        "cannot be continued; send \"continue_final_message\": false");
        else
            plain.size = n;
    }
    if (code == ERR_OK) {
        *ret = plain;
        plain = (struct buf){0};
    }
    buf_done(&plain);
    buf_done(&marked);
    buf_done(&text);
    return code;
}

static bool continues(const struct gw_template_input *input)
{
    size_t n = json_array_size(input->messages);
    return input->continue_final_message && n > 0 &&
           role_is(json_array_get(input->messages, n - 1), "assistant");
}

static enum err_code check_tools(const struct gw_template *t, const json_t *messages, struct err *e)
{
    size_t i;
    json_t *m;
    json_array_foreach(messages, i, m)
    {
        if (!t->facts.tool_calls &&
            (role_is(m, "tool") || json_array_size(json_object_get(m, "tool_calls")) > 0))
            return err_set(e, ERR_UNSUPPORTED,
                           "messages[%zu]: the model's chat template does not write tool calls and "
                           "their results",
                           i);
    }
    return ERR_OK;
}

static enum err_code render(const struct gw_template *t, const struct gw_template_input *input,
                            struct buf *ret, struct err *e)
{
    json_t *messages = adapt_messages(t, input->messages);
    size_t n = json_array_size(messages);
    enum err_code code;
    if (!messages)
        return err_set(e, ERR_NOMEM, "no memory for the messages");
    code = check_tools(t, messages, e);
    if (code != ERR_OK) {
        json_decref(messages);
        return code;
    }
    if (!continues(input)) {
        code = run(t, input, messages, input->add_generation_prompt, ret, e);
    } else if (json_string_length(json_object_get(json_array_get(messages, n - 1), "content")) >
               0) {
        code = run_continued(t, input, messages, ret, e);
    } else { /* an answer of which nothing is written yet */
        (void)json_array_remove(messages, n - 1);
        code = run(t, input, messages, true, ret, e);
    }
    json_decref(messages);
    return code;
}

enum err_code gw_template_render(const struct gw_template *t, const struct gw_template_input *input,
                                 char **ret_text, size_t *ret_size, struct err *e)
{
    struct buf out = {0};
    size_t size;
    struct err why = {0};
    const uint64_t refused = alloc_refused();
    enum err_code code = render(t, input, &out, &why);
    /* What could not be allocated is a value that is not there, which templates refuse. */
    if (code != ERR_OK && alloc_refused() != refused)
        return err_set(e, ERR_NOMEM, "no memory for the prompt");
    if (code != ERR_OK)
        return err_set(e, code, "%s", why.text);
    out.ceiling = SIZE_MAX;
    char *text = buf_give(&out, &size);
    if (!text) {
        buf_done(&out);
        return err_set(e, ERR_NOMEM, "no memory for the prompt");
    }
    *ret_text = text;
    *ret_size = size;
    return ERR_OK;
}

/* ---- facts ---- */

/* Renders messages given as JSON; true if that works, and the output then. */
static bool probe(const struct gw_template *t, const char *messages, const char *kwargs,
                  bool prompt, struct buf *ret, struct err *e)
{
    struct gw_template_input input = {
        .messages = json_loads(messages, 0, NULL),
        .kwargs = kwargs ? json_loads(kwargs, 0, NULL) : NULL,
        .add_generation_prompt = prompt,
    };
    bool works = input.messages && render(t, &input, ret, e) == ERR_OK;
    json_decref((json_t *)(uintptr_t)input.messages);
    json_decref((json_t *)(uintptr_t)input.kwargs);
    return works;
}

/* True if the messages render and all words (ended by NULL) are in the output. */
static bool probe_has(const struct gw_template *t, const char *messages, const char *const *words)
{
    struct buf out = {0};
    bool has = probe(t, messages, NULL, false, &out, NULL);
    for (size_t i = 0; has && words[i]; i++)
        has = out.size && memmem(out.data, out.size, words[i], strlen(words[i]));
    buf_done(&out);
    return has;
}

static bool probe_thinking_switch(const struct gw_template *t)
{
    static const char question[] = "[{\"role\":\"user\",\"content\":\"q\"}]";
    struct buf on = {0}, off = {0};
    bool differs =
        probe(t, question, "{\"enable_thinking\":true}", true, &on, NULL) &&
        probe(t, question, "{\"enable_thinking\":false}", true, &off, NULL) &&
        (on.size != off.size || (on.size > 0 && memcmp(on.data, off.data, on.size) != 0));
    buf_done(&on);
    buf_done(&off);
    return differs;
}

static bool mentions(const char *text, size_t n, const char *word)
{
    return n > 0 && memmem(text, n, word, strlen(word)) != NULL;
}

static void find_facts(struct gw_template *t, const char *text, size_t n, bool think_tokens)
{
    struct gw_template_facts *f = &t->facts;
    /* While probing, messages go to the template as they are. */
    f->developer_role = f->system_anywhere = f->tool_calls = true;
    bool anywhere = probe_has(t,
                              "[{\"role\":\"system\",\"content\":\"amark\"},"
                              "{\"role\":\"system\",\"content\":\"bmark\"},"
                              "{\"role\":\"user\",\"content\":\"q\"},"
                              "{\"role\":\"assistant\",\"content\":\"a\"},"
                              "{\"role\":\"system\",\"content\":\"cmark\"},"
                              "{\"role\":\"user\",\"content\":\"q\"}]",
                              (const char *const[]){"amark", "bmark", "cmark", NULL});
    /* Many templates write any role's name; only one that names `developer` was meant for it. */
    bool developer = mentions(text, n, "developer") &&
                     probe_has(t,
                               "[{\"role\":\"developer\",\"content\":\"devmark\"},"
                               "{\"role\":\"user\",\"content\":\"q\"}]",
                               (const char *const[]){"devmark", NULL});
    bool tools =
        probe_has(t,
                  "[{\"role\":\"user\",\"content\":\"q\"},"
                  "{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[{\"id\":"
                  "\"call00001\",\"type\":\"function\",\"function\":{\"name\":\"callmark\","
                  "\"arguments\":\"{\\\"argmark\\\":1}\"}}]},"
                  "{\"role\":\"tool\",\"tool_call_id\":\"call00001\",\"name\":\"callmark\","
                  "\"content\":\"resultmark\"}]",
                  (const char *const[]){"callmark", "argmark", "resultmark", NULL});
    f->system_anywhere = anywhere;
    f->developer_role = developer;
    f->tool_calls = tools;
    f->thinking_switch = probe_thinking_switch(t);
    if (think_tokens || (mentions(text, n, "<think>") && mentions(text, n, "</think>"))) {
        f->think_open = "<think>";
        f->think_close = "</think>";
    }
}

/* ---- life ---- */

enum err_code gw_template_compile(const char *text, size_t n, const struct gw_template_model *model,
                                  struct gw_template **ret, struct err *e)
{
    struct gw_template *t;
    struct buf out = {0};
    enum err_code code;

    if (n > MAX_TEMPLATE)
        return err_set(e, ERR_LIMIT, "chat template of %zu bytes; at most %d are read", n,
                       MAX_TEMPLATE);
    t = alloc_zero(ALLOC_MODEL, 1, sizeof *t);
    if (!t)
        return err_set(e, ERR_NOMEM, "no memory for the chat template");
    gw_jinja_run_init(&t->run, MAX_MEMORY, 0, e);
    t->bos =
        alloc_text(ALLOC_MODEL, model->bos ? model->bos : "", model->bos ? strlen(model->bos) : 0);
    t->eos =
        alloc_text(ALLOC_MODEL, model->eos ? model->eos : "", model->eos ? strlen(model->eos) : 0);
    t->tree = t->bos && t->eos ? gw_jinja_parse(&t->run, text, n) : NULL;
    code = t->run.code;
    t->run.err = NULL; /* was the caller's */
    if (code == ERR_OK && !t->tree)
        code = err_set(e, ERR_NOMEM, "no memory for the chat template");
    if (code == ERR_OK &&
        !probe(t, "[{\"role\":\"user\",\"content\":\"askmark\"}]", NULL, true, &out, e))
        code = ERR_UNSUPPORTED;
    else if (code == ERR_OK && !mentions((const char *)out.data, out.size, "askmark"))
        code = err_set(e, ERR_UNSUPPORTED, "the chat template does not write the user's message");
    buf_done(&out);
    if (code != ERR_OK) {
        gw_template_free(t);
        return code;
    }
    find_facts(t, text, n, model->think_tokens);
    *ret = t;
    return ERR_OK;
}

void gw_template_free(struct gw_template *t)
{
    if (!t)
        return;
    gw_jinja_run_done(&t->run);
    alloc_free(t->bos);
    alloc_free(t->eos);
    alloc_free(t);
}

const struct gw_template_facts *gw_template_get_facts(const struct gw_template *t)
{
    return &t->facts;
}

bool gw_template_prompt_opens(const struct gw_template *t, const char *prompt, size_t n)
{
    const char *open = t->facts.think_open;
    while (n > 0 && strchr(" \t\r\n", prompt[n - 1]) && prompt[n - 1] != '\0')
        n--;
    return open && n >= strlen(open) && memcmp(prompt + n - strlen(open), open, strlen(open)) == 0;
}
