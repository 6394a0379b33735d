/* What the terminal can do, and the one line of progress on it. Colour only on a terminal and
 * without NO_COLOR. */
#ifndef ISLET_CLI_TERM_H
#define ISLET_CLI_TERM_H

#include <stdbool.h>

struct cli_term {
    bool out_tty, err_tty, in_tty;
    bool out_colour, err_colour;
    unsigned columns;
    bool progress_shown;
};

enum cli_term_style {
    CLI_TERM_PLAIN,
    CLI_TERM_DIM,
    CLI_TERM_BOLD,
    CLI_TERM_RED,
    CLI_TERM_GREEN
};

void cli_term_init(struct cli_term *t);
/* Escape sequence that begins the style, or "" where there is no colour; CLI_TERM_PLAIN ends it. */
const char *cli_term_out(const struct cli_term *t, enum cli_term_style style);
const char *cli_term_err(const struct cli_term *t, enum cli_term_style style);
/* Replaces the progress line on standard error, if that is a terminal: a bar for percent 0..100,
 * the label alone for percent < 0. */
void cli_term_progress(struct cli_term *t, const char *label, int percent);
void cli_term_progress_clear(struct cli_term *t);

#endif
