/* The worker's loop thread: listener, connections, signals, reload, drain, systemd's
 * notifications. It owns the engine. */
#ifndef ISLET_WORKER_LOOP_H
#define ISLET_WORKER_LOOP_H

#include "err.h"

struct settings;

struct worker_loop_options {
    const char *config;      /* --config, or NULL */
    const char *const *sets; /* --set, each "section.key=value" */
    unsigned n_sets;
    int inherited_fd;    /* the listening socket, lent; -1: the loop binds its own */
    const char *trouble; /* why the settings cannot be used, or NULL: see below */
};

enum {
    WORKER_EXIT_USAGE = 64,
    WORKER_EXIT_GPU = 70, /* the GPU is lost to this process: start another one */
    WORKER_EXIT_BIND = 71,
    WORKER_EXIT_RUNNING = 75,
    WORKER_EXIT_CONFIG = 78,
    WORKER_LOOP_AGAIN = -1
};

/* Sets up the log as the settings say. */
void worker_loop_setup_log(const struct settings *s);

/* Serves until it is asked to stop. Takes the settings. Returns the exit status.
 *
 * With `trouble` it loads nothing and tells each client that it failed, and why: a process that ends
 * while a client waits at its inherited socket would be started over and over. SIGHUP then returns
 * WORKER_LOOP_AGAIN: read the settings again and call once more. */
int worker_loop_run(struct settings *settings, const struct worker_loop_options *options);

#endif
