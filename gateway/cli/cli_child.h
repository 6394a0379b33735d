/* One program that `islet up` keeps running: started, its output prefixed line by line, started
 * again with back-off when it dies. Thread: the loop. */
#ifndef ISLET_CLI_CHILD_H
#define ISLET_CLI_CHILD_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include <uv.h>

#include "buf.h"
#include "err.h"

enum {
    CLI_CHILD_MAX_ARGS = 160
};

struct cli_child;
/* A line of its output, without the newline. */
typedef void cli_child_line_fn(void *context, struct cli_child *child, const char *line, size_t n);
/* It ended; `status` as from waitpid. The owner calls cli_child_restart or leaves it. */
typedef void cli_child_exit_fn(void *context, struct cli_child *child, int status);

struct cli_child {
    const char *name; /* "worker" */
    char program[4096];
    const char *argv[CLI_CHILD_MAX_ARGS + 1];
    pid_t pid;           /* 0: not running */
    unsigned early_ends; /* in a row, each within RUN_OK_MS of its start */
    uint64_t backoff_ms, started_ms;
    cli_child_line_fn *on_line;
    cli_child_exit_fn *on_exit;
    void *context;
    uv_loop_t *loop;
    uv_pipe_t output;
    uv_timer_t timer;
    bool output_open, closing;
    struct buf line;
    char chunk[16384];
};

/* Finds `program` beside this executable, else on PATH. ERR_ARGUMENT: nowhere. */
enum err_code cli_child_find(const char *program, char *ret, size_t n, struct err *e)
    __attribute__((warn_unused_result));
/* Of a program that cli_child_find finds; argv is borrowed. */
enum err_code cli_child_init(struct cli_child *c, uv_loop_t *loop, const char *name,
                             const char *program, const char *const *args, unsigned n_args,
                             struct err *e) __attribute__((warn_unused_result));
enum err_code cli_child_start(struct cli_child *c, struct err *e)
    __attribute__((warn_unused_result));
void cli_child_restart(struct cli_child *c); /* after the back-off: 50 ms doubling to 2 s */
void cli_child_signal(struct cli_child *c, int number);
void cli_child_reap(struct cli_child *c);  /* at SIGCHLD */
void cli_child_close(struct cli_child *c); /* handles; the process must have ended */

#endif
