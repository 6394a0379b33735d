/* /status of a server, read once. */
#ifndef ISLET_CLI_FIGURES_H
#define ISLET_CLI_FIGURES_H

#include <stdbool.h>

#include <jansson.h>

#include "err.h"

struct cli_server;

/* Gives the object of /status (json_decref) and optionally its text (free). */
enum err_code cli_figures_status(const struct cli_server *server, json_t **ret, char **ret_text,
                                 struct err *e) __attribute__((warn_unused_result));

bool cli_figures_is_serving(const json_t *root);

/* Value at a path like "worker.kv_pages_used"; 0 or "" where it is missing. */
double cli_figures_number(const json_t *root, const char *path);
const char *cli_figures_text(const json_t *root, const char *path);

#endif
