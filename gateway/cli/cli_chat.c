#include "cli_chat.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include <jansson.h>

#include "buf.h"
#include "cli_answer.h"
#include "cli_edit.h"
#include "cli_options.h"
#include "cli_server.h"
#include "cli_stop.h"
#include "cli_term.h"
#include "utf8.h"

enum {
    MAX_ANSWER = 16 << 20,
    EXIT_NO_SERVER = 69
};

struct chat {
    const struct cli_options *o;
    struct cli_server server;
    struct cli_term term;
    struct cli_edit edit;
    json_t *messages;
    struct buf answer; /* text of the answer that comes now, thoughts left out */
    struct cli_answer last;
    int stop_fd;
    bool in_reasoning;
};

enum outcome {
    GO_ON,
    END
};

struct command {
    const char *name, *help;
    enum outcome (*run)(struct chat *c, const char *argument);
};

static enum outcome help(struct chat *c, const char *argument);

static enum outcome clear(struct chat *c, const char *argument)
{
    (void)argument;
    json_t *first = json_array_get(c->messages, 0);
    const char *role = json_string_value(json_object_get(first, "role"));
    size_t keep = role != NULL && strcmp(role, "system") == 0 ? 1 : 0;
    while (json_array_size(c->messages) > keep)
        json_array_remove(c->messages, json_array_size(c->messages) - 1);
    puts("A new conversation.");
    return GO_ON;
}

static enum outcome set_system(struct chat *c, const char *argument)
{
    json_array_clear(c->messages);
    if (argument[0] != '\0')
        json_array_append_new(c->messages,
                              json_pack("{s:s, s:s}", "role", "system", "content", argument));
    printf("System message %s; a new conversation.\n", argument[0] != '\0' ? "set" : "removed");
    return GO_ON;
}

static enum outcome stats(struct chat *c, const char *argument)
{
    char figures[256];
    (void)argument;
    cli_answer_figures(&c->last, figures, sizeof figures);
    printf("%s; %zu messages\n", figures, json_array_size(c->messages));
    return GO_ON;
}

static enum outcome leave(struct chat *c, const char *argument)
{
    (void)c;
    (void)argument;
    return END;
}

static const struct command commands[] = {
    {"/help", "this list", help},
    {"/clear", "begin a new conversation", clear},
    {"/system", "TEXT: another system message, and a new conversation", set_system},
    {"/stats", "figures of the last answer", stats},
    {"/exit", "end (or Ctrl-D)", leave},
};

static enum outcome help(struct chat *c, const char *argument)
{
    (void)c;
    (void)argument;
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++)
        printf("  %-8s %s\n", commands[i].name, commands[i].help);
    return GO_ON;
}

static enum outcome command_run(struct chat *c, const char *line)
{
    size_t n = strcspn(line, " \t");
    const char *argument = line + n + strspn(line + n, " \t");
    for (size_t i = 0; i < sizeof commands / sizeof commands[0]; i++)
        if (strlen(commands[i].name) == n && memcmp(commands[i].name, line, n) == 0)
            return commands[i].run(c, argument);
    printf("Unknown command %.*s; /help lists them.\n", (int)n, line);
    return GO_ON;
}

static void on_text(void *context, const char *text, size_t n, bool is_reasoning)
{
    struct chat *c = context;
    cli_term_progress_clear(&c->term);
    if (is_reasoning != c->in_reasoning) {
        if (!is_reasoning)
            fputs("\n\n", stdout);
        fputs(cli_term_out(&c->term, is_reasoning ? CLI_TERM_DIM : CLI_TERM_PLAIN), stdout);
        c->in_reasoning = is_reasoning;
    }
    fwrite(text, 1, n, stdout);
    fflush(stdout);
    if (!is_reasoning)
        buf_append(&c->answer, text, n);
}

/* Keeps what came of the answer, or takes the question back if nothing did. */
static void turn_keep(struct chat *c)
{
    size_t n = json_array_size(c->messages);
    if (c->answer.size == 0) {
        json_array_remove(c->messages, n - 1);
        return;
    }
    json_t *text = json_stringn((const char *)c->answer.data, c->answer.size);
    json_array_append_new(c->messages,
                          json_pack("{s:s, s:o}", "role", "assistant", "content", text));
}

static void ask(struct chat *c, const char *line)
{
    struct err e = {0};
    json_array_append_new(c->messages, json_pack("{s:s, s:s}", "role", "user", "content", line));
    json_t *body = cli_answer_body(c->o, c->messages, NULL);
    if (body == NULL) {
        fputs("islet chat: no memory\n", stderr);
        return;
    }
    buf_clear(&c->answer);
    c->in_reasoning = false;
    cli_stop_take(c->stop_fd);
    cli_term_progress(&c->term, "reading the prompt", -1);
    enum err_code code = cli_answer_ask(&c->server, body, c->stop_fd, on_text, c, &c->last, &e);
    json_decref(body);
    cli_term_progress_clear(&c->term);
    fputs(cli_term_out(&c->term, CLI_TERM_PLAIN), stdout);
    fputs(code == ERR_CANCELLED ? " (stopped)\n" : "\n", stdout);
    fflush(stdout);
    if (code != ERR_OK && code != ERR_CANCELLED)
        fprintf(stderr, "%sislet chat: %s%s\n", cli_term_err(&c->term, CLI_TERM_RED), e.text,
                cli_term_err(&c->term, CLI_TERM_PLAIN));
    turn_keep(c);
}

static void converse(struct chat *c)
{
    const char *line;
    enum outcome next = GO_ON;
    while (next == GO_ON && (line = cli_edit_line(&c->edit)) != NULL) {
        line += strspn(line, " \t");
        if (line[0] == '\0')
            continue;
        if (!utf8_valid(line, strlen(line)))
            puts("The line is not valid UTF-8.");
        else if (line[0] == '/')
            next = command_run(c, line);
        else
            ask(c, line);
        if (cli_stop_take(c->stop_fd) == SIGTERM)
            next = END;
    }
}

static enum err_code start(struct chat *c, struct err *e)
{
    int fd;
    enum err_code code = cli_server_find(c->o, &c->server, e);
    if (code == ERR_OK)
        code = cli_server_connect(&c->server, &fd, e);
    if (code != ERR_OK)
        return code;
    close(fd);
    c->messages = json_array();
    if (c->messages == NULL)
        return err_set(e, ERR_NOMEM, "no memory");
    if (c->o->system != NULL)
        json_array_append_new(c->messages,
                              json_pack("{s:s, s:s}", "role", "system", "content", c->o->system));
    code = cli_stop_open(&c->stop_fd, e);
    return code == ERR_OK ? cli_edit_open(&c->edit, c->term.in_tty && c->term.out_tty, e) : code;
}

int cli_chat_main(const struct cli_options *o)
{
    struct chat c = {.o = o, .stop_fd = -1, .answer = BUF_INIT(MAX_ANSWER)};
    struct err e = {0};
    int status = 0;
    cli_term_init(&c.term);
    if (start(&c, &e) == ERR_OK) {
        if (c.term.in_tty)
            printf("Talking with %s. /help lists commands, Ctrl-D ends.\n", c.server.name);
        converse(&c);
    } else {
        fprintf(stderr, "islet chat: %s\n", e.text);
        status = EXIT_NO_SERVER;
    }
    cli_edit_close(&c.edit);
    cli_stop_close(c.stop_fd);
    json_decref(c.messages);
    buf_done(&c.answer);
    return status;
}
