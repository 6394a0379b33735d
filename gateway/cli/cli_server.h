/* Where the server is, and the key to show it. */
#ifndef ISLET_CLI_SERVER_H
#define ISLET_CLI_SERVER_H

#include <stdbool.h>

#include "err.h"

struct cli_options;
struct settings;

struct cli_server {
    bool is_unix;
    char path[108]; /* Unix socket */
    char host[256], port[8];
    char name[300]; /* for messages: "http://127.0.0.1:8484" or "unix:/run/islet/http.sock" */
    char key[512];  /* Bearer key, or "" */
};

/* --server, else $ISLET_SERVER, else the settings: server.socket if something listens there, else
 * the first address of server.listen. The key is $ISLET_API_KEY, else the first line of
 * server.api_key_file. */
enum err_code cli_server_find(const struct cli_options *o, struct cli_server *ret, struct err *e)
    __attribute__((warn_unused_result));
/* "http://host[:port][/v1]" or "unix:/path". */
enum err_code cli_server_parse(const char *text, struct cli_server *ret, struct err *e)
    __attribute__((warn_unused_result));
/* The first TCP address of server.listen; ERR_ARGUMENT if there is none. */
enum err_code cli_server_of_listen(const struct settings *s, struct cli_server *ret, struct err *e)
    __attribute__((warn_unused_result));
/* The Unix socket of the settings; ERR_ARGUMENT if server.socket is off. */
enum err_code cli_server_of_socket(const struct settings *s, struct cli_server *ret, struct err *e)
    __attribute__((warn_unused_result));
/* Fills in the key: $ISLET_API_KEY, else the first line of the settings' server.api_key_file;
 * settings may be NULL. */
void cli_server_key(struct cli_server *server, const struct settings *settings);
/* A connected, non-blocking socket; waits at most 5 s. ERR_IO says how to start a server. */
enum err_code cli_server_connect(const struct cli_server *s, int *ret_fd, struct err *e)
    __attribute__((warn_unused_result));

#endif
