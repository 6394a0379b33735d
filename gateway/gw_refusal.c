#include "gw_refusal.h"

#include <stdarg.h>
#include <stdio.h>

#include "gw_exchange.h"

bool gw_refusal_set(struct gw_refusal *r, enum gw_error_code code, const char *param,
                    const char *format, ...)
{
    va_list arguments;
    *r = (struct gw_refusal){.code = code};
    if (param)
        snprintf(r->param, sizeof r->param, "%s", param);
    va_start(arguments, format);
    vsnprintf(r->message, sizeof r->message, format, arguments);
    va_end(arguments);
    return false;
}

struct gw_error gw_refusal_error(const struct gw_refusal *r)
{
    return (struct gw_error){
        .code = r->code,
        .param = r->param[0] != '\0' ? r->param : NULL,
        .message = r->message,
        .extra = r->extra[0] != '\0' ? r->extra : NULL,
        .retry_after_s = r->retry_after_s,
    };
}

void gw_refusal_send(const struct gw_refusal *r, struct gw_exchange *x)
{
    struct gw_error error = gw_refusal_error(r);
    gw_exchange_fail(x, &error);
}
