#include "cli_edit.h"

#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <histedit.h>

#include "paths.h"

enum {
    HISTORY_LINES = 1000
};

static char *prompt(EditLine *el)
{
    (void)el;
    return "> ";
}

static void history_open(struct cli_edit *ed)
{
    HistEvent event;
    char state[4096];
    ed->history = history_init();
    if (ed->history == NULL)
        return;
    history(ed->history, &event, H_SETSIZE, HISTORY_LINES);
    history(ed->history, &event, H_SETUNIQUE, 1);
    if (paths_state(state, sizeof state, NULL) == ERR_OK) {
        snprintf(ed->history_path, sizeof ed->history_path, "%s/chat_history", state);
        history(ed->history, &event, H_LOAD, ed->history_path);
    }
    el_set(ed->editor, EL_HIST, history, ed->history);
}

enum err_code cli_edit_open(struct cli_edit *ed, bool editing, struct err *e)
{
    *ed = (struct cli_edit){0};
    if (!editing)
        return ERR_OK;
    /* Without a UTF-8 locale the editor would cut characters into bytes. */
    const char *locale = setlocale(LC_CTYPE, "");
    if (locale == NULL || strstr(locale, "UTF-8") == NULL)
        setlocale(LC_CTYPE, "C.UTF-8");
    ed->editor = el_init("islet", stdin, stdout, stderr);
    if (ed->editor == NULL)
        return err_set(e, ERR_NOMEM, "the line editor cannot start");
    el_set(ed->editor, EL_PROMPT, prompt);
    el_set(ed->editor, EL_EDITOR, "emacs");
    el_set(ed->editor, EL_SETTY, "-d", "-isig", NULL);
    el_set(ed->editor, EL_BIND, "^C", "em-kill-line", NULL); /* forgets what was typed */
    el_set(ed->editor, EL_BIND, "^R", "em-inc-search-prev", NULL);
    history_open(ed);
    return ERR_OK;
}

/* ed->line may be getline's, so it lives on the heap of the C library. */
static const char *line_keep(struct cli_edit *ed, const char *text, size_t n)
{
    if (ed->capacity < n + 1) {
        char *larger = realloc(ed->line, n + 1);
        if (larger == NULL)
            return NULL;
        ed->line = larger;
        ed->capacity = n + 1;
    }
    memcpy(ed->line, text, n);
    ed->line[n] = '\0';
    ed->line[strcspn(ed->line, "\r\n")] = '\0';
    return ed->line;
}

const char *cli_edit_line(struct cli_edit *ed)
{
    HistEvent event;
    int n = 0;
    if (ed->editor == NULL) {
        ssize_t size = getline(&ed->line, &ed->capacity, stdin);
        if (size < 0)
            return NULL;
        ed->line[strcspn(ed->line, "\r\n")] = '\0';
        return ed->line;
    }
    const char *text = el_gets(ed->editor, &n);
    if (text == NULL || n <= 0) {
        putchar('\n');
        return NULL;
    }
    if (ed->history != NULL && n > 1)
        history(ed->history, &event, H_ENTER, text);
    return line_keep(ed, text, (size_t)n);
}

void cli_edit_close(struct cli_edit *ed)
{
    HistEvent event;
    if (ed->history != NULL && ed->history_path[0] != '\0') {
        mode_t before = umask(0077);
        history(ed->history, &event, H_SAVE, ed->history_path);
        umask(before);
    }
    if (ed->history != NULL)
        history_end(ed->history);
    if (ed->editor != NULL)
        el_end(ed->editor);
    free(ed->line); /* getline's */
    *ed = (struct cli_edit){0};
}
