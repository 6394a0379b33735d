#include "gw_route.h"

#include <string.h>

static int hex(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static bool unreserved(uint8_t c)
{
    return (c >= '0' && c <= '9') || ((c | 0x20) >= 'a' && (c | 0x20) <= 'z') ||
           (c != 0 && strchr("-._~", c) != NULL);
}

/* Copies the path, decoding the escapes of unreserved characters, or with `all` every escape.
 * False: a bad escape. */
static bool decode(struct gw_http_text path, bool all, struct buf *out)
{
    for (size_t i = 0; i < path.n; i++) {
        if (path.p[i] != '%') {
            buf_byte(out, (uint8_t)path.p[i]);
            continue;
        }
        int high = path.n - i > 2 ? hex(path.p[i + 1]) : -1;
        int low = path.n - i > 2 ? hex(path.p[i + 2]) : -1;
        int byte = high * 16 + low;
        if (high < 0 || low < 0 || byte == 0)
            return false;
        if (all || unreserved((uint8_t)byte))
            buf_byte(out, (uint8_t)byte);
        else
            buf_append(out, path.p + i, 3);
        i += 2;
    }
    return true;
}

static const struct gw_route *find_row(const struct gw_routes *routes, struct gw_http_text path,
                                       size_t *ret_prefix)
{
    for (size_t i = 0; i < routes->n_rows; i++)
        if (gw_http_text_is(path, routes->rows[i].path))
            return &routes->rows[i];
    for (size_t i = 0; i < routes->n_rows; i++) {
        const char *brace = strchr(routes->rows[i].path, '{');
        size_t n = brace != NULL ? (size_t)(brace - routes->rows[i].path) : 0;
        if (brace != NULL && path.n > n && memcmp(path.p, routes->rows[i].path, n) == 0) {
            *ret_prefix = n;
            return &routes->rows[i];
        }
    }
    return NULL;
}

enum gw_route_result gw_route_find(const struct gw_routes *routes, struct gw_http_text path,
                                   const struct gw_route **ret, struct buf *capture)
{
    struct buf plain = BUF_INIT(SIZE_MAX);
    enum gw_route_result result = GW_ROUTE_BAD_ESCAPE;
    if (!decode(path, false, &plain))
        goto out;
    result = GW_ROUTE_NO_MEMORY;
    if (buf_failed(&plain))
        goto out;
    struct gw_http_text text = {(const char *)plain.data, plain.size};
    if (text.n > 1 && text.p[text.n - 1] == '/')
        text.n--;
    size_t prefix = 0;
    const struct gw_route *row = find_row(routes, text, &prefix);
    result = GW_ROUTE_UNKNOWN;
    if (row == NULL)
        goto out;
    if (prefix > 0)
        (void)decode((struct gw_http_text){text.p + prefix, text.n - prefix}, true, capture);
    result = buf_failed(capture) ? GW_ROUTE_NO_MEMORY : GW_ROUTE_FOUND;
    *ret = row;
out:
    buf_done(&plain);
    return result;
}

const char *gw_route_allow(const struct gw_route *route)
{
    switch (route->methods) {
    case GW_ROUTE_GET:
        return "GET, HEAD, OPTIONS";
    case GW_ROUTE_POST:
        return "POST, OPTIONS";
    default:
        return "GET, HEAD, POST, OPTIONS";
    }
}
