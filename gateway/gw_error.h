/* What a client is told when a request fails: one table from cause to status, type and code. */
#ifndef ISLET_GW_ERROR_H
#define ISLET_GW_ERROR_H

#include "buf.h"
#include "err.h"

enum gw_error_code {
    GW_ERROR_INVALID_JSON,
    GW_ERROR_INVALID_TYPE,
    GW_ERROR_INVALID_VALUE,
    GW_ERROR_MISSING_FIELD,
    GW_ERROR_UNSUPPORTED_PARAMETER,
    GW_ERROR_UNSUPPORTED_CONTENT,
    GW_ERROR_CONTEXT_LENGTH,
    GW_ERROR_BAD_REQUEST,
    GW_ERROR_URI_TOO_LONG,
    GW_ERROR_HEAD_TOO_LARGE,
    GW_ERROR_EXPECTATION_FAILED,
    GW_ERROR_NOT_IMPLEMENTED,
    GW_ERROR_HTTP_VERSION,
    GW_ERROR_INVALID_API_KEY,
    GW_ERROR_HOST_NOT_ALLOWED,
    GW_ERROR_ORIGIN_NOT_ALLOWED,
    GW_ERROR_UNKNOWN_URL,
    GW_ERROR_MODEL_NOT_FOUND,
    GW_ERROR_NOT_FOUND, /* a thing named in the path is not there (any more) */
    GW_ERROR_METHOD_NOT_ALLOWED,
    GW_ERROR_REQUEST_TIMEOUT,
    GW_ERROR_BODY_TOO_LARGE,
    GW_ERROR_UNSUPPORTED_MEDIA_TYPE,
    GW_ERROR_OVERLOADED,
    GW_ERROR_WORKER_UNAVAILABLE,
    GW_ERROR_CONFIGURATION,
    GW_ERROR_MODEL_ERROR,
    GW_ERROR_INTERNAL,
    GW_ERROR_N
};

struct gw_error {
    enum gw_error_code code;
    const char *param;   /* path of the field, or NULL */
    const char *message; /* one line, any bytes; made valid UTF-8 and escaped on the way out */
    const char *extra;   /* NULL, or more members of the error object as JSON: "\"n_ctx\":4096" */
    unsigned retry_after_s; /* 503 only: 1..30; 0 stands for 1 */
};

unsigned gw_error_status(enum gw_error_code code);
const char *gw_error_name(enum gw_error_code code); /* the JSON `code` */

/* Appends {"error":{"message","type","param","code"[,extra]}}. Lends nothing, keeps nothing. */
void gw_error_write(struct buf *out, const struct gw_error *error);

/* Why a peer's or file's error becomes which answer. */
enum gw_error_code gw_error_of_err(enum err_code code);

#endif
