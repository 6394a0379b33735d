/* ask SOCKET ID...: sends token ids to a running isletd and prints the ids that it generates. */
#include <stdio.h>
#include <stdlib.h>

#include "proto_client.h"

int main(int argc, char **argv)
{
    struct err e = {0};
    struct proto_client *c = NULL;
    struct proto_event event = {0};
    uint32_t tokens[1024], n = 0;
    uint64_t id;
    for (int i = 2; i < argc && n < 1024; i++)
        tokens[n++] = (uint32_t)strtoul(argv[i], NULL, 10);
    struct proto_run run = {
        .tokens = tokens, .n_tokens = n, .n_prompt = n, .max_new = 32, .top_p = 1, .repeat = 1};
    int failed = argc < 3 || proto_client_connect(argv[1], "ask", &c, &e) ||
                 proto_client_run(c, &run, &id, &e);
    while (!failed && event.kind != PROTO_EVENT_DONE) {
        failed = proto_client_wait(c, -1, &event, &e) < 0 || event.kind == PROTO_EVENT_ERROR;
        for (unsigned i = 0; !failed && event.kind == PROTO_EVENT_TOKENS && i < event.tokens.n; i++)
            printf("%u%c", event.tokens.tokens[i].id, i + 1 < event.tokens.n ? ' ' : '\n');
    }
    if (failed && event.kind == PROTO_EVENT_ERROR)
        fprintf(stderr, "ask: %.*s\n", event.error.text.size, event.error.text.data);
    else if (failed)
        fprintf(stderr, "ask: %s\n", argc < 3 ? "usage: ask SOCKET ID..." : e.text);
    proto_client_close(c);
    return failed;
}
