#include "cli_figures.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli_http.h"
#include "cli_server.h"

/* The route does not wait for the worker. */
enum {
    PATIENCE_MS = 5000
};

static enum err_code get(const struct cli_server *server, const char *path,
                         struct cli_http_response *ret, struct err *e)
{
    struct cli_http_call call = {
        .method = "GET", .path = path, .stop_fd = -1, .idle_ms = PATIENCE_MS};
    return cli_http_send(server, &call, ret, e);
}

enum err_code cli_figures_status(const struct cli_server *server, json_t **ret, char **ret_text,
                                 struct err *e)
{
    struct cli_http_response response;
    enum err_code code = get(server, "/status", &response, e);
    json_t *root = NULL;
    if (code == ERR_OK && response.status != 200)
        code = cli_http_error(server, &response, e);
    if (code != ERR_OK)
        goto out;
    root = json_loadb((const char *)response.body.data, response.body.size, 0, NULL);
    if (!json_is_object(root)) {
        code = err_set(e, ERR_PROTOCOL, "%s: /status is not a JSON object; is it Islet?",
                       server->name);
        json_decref(root);
        goto out;
    }
    if (ret_text != NULL)
        *ret_text = strndup((const char *)response.body.data, response.body.size);
    *ret = root;
out:
    cli_http_response_done(&response);
    return code;
}

static const json_t *at(const json_t *root, const char *path)
{
    char key[64];
    while (root != NULL && *path != '\0') {
        size_t n = strcspn(path, ".");
        if (n >= sizeof key)
            return NULL;
        snprintf(key, sizeof key, "%.*s", (int)n, path);
        root = json_object_get(root, key);
        path += n + (path[n] == '.');
    }
    return root;
}

double cli_figures_number(const json_t *root, const char *path)
{
    return json_number_value(at(root, path));
}

const char *cli_figures_text(const json_t *root, const char *path)
{
    const char *text = json_string_value(at(root, path));
    return text != NULL ? text : "";
}

bool cli_figures_is_serving(const json_t *root)
{
    return strcmp(cli_figures_text(root, "state"), "serving") == 0;
}
