/* Lines from the terminal with editing and history (libedit), or plainly from a file or pipe. */
#ifndef ISLET_CLI_EDIT_H
#define ISLET_CLI_EDIT_H

#include <stdbool.h>
#include <stddef.h>

#include "err.h"

struct editline;
struct history;

struct cli_edit {
    struct editline *editor; /* NULL: plain lines */
    struct history *history;
    char history_path[4200];
    char *line; /* the line handed out last */
    size_t capacity;
};

enum err_code cli_edit_open(struct cli_edit *ed, bool editing, struct err *e)
    __attribute__((warn_unused_result));
/* Lends the next line without its end, valid until the next call; NULL at Ctrl-D or the end. */
const char *cli_edit_line(struct cli_edit *ed);
void cli_edit_close(struct cli_edit *ed); /* saves the history */

#endif
