#include "gw_error.h"

#include <string.h>

#include "utf8.h"

static const struct {
    unsigned status;
    const char *type, *name;
} rows[GW_ERROR_N] = {
    [GW_ERROR_INVALID_JSON] = {400, "invalid_request_error", "invalid_json"},
    [GW_ERROR_INVALID_TYPE] = {400, "invalid_request_error", "invalid_type"},
    [GW_ERROR_INVALID_VALUE] = {400, "invalid_request_error", "invalid_value"},
    [GW_ERROR_MISSING_FIELD] = {400, "invalid_request_error", "missing_field"},
    [GW_ERROR_UNSUPPORTED_PARAMETER] = {400, "invalid_request_error", "unsupported_parameter"},
    [GW_ERROR_UNSUPPORTED_CONTENT] = {400, "invalid_request_error", "unsupported_content"},
    [GW_ERROR_CONTEXT_LENGTH] = {400, "invalid_request_error", "context_length_exceeded"},
    [GW_ERROR_BAD_REQUEST] = {400, "invalid_request_error", "bad_request"},
    [GW_ERROR_URI_TOO_LONG] = {414, "invalid_request_error", "uri_too_long"},
    [GW_ERROR_HEAD_TOO_LARGE] = {431, "invalid_request_error", "head_too_large"},
    [GW_ERROR_EXPECTATION_FAILED] = {417, "invalid_request_error", "expectation_failed"},
    [GW_ERROR_NOT_IMPLEMENTED] = {501, "invalid_request_error", "not_implemented"},
    [GW_ERROR_HTTP_VERSION] = {505, "invalid_request_error", "http_version"},
    [GW_ERROR_INVALID_API_KEY] = {401, "authentication_error", "invalid_api_key"},
    [GW_ERROR_HOST_NOT_ALLOWED] = {403, "permission_error", "host_not_allowed"},
    [GW_ERROR_ORIGIN_NOT_ALLOWED] = {403, "permission_error", "origin_not_allowed"},
    [GW_ERROR_UNKNOWN_URL] = {404, "invalid_request_error", "unknown_url"},
    [GW_ERROR_MODEL_NOT_FOUND] = {404, "invalid_request_error", "model_not_found"},
    [GW_ERROR_NOT_FOUND] = {404, "invalid_request_error", "not_found"},
    [GW_ERROR_METHOD_NOT_ALLOWED] = {405, "invalid_request_error", "method_not_allowed"},
    [GW_ERROR_REQUEST_TIMEOUT] = {408, "invalid_request_error", "request_timeout"},
    [GW_ERROR_BODY_TOO_LARGE] = {413, "invalid_request_error", "body_too_large"},
    [GW_ERROR_UNSUPPORTED_MEDIA_TYPE] = {415, "invalid_request_error", "unsupported_media_type"},
    [GW_ERROR_OVERLOADED] = {503, "overloaded_error", "overloaded"},
    [GW_ERROR_WORKER_UNAVAILABLE] = {503, "server_error", "worker_unavailable"},
    [GW_ERROR_CONFIGURATION] = {503, "server_error", "configuration"},
    [GW_ERROR_MODEL_ERROR] = {500, "server_error", "model_error"},
    [GW_ERROR_INTERNAL] = {500, "server_error", "internal_error"},
};

unsigned gw_error_status(enum gw_error_code code)
{
    return rows[code].status;
}

static const char *type_of(enum gw_error_code code)
{
    return rows[code].type;
}

const char *gw_error_name(enum gw_error_code code)
{
    return rows[code].name;
}

/* One valid sequence. U+0085, U+2028 and U+2029 are escaped too: line splitters of clients cut
 * there. */
static void quote_sequence(struct buf *out, const uint8_t *p, size_t n)
{
    uint32_t code = utf8_decode(p, n);
    if (code == '"' || code == '\\')
        buf_format(out, "\\%c", (char)code);
    else if (code < 0x20 || code == 0x7F || code == 0x85 || code == 0x2028 || code == 0x2029)
        buf_format(out, "\\u%04x", (unsigned)code);
    else
        buf_append(out, p, n);
}

static void quote(struct buf *out, const char *text)
{
    const uint8_t *p = (const uint8_t *)text;
    size_t left = strlen(text);
    buf_byte(out, '"');
    while (left > 0) {
        int k = utf8_sequence(p, left);
        size_t n = k > 0 ? (size_t)k : k < 0 ? (size_t)-k : left;
        if (k > 0)
            quote_sequence(out, p, n);
        else
            buf_text(out, "\xEF\xBF\xBD");
        p += n;
        left -= n;
    }
    buf_byte(out, '"');
}

void gw_error_write(struct buf *out, const struct gw_error *error)
{
    buf_text(out, "{\"error\":{\"message\":");
    quote(out, error->message);
    buf_format(out, ",\"type\":\"%s\",\"param\":", type_of(error->code));
    if (error->param != NULL)
        quote(out, error->param);
    else
        buf_text(out, "null");
    buf_format(out, ",\"code\":\"%s\"", gw_error_name(error->code));
    if (error->extra != NULL) {
        buf_byte(out, ',');
        buf_text(out, error->extra);
    }
    buf_text(out, "}}");
}

enum gw_error_code gw_error_of_err(enum err_code code)
{
    switch (code) {
    case ERR_BUSY:
    case ERR_LIMIT:
    case ERR_NOMEM:
    case ERR_CANCELLED:
        return GW_ERROR_OVERLOADED;
    case ERR_ARGUMENT:
        return GW_ERROR_INVALID_VALUE;
    case ERR_FORMAT:
    case ERR_UNSUPPORTED:
    case ERR_IO: /* all that a worker reads for a request is the model */
        return GW_ERROR_MODEL_ERROR;
    case ERR_PROTOCOL:
    case ERR_DEVICE:
        return GW_ERROR_WORKER_UNAVAILABLE;
    default:
        return GW_ERROR_INTERNAL;
    }
}
