#include "cli_http.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include <jansson.h>
#include <llhttp.h>

#include "cli_server.h"

enum {
    MAX_BODY = 64 << 20,
    MAX_REQUEST = 64 << 20
};

struct exchange {
    const struct cli_http_call *call;
    struct cli_http_response *response;
    struct err *e;
    enum err_code stopped; /* what on_data answered */
    llhttp_t parser;
    struct buf name, value; /* of the header field that is being read */
    bool complete;
};

static int on_field(llhttp_t *p, const char *at, size_t n)
{
    struct exchange *x = p->data;
    if (x->value.size > 0) {
        buf_clear(&x->name);
        buf_clear(&x->value);
    }
    buf_append(&x->name, at, n);
    return 0;
}

static void keep(const struct exchange *x, const char *name, char *to, size_t n)
{
    if (x->name.size == strlen(name) &&
        strncasecmp((const char *)x->name.data, name, x->name.size) == 0)
        snprintf(to, n, "%.*s", (int)x->value.size, (const char *)x->value.data);
}

/* The value may come in pieces: each piece writes the whole so far. */
static int on_value(llhttp_t *p, const char *at, size_t n)
{
    struct exchange *x = p->data;
    struct cli_http_response *r = x->response;
    buf_append(&x->value, at, n);
    if (buf_failed(&x->name) || buf_failed(&x->value))
        return HPE_USER;
    keep(x, "x-islet-seed", r->seed, sizeof r->seed);
    keep(x, "x-request-id", r->request_id, sizeof r->request_id);
    keep(x, "retry-after", r->retry_after, sizeof r->retry_after);
    return 0;
}

static int on_value_complete(llhttp_t *p)
{
    struct exchange *x = p->data;
    buf_clear(&x->name);
    buf_clear(&x->value);
    return 0;
}

static int on_headers(llhttp_t *p)
{
    struct exchange *x = p->data;
    if (p->status_code < 200) /* an interim response: the real one follows */
        return 0;
    x->response->status = p->status_code;
    return 0;
}

static int on_body(llhttp_t *p, const char *at, size_t n)
{
    struct exchange *x = p->data;
    if (x->call->on_data != NULL && x->response->status / 100 == 2) {
        x->stopped = x->call->on_data(x->call->context, at, n, x->e);
        return x->stopped == ERR_OK ? 0 : HPE_USER;
    }
    buf_append(&x->response->body, at, n);
    return buf_failed(&x->response->body) ? HPE_USER : 0;
}

static int on_complete(llhttp_t *p)
{
    struct exchange *x = p->data;
    if (x->response->status == 0)
        return 0;
    x->complete = true;
    return HPE_PAUSED;
}

static void request_write(const struct cli_server *s, const struct cli_http_call *c,
                          struct buf *out)
{
    bool v6 = strchr(s->host, ':') != NULL;
    buf_format(out, "%s %s HTTP/1.1\r\n", c->method, c->path);
    if (s->is_unix)
        buf_text(out, "Host: localhost\r\n");
    else
        buf_format(out, "Host: %s%s%s:%s\r\n", v6 ? "[" : "", s->host, v6 ? "]" : "", s->port);
    buf_text(out, "User-Agent: islet/" ISLET_VERSION "\r\nConnection: close\r\n");
    if (s->key[0] != '\0')
        buf_format(out, "Authorization: Bearer %s\r\n", s->key);
    if (c->body != NULL)
        buf_format(out, "Content-Type: application/json\r\nContent-Length: %zu\r\n", c->body_size);
    buf_text(out, "\r\n");
    if (c->body != NULL)
        buf_append(out, c->body, c->body_size);
}

static enum err_code parse(struct exchange *x, const struct cli_server *s, const char *data,
                           size_t n)
{
    enum llhttp_errno result = llhttp_execute(&x->parser, data, n);
    if (result == HPE_OK || x->complete)
        return ERR_OK;
    if (x->stopped != ERR_OK)
        return x->stopped;
    if (buf_failed(&x->response->body))
        return err_set(x->e, ERR_LIMIT, "%s: the answer is larger than %d bytes", s->name,
                       MAX_BODY);
    return err_set(x->e, ERR_PROTOCOL, "%s does not speak HTTP/1.1 (%s); is it Islet?", s->name,
                   llhttp_errno_name(result));
}

/* One read. The end of the connection is fine only where the response ends with it. */
static enum err_code read_some(struct exchange *x, const struct cli_server *s, int fd)
{
    char data[16384];
    ssize_t n = recv(fd, data, sizeof data, 0);
    if (n > 0)
        return parse(x, s, data, (size_t)n);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return ERR_OK;
    if (n < 0)
        return err_set_os(x->e, ERR_IO, errno, "connection to %s lost", s->name);
    if (llhttp_finish(&x->parser) == HPE_OK && x->complete)
        return ERR_OK;
    if (x->complete)
        return ERR_OK;
    return err_set(x->e, ERR_IO, "%s closed the connection before the answer was complete",
                   s->name);
}

static enum err_code write_some(struct exchange *x, const struct cli_server *s, int fd,
                                struct buf *out)
{
    ssize_t n = send(fd, out->data, out->size, MSG_NOSIGNAL);
    if (n >= 0) {
        buf_drop_front(out, (size_t)n);
        return ERR_OK;
    }
    if (errno == EAGAIN || errno == EINTR)
        return ERR_OK;
    if (errno == EPIPE || errno == ECONNRESET) { /* an early answer may lie there to be read */
        buf_clear(out);
        return ERR_OK;
    }
    return err_set_os(x->e, ERR_IO, errno, "connection to %s lost", s->name);
}

static enum err_code transfer(struct exchange *x, const struct cli_server *s, int fd,
                              struct buf *out)
{
    enum err_code code = ERR_OK;
    while (code == ERR_OK && !x->complete) {
        struct pollfd p[2] = {{.fd = fd, .events = (short)(POLLIN | (out->size > 0 ? POLLOUT : 0))},
                              {.fd = x->call->stop_fd, .events = POLLIN}};
        int n = poll(p, 2, x->call->idle_ms > 0 ? x->call->idle_ms : -1);
        if (n < 0 && errno != EINTR)
            code = err_set_os(x->e, ERR_IO, errno, "poll");
        else if (n == 0)
            code = err_set(x->e, ERR_IO, "%s is silent for %d s; see its log", s->name,
                           x->call->idle_ms / 1000);
        else if (n > 0 && (p[1].revents & POLLIN) != 0)
            code = err_set(x->e, ERR_CANCELLED, "interrupted");
        else if (n > 0 && (p[0].revents & POLLOUT) != 0)
            code = write_some(x, s, fd, out);
        else if (n > 0 && p[0].revents != 0)
            code = read_some(x, s, fd);
    }
    return code;
}

enum err_code cli_http_send(const struct cli_server *server, const struct cli_http_call *call,
                            struct cli_http_response *ret, struct err *e)
{
    struct exchange x = {
        .call = call, .response = ret, .e = e, .name = BUF_INIT(16384), .value = BUF_INIT(16384)};
    struct buf out = BUF_INIT(MAX_REQUEST);
    llhttp_settings_t settings;
    int fd = -1;
    *ret = (struct cli_http_response){.body = BUF_INIT(MAX_BODY)};
    llhttp_settings_init(&settings);
    settings.on_header_field = on_field;
    settings.on_header_value = on_value;
    settings.on_header_value_complete = on_value_complete;
    settings.on_headers_complete = on_headers;
    settings.on_body = on_body;
    settings.on_message_complete = on_complete;
    llhttp_init(&x.parser, HTTP_RESPONSE, &settings);
    x.parser.data = &x;

    enum err_code code = cli_server_connect(server, &fd, e);
    if (code != ERR_OK)
        goto out;
    request_write(server, call, &out);
    if (buf_failed(&out)) {
        code = err_set(e, ERR_LIMIT, "the request is larger than %d bytes", MAX_REQUEST);
        goto out;
    }
    code = transfer(&x, server, fd, &out);
out:
    if (fd >= 0)
        close(fd);
    buf_done(&out);
    buf_done(&x.name);
    buf_done(&x.value);
    return code;
}

void cli_http_response_done(struct cli_http_response *r)
{
    buf_done(&r->body);
}

enum err_code cli_http_error(const struct cli_server *server, const struct cli_http_response *r,
                             struct err *e)
{
    enum err_code code = r->status == 503 ? ERR_BUSY : ERR_ARGUMENT;
    json_t *root = json_loadb((const char *)r->body.data, r->body.size, 0, NULL);
    const char *text =
        json_string_value(json_object_get(json_object_get(root, "error"), "message"));
    if (r->status == 401)
        err_set(e, code, "%s wants a key: set ISLET_API_KEY", server->name);
    else if (text != NULL)
        err_set(e, code, "%s", text);
    else
        err_set(e, code, "%s answered with status %d", server->name, r->status);
    json_decref(root);
    return code;
}
