#include "cli_term.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

void cli_term_init(struct cli_term *t)
{
    const char *no_color = getenv("NO_COLOR"), *kind = getenv("TERM");
    bool colour =
        (no_color == NULL || no_color[0] == '\0') && kind != NULL && strcmp(kind, "dumb") != 0;
    struct winsize size = {0};
    *t = (struct cli_term){.out_tty = isatty(STDOUT_FILENO) == 1,
                           .err_tty = isatty(STDERR_FILENO) == 1,
                           .in_tty = isatty(STDIN_FILENO) == 1,
                           .columns = 80};
    t->out_colour = colour && t->out_tty;
    t->err_colour = colour && t->err_tty;
    if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col >= 20)
        t->columns = size.ws_col;
}

static const char *style_text(enum cli_term_style style)
{
    static const char *const texts[] = {[CLI_TERM_PLAIN] = "\033[0m",
                                        [CLI_TERM_DIM] = "\033[2m",
                                        [CLI_TERM_BOLD] = "\033[1m",
                                        [CLI_TERM_RED] = "\033[31m",
                                        [CLI_TERM_GREEN] = "\033[32m"};
    return texts[style];
}

const char *cli_term_out(const struct cli_term *t, enum cli_term_style style)
{
    return t->out_colour ? style_text(style) : "";
}

const char *cli_term_err(const struct cli_term *t, enum cli_term_style style)
{
    return t->err_colour ? style_text(style) : "";
}

void cli_term_progress(struct cli_term *t, const char *label, int percent)
{
    enum {
        BAR = 24
    };
    char bar[BAR + 1];
    if (!t->err_tty)
        return;
    t->progress_shown = true;
    if (percent < 0) {
        fprintf(stderr, "\r\033[K%s%.*s%s", cli_term_err(t, CLI_TERM_DIM), (int)t->columns - 1,
                label, cli_term_err(t, CLI_TERM_PLAIN));
    } else {
        for (int i = 0; i < BAR; i++)
            bar[i] = i * 100 < percent * BAR ? '#' : '.';
        bar[BAR] = '\0';
        fprintf(stderr, "\r\033[K%s%s [%s] %3d %%%s", cli_term_err(t, CLI_TERM_DIM), label, bar,
                percent, cli_term_err(t, CLI_TERM_PLAIN));
    }
    fflush(stderr);
}

void cli_term_progress_clear(struct cli_term *t)
{
    if (!t->progress_shown)
        return;
    fputs("\r\033[K", stderr);
    fflush(stderr);
    t->progress_shown = false;
}
