/* bench_echo_worker SOCKET MODEL.gguf [TOKENS_A_FRAME [INTERVAL_MS]]: a worker that says it serves
 * MODEL and answers each request with the prompt's own ids, at once or one frame each INTERVAL_MS,
 * so that a benchmark of the gateway measures the gateway. Runs until SIGTERM or SIGINT; prints
 * "ready" when it listens. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_worker.h"
#include "gguf_file.h"
#include "shape.h"

static enum err_code describe(const char *path, struct model_shape *shape,
                              struct proto_welcome *ret, struct err *e)
{
    struct gguf_file *file = NULL;
    enum err_code code = gguf_file_open(path, &file, e);
    if (code == ERR_OK)
        code = shape_from_file(file, shape, e);
    if (code == ERR_OK)
        code = gguf_file_digest(file, ret->file_digest, e);
    if (code == ERR_OK)
        gguf_file_shape_digest(file, shape, ret->shape_digest);
    gguf_file_close(file);
    return code;
}

int main(int argc, char **argv)
{
    struct model_shape shape;
    struct err e = {0};
    sigset_t ends;
    int signal_number;
    if (argc < 3) {
        fprintf(stderr,
                "usage: bench_echo_worker SOCKET MODEL.gguf [TOKENS_A_FRAME [INTERVAL_MS]]\n");
        return 64;
    }
    struct fake_worker_options o = fake_worker_defaults(argv[1]);
    if (describe(argv[2], &shape, &o.welcome, &e) != ERR_OK) {
        fprintf(stderr, "bench_echo_worker: %s\n", e.text);
        return 1;
    }
    o.welcome.model = proto_text_of(shape.name);
    o.welcome.n_ctx = shape.n_ctx_train;
    o.welcome.n_vocab = shape.n_vocab;
    o.welcome.n_layer = shape.n_layer;
    o.welcome.n_expert = shape.n_expert;
    o.welcome.n_expert_used = shape.n_expert_used;
    o.per_frame = argc > 3 ? (uint32_t)atoi(argv[3]) : 1;
    o.interval_ms = argc > 4 ? (uint32_t)atoi(argv[4]) : 0;
    sigemptyset(&ends);
    sigaddset(&ends, SIGTERM);
    sigaddset(&ends, SIGINT);
    sigprocmask(SIG_BLOCK, &ends, NULL); /* before the thread, which inherits it */
    struct fake_worker *w = fake_worker_start(&o);
    printf("ready\n");
    fflush(stdout);
    sigwait(&ends, &signal_number);
    fake_worker_stop(w);
    return 0;
}
