#include "cli_plan.h"

#include <errno.h>
#include <stdio.h>
#include <unistd.h>

#include "cli_child.h"
#include "cli_options.h"

enum {
    EXIT_SYSTEM = 71,
    EXIT_CONFIG = 78
};

/* The worker alone knows the sizes: this process becomes `isletd --plan`. */
int cli_plan_main(const struct cli_options *o)
{
    char program[4096], model_set[4200];
    const char *argv[CLI_CHILD_MAX_ARGS + 1] = {program, "--plan"};
    unsigned n = 2;
    struct err e = {0};
    if (cli_child_find("isletd", program, sizeof program, &e) != ERR_OK) {
        fprintf(stderr, "islet plan: %s\n", e.text);
        return EXIT_SYSTEM;
    }
    if (o->json)
        argv[n++] = "--json";
    if (o->config != NULL) {
        argv[n++] = "--config";
        argv[n++] = o->config;
    }
    for (unsigned i = 0; i < o->n_sets; i++) {
        argv[n++] = "--set";
        argv[n++] = o->sets[i];
    }
    if (o->model != NULL) {
        const int used = snprintf(model_set, sizeof model_set, "model.path=%s", o->model);
        if (used < 0 || (size_t)used >= sizeof model_set) {
            fputs("islet plan: --model: the path is longer than 4,096 bytes\n", stderr);
            return EXIT_CONFIG;
        }
        argv[n++] = "--set";
        argv[n++] = model_set;
    }
    /* argv's strings are ours to lend; execv's signature only lacks the const. */
    execv(program, (char *const *)argv);
    (void)err_set_os(&e, ERR_IO, errno, "cannot start %s", program);
    fprintf(stderr, "islet plan: %s\n", e.text);
    return EXIT_SYSTEM;
}
