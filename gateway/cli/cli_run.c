#include "cli_run.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "buf.h"
#include "cli_answer.h"
#include "cli_options.h"
#include "cli_private.h"
#include "cli_server.h"
#include "cli_stop.h"
#include "cli_term.h"
#include "utf8.h"

enum {
    MAX_PROMPT = 16 << 20,
    EXIT_USAGE = 2,
    EXIT_NO_SERVER = 69,
    EXIT_INTERRUPTED = 130
};

struct run {
    struct cli_term term;
    bool in_reasoning, wrote;
    char last; /* last byte written */
};

static void on_text(void *context, const char *text, size_t n, bool is_reasoning)
{
    struct run *r = context;
    cli_term_progress_clear(&r->term);
    if (is_reasoning != r->in_reasoning) {
        if (!is_reasoning && r->wrote)
            fputs("\n\n", stdout);
        fputs(cli_term_out(&r->term, is_reasoning ? CLI_TERM_DIM : CLI_TERM_PLAIN), stdout);
        r->in_reasoning = is_reasoning;
    }
    fwrite(text, 1, n, stdout);
    fflush(stdout);
    r->wrote = true;
    r->last = text[n - 1];
}

static enum err_code stdin_read(struct buf *out, struct err *e)
{
    ssize_t n = 1;
    while (n > 0 && !buf_failed(out)) {
        uint8_t *room = buf_room(out, 65536);
        if (room == NULL)
            break;
        n = read(STDIN_FILENO, room, 65536);
        if (n < 0 && errno == EINTR) {
            n = 1;
            continue;
        }
        if (n < 0)
            return err_set_os(e, ERR_IO, errno, "standard input");
        buf_commit(out, (size_t)n);
    }
    return ERR_OK;
}

static enum err_code prompt_read(const struct cli_options *o, const struct cli_term *t,
                                 struct buf *out, struct err *e)
{
    bool dash = o->n_words == 1 && strcmp(o->words[0], "-") == 0;
    if (o->n_words == 0 && t->in_tty)
        return err_set(e, ERR_ARGUMENT, "the prompt is missing: islet run \"What is ...?\"");
    if (o->n_words == 0 || dash) {
        enum err_code code = stdin_read(out, e);
        if (code != ERR_OK)
            return code;
        if (!o->raw && out->size > 0 && out->data[out->size - 1] == '\n')
            out->size--;
    } else {
        for (unsigned i = 0; i < o->n_words; i++)
            buf_format(out, "%s%s", i > 0 ? " " : "", o->words[i]);
    }
    if (buf_failed(out))
        return err_set(e, ERR_LIMIT, "the prompt is larger than %d bytes", MAX_PROMPT);
    if (!utf8_valid(out->data, out->size))
        return err_set(e, ERR_ARGUMENT, "the prompt is not valid UTF-8");
    return ERR_OK;
}

static json_t *body_make(const struct cli_options *o, const struct buf *prompt)
{
    json_t *text = json_stringn((const char *)prompt->data, prompt->size);
    json_t *body = NULL;
    if (o->raw) {
        body = cli_answer_body(o, NULL, "");
        if (body != NULL && json_object_set(body, "prompt", text) != 0) {
            json_decref(body);
            body = NULL;
        }
    } else {
        json_t *messages = json_array();
        if (o->system != NULL)
            json_array_append_new(messages,
                                  json_pack("{s:s, s:s}", "role", "system", "content", o->system));
        json_array_append_new(messages, json_pack("{s:s, s:O}", "role", "user", "content", text));
        body = cli_answer_body(o, messages, NULL);
        json_decref(messages);
    }
    json_decref(text);
    return body;
}

static void finish_print(struct run *r, const struct cli_options *o, const struct cli_answer *a)
{
    char figures[256];
    cli_term_progress_clear(&r->term);
    if (r->in_reasoning)
        fputs(cli_term_out(&r->term, CLI_TERM_PLAIN), stdout);
    /* A raw completion in a file is the text alone, to the byte. */
    if (r->wrote && (r->term.out_tty || !o->raw) && r->last != '\n')
        putchar('\n');
    fflush(stdout);
    if (o->quiet || a->tokens == 0)
        return;
    cli_answer_figures(a, figures, sizeof figures);
    fprintf(stderr, "%s[%s]%s\n", cli_term_err(&r->term, CLI_TERM_DIM), figures,
            cli_term_err(&r->term, CLI_TERM_PLAIN));
}

static int exit_status(enum err_code code, bool reached)
{
    if (code == ERR_OK)
        return 0;
    if (code == ERR_CANCELLED)
        return EXIT_INTERRUPTED;
    return reached ? 1 : EXIT_NO_SERVER;
}

static enum err_code server_have(const struct cli_options *o, struct run *r, int stop_fd,
                                 struct cli_private *own, struct cli_server *ret, struct err *e)
{
    int fd;
    if (o->model != NULL && o->server == NULL) {
        cli_term_progress(&r->term, "loading the model", -1);
        enum err_code code = cli_private_start(own, o, stop_fd, e);
        *ret = own->server;
        return code;
    }
    enum err_code code = cli_server_find(o, ret, e);
    if (code == ERR_OK)
        code = cli_server_connect(ret, &fd, e);
    if (code == ERR_OK)
        close(fd);
    return code;
}

int cli_run_main(const struct cli_options *o)
{
    struct run r = {0};
    struct err e = {0};
    struct cli_server server = {0};
    struct cli_private own = {0};
    struct cli_answer answer = {0};
    struct buf prompt = BUF_INIT(MAX_PROMPT);
    json_t *body = NULL;
    int stop_fd = -1, status = EXIT_USAGE;
    cli_term_init(&r.term);
    if (prompt_read(o, &r.term, &prompt, &e) != ERR_OK)
        goto out;
    body = body_make(o, &prompt);
    enum err_code code = body != NULL ? ERR_OK : err_set(&e, ERR_NOMEM, "no memory");
    if (code == ERR_OK)
        code = cli_stop_open(&stop_fd, &e);
    if (code == ERR_OK)
        code = server_have(o, &r, stop_fd, &own, &server, &e);
    bool reached = code == ERR_OK;
    if (reached) {
        cli_term_progress(&r.term, "reading the prompt", -1);
        code = cli_answer_ask(&server, body, stop_fd, on_text, &r, &answer, &e);
        finish_print(&r, o, &answer);
    }
    status = exit_status(code, reached);
out:
    cli_term_progress_clear(&r.term);
    if (status != 0 && e.code != ERR_CANCELLED)
        fprintf(stderr, "islet run: %s\n", e.text);
    cli_private_stop(&own);
    cli_stop_close(stop_fd);
    json_decref(body);
    buf_done(&prompt);
    return status;
}
