#include "gw_verdict.h"

#include <stdio.h>
#include <string.h>

#include "gw_conn.h"

static bool refuse(struct gw_verdict *v, enum gw_error_code code, const char *text)
{
    v->refusal = (struct gw_error){.code = code, .message = text};
    return false;
}

/* `why` stands behind the first 100 bytes of the path, which are printable. */
static bool refuse_path(struct gw_verdict *v, enum gw_error_code code, struct gw_http_text path,
                        const char *why)
{
    int n = path.n < 100 ? (int)path.n : 100;
    snprintf(v->text, sizeof v->text, "%.*s%s", n, path.p, why);
    return refuse(v, code, v->text);
}

static bool answer_options(struct gw_verdict *v, const char *allow)
{
    v->options = true;
    v->allow = allow;
    return false;
}

static bool decide_route(struct gw_verdict *v, const struct gw_routes *routes,
                         struct gw_http_request *r)
{
    if (gw_http_text_is(r->path, "*"))
        return answer_options(v, "GET, HEAD, POST, OPTIONS");
    struct buf capture = BUF_INIT(SIZE_MAX);
    enum gw_route_result result = gw_route_find(routes, r->path, &v->route, &capture);
    if (result == GW_ROUTE_FOUND)
        gw_http_set_capture(r, &capture);
    buf_done(&capture);
    switch (result) {
    case GW_ROUTE_FOUND:
        break;
    case GW_ROUTE_BAD_ESCAPE:
        return refuse(v, GW_ERROR_BAD_REQUEST, "the path holds a bad %-escape");
    case GW_ROUTE_NO_MEMORY:
        return refuse(v, GW_ERROR_OVERLOADED, "no memory for the request");
    case GW_ROUTE_UNKNOWN:
        return refuse_path(v, GW_ERROR_UNKNOWN_URL, r->path,
                           r->path.n >= 7 && memcmp(r->path.p, "/v1/v1/", 7) == 0
                               ? " is not served: the client's base URL already ends in /v1"
                               : " is not served; README.md lists the paths that are");
    }
    unsigned method = r->method == GW_HTTP_GET || r->method == GW_HTTP_HEAD ? GW_ROUTE_GET
                      : r->method == GW_HTTP_POST                           ? GW_ROUTE_POST
                                                                            : 0;
    if (r->method == GW_HTTP_OPTIONS)
        return answer_options(v, gw_route_allow(v->route));
    if ((v->route->methods & method) != 0)
        return true;
    v->allow = gw_route_allow(v->route);
    return refuse_path(v, GW_ERROR_METHOD_NOT_ALLOWED, r->path,
                       " does not know this method; see Allow");
}

/* False: no handler gets it. */
static bool decide(struct gw_verdict *v, const struct gw_conn_shared *s,
                   const struct gw_auth_listener *listener, struct gw_http_request *r)
{
    if (r->has_host && !gw_auth_host_allowed(s->auth, listener, r->host))
        return refuse(v, GW_ERROR_HOST_NOT_ALLOWED,
                      "this Host is not allowed; add the name to server.hosts");
    if (!gw_auth_page_allowed(s->auth, r))
        return refuse(v, GW_ERROR_ORIGIN_NOT_ALLOWED,
                      "this Origin is not allowed; add it to server.cors");
    if (r->method == GW_HTTP_OPTIONS && gw_http_field(r, "origin").n > 0 &&
        gw_http_count(r, "access-control-request-method") > 0) {
        v->preflight = true;
        return answer_options(v, NULL);
    }
    if (!decide_route(v, &s->routes, r))
        return false;
    r->key = gw_auth_key_of(r);
    if (v->route->needs_key && !gw_auth_key_allowed(s->auth, r->key))
        return refuse(v, GW_ERROR_INVALID_API_KEY,
                      r->key.n > 0 ? "this API key is not known"
                                   : "an API key is needed: Authorization: Bearer KEY");
    if (r->method == GW_HTTP_POST && !gw_auth_media_allowed(r))
        return refuse(v, GW_ERROR_UNSUPPORTED_MEDIA_TYPE,
                      "the body must be application/json in UTF-8, not compressed");
    if (r->content_length > s->limits.max_body_bytes)
        return refuse(v, GW_ERROR_BODY_TOO_LARGE, "the body is longer than server.max_body allows");
    if (s->draining && r->method == GW_HTTP_POST)
        return refuse(v, GW_ERROR_OVERLOADED, "the server is shutting down");
    if (r->expect_other)
        return refuse(v, GW_ERROR_EXPECTATION_FAILED, "only Expect: 100-continue is known");
    return true;
}

void gw_verdict_decide(struct gw_verdict *v, const struct gw_conn_shared *shared,
                       const struct gw_auth_listener *listener, struct gw_http_request *r)
{
    *v = (struct gw_verdict){.route = NULL};
    v->refused = !decide(v, shared, listener, r);
}
