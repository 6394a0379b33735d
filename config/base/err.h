/* Errors: a code that says what the caller can do, and one clear line that names the thing, the
 * value and the limit.
 *
 * Fallible functions return `enum err_code` and take `struct err *e` last. *e is written only on
 * failure; the first error wins, so a cleanup path that fails again does not hide the cause. e may
 * be NULL. */
#ifndef ISLET_ERR_H
#define ISLET_ERR_H

#include <stdarg.h>
#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

enum err_code {
    ERR_OK = 0,
    ERR_BUSY,        /* retry later */
    ERR_LIMIT,       /* a stated limit was reached */
    ERR_NOMEM,       /* memory or budget exhausted */
    ERR_CANCELLED,   /* asked to stop */
    ERR_ARGUMENT,    /* the client's fault */
    ERR_FORMAT,      /* the file's fault */
    ERR_PROTOCOL,    /* the peer's fault */
    ERR_IO,          /* read, write or the system failed */
    ERR_DEVICE,      /* the GPU or another device failed */
    ERR_UNSUPPORTED, /* understood, not built in */
    ERR_N
};

struct err {
    enum err_code code; /* ERR_OK: nothing happened yet */
    int os_errno;       /* 0, or errno at the time */
    char text[240];     /* one line, no newline; cut at the end if longer */
};

/* Records the error unless *e already holds one. Returns `code`, so that `return err_set(...)`
 * works. */
enum err_code err_set(struct err *e, enum err_code code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* As err_set, and appends ": <strerror(os_errno)>". */
enum err_code err_set_os(struct err *e, enum err_code code, int os_errno, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Puts "<prefix>: " in front of the text that is there. Returns e->code (ERR_OK when e is NULL). */
enum err_code err_wrap(struct err *e, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* "busy", "limit", ...; never NULL. */
const char *err_code_name(enum err_code code);

/* True where the same call may succeed later: BUSY LIMIT NOMEM CANCELLED. */
bool err_code_retryable(enum err_code code);

#ifdef __cplusplus
}
#endif

#endif
