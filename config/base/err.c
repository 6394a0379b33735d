#include "err.h"

#include <stdio.h>
#include <string.h>

#include "utf8.h"

/* Names in outside data may hold anything; an error text is one line of valid UTF-8 all the same:
 * control characters and ill-formed bytes become '?', and a sequence that the ceiling cut in two
 * goes. */
static void err_clean(char *text)
{
    size_t n = strlen(text), i = 0;
    while (i < n) {
        uint8_t *p = (uint8_t *)text + i;
        int k = utf8_sequence(p, n - i);
        if (k == 0) {
            *p = '\0';
            return;
        }
        bool c1 = k == 2 && p[0] == 0xC2 && p[1] < 0xA0;
        if (k < 0 || c1 || *p < 0x20 || *p == 0x7F)
            memset(p, '?', (size_t)(k < 0 ? -k : k));
        i += (size_t)(k < 0 ? -k : k);
    }
}

static void __attribute__((format(printf, 4, 0)))
err_record(struct err *e, enum err_code code, int os_errno, const char *format, va_list args)
{
    e->code = code;
    e->os_errno = os_errno;
    vsnprintf(e->text, sizeof e->text, format, args);
    size_t n = strlen(e->text);
    if (os_errno != 0) {
        char reason[96];
        const char *text = strerror_r(os_errno, reason, sizeof reason);
        snprintf(e->text + n, sizeof e->text - n, ": %s", text);
    }
    err_clean(e->text);
}

enum err_code err_set(struct err *e, enum err_code code, const char *format, ...)
{
    if (e == NULL || e->code != ERR_OK)
        return code;
    va_list args;
    va_start(args, format);
    err_record(e, code, 0, format, args);
    va_end(args);
    return code;
}

enum err_code err_set_os(struct err *e, enum err_code code, int os_errno, const char *format, ...)
{
    if (e == NULL || e->code != ERR_OK)
        return code;
    va_list args;
    va_start(args, format);
    err_record(e, code, os_errno, format, args);
    va_end(args);
    return code;
}

enum err_code err_wrap(struct err *e, const char *format, ...)
{
    if (e == NULL)
        return ERR_OK;
    char old[sizeof e->text];
    memcpy(old, e->text, sizeof old);
    va_list args;
    va_start(args, format);
    vsnprintf(e->text, sizeof e->text, format, args);
    va_end(args);
    size_t n = strlen(e->text);
    snprintf(e->text + n, sizeof e->text - n, ": %s", old);
    err_clean(e->text);
    return e->code;
}

const char *err_code_name(enum err_code code)
{
    static const char *const names[ERR_N] = {
        [ERR_OK] = "ok",
        [ERR_BUSY] = "busy",
        [ERR_LIMIT] = "limit",
        [ERR_NOMEM] = "nomem",
        [ERR_CANCELLED] = "cancelled",
        [ERR_ARGUMENT] = "argument",
        [ERR_FORMAT] = "format",
        [ERR_PROTOCOL] = "protocol",
        [ERR_IO] = "io",
        [ERR_DEVICE] = "device",
        [ERR_UNSUPPORTED] = "unsupported",
    };
    return (unsigned)code < ERR_N ? names[code] : "unknown";
}

bool err_code_retryable(enum err_code code)
{
    return code == ERR_BUSY || code == ERR_LIMIT || code == ERR_NOMEM || code == ERR_CANCELLED;
}
