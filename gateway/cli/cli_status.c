#include "cli_status.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "cli_figures.h"
#include "cli_options.h"
#include "cli_server.h"
#include "cli_term.h"
#include "units.h"

enum {
    EXIT_NO_SERVER = 69
};

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

/* The unit stands in the name; figures are shown so that people can read them. */
static void value_print(const char *name, const json_t *value)
{
    if (json_is_string(value)) {
        printf("%s\n", json_string_value(value));
    } else if (json_is_boolean(value)) {
        puts(json_is_true(value) ? "yes" : "no");
    } else if (json_is_integer(value)) {
        json_int_t n = json_integer_value(value);
        if (n > 0 && (ends_with(name, "_bytes") || ends_with(name, "_bytes_total")))
            printf("%s\n", units_bytes((uint64_t)n).s);
        else if (n > 0 && ends_with(name, "_ms"))
            printf("%s\n", units_ms((uint64_t)n).s);
        else
            printf("%lld\n", (long long)n);
    } else if (json_is_real(value)) {
        printf("%.3g\n", json_real_value(value));
    } else {
        puts("-");
    }
}

static void object_print(const struct cli_term *t, const char *path, const json_t *object)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)object, key, value)
    {
        if (json_is_object(value) || json_is_array(value))
            continue;
        printf("  %-28s ", key);
        value_print(key, value);
    }
    json_object_foreach((json_t *)object, key, value)
    {
        char deeper[128];
        if (!json_is_object(value))
            continue;
        snprintf(deeper, sizeof deeper, "%s%s%s", path, path[0] != '\0' ? "." : "", key);
        printf("%s%s%s\n", cli_term_out(t, CLI_TERM_BOLD), deeper, cli_term_out(t, CLI_TERM_PLAIN));
        object_print(t, deeper, value);
    }
}

int cli_status_main(const struct cli_options *o)
{
    struct cli_server server;
    struct cli_term term;
    struct err e = {0};
    json_t *root = NULL;
    char *text = NULL;
    cli_term_init(&term);
    if (cli_server_find(o, &server, &e) != ERR_OK ||
        cli_figures_status(&server, &root, &text, &e) != ERR_OK) {
        fprintf(stderr, "islet status: %s\n", e.text);
        return e.code == ERR_IO ? EXIT_NO_SERVER : 1;
    }
    bool ok = cli_figures_is_serving(root);
    if (o->json) {
        printf("%s%s", text, text[0] != '\0' && text[strlen(text) - 1] == '\n' ? "" : "\n");
    } else {
        const char *reason = cli_figures_text(root, "reason");
        printf("%s%s%s at %s%s%s\n", cli_term_out(&term, ok ? CLI_TERM_GREEN : CLI_TERM_RED),
               cli_figures_text(root, "state"), cli_term_out(&term, CLI_TERM_PLAIN), server.name,
               reason[0] != '\0' ? ": " : "", reason);
        object_print(&term, "", root);
    }
    json_decref(root);
    free(text);
    return ok ? 0 : 1;
}
