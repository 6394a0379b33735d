/* Why a request cannot be served, with room for its texts: what handlers fill and hand to the
 * client. */
#ifndef ISLET_GW_REFUSAL_H
#define ISLET_GW_REFUSAL_H

#include <stdbool.h>

#include "gw_error.h"

struct gw_exchange;

struct gw_refusal {
    enum gw_error_code code;
    char param[160]; /* path of the field, "" = none */
    char message[480];
    char extra[96]; /* more members of the error object, "" = none */
    unsigned retry_after_s;
};

/* Always returns false, so that `return gw_refusal_set(...)` ends a check. param NULL: none. */
bool gw_refusal_set(struct gw_refusal *r, enum gw_error_code code, const char *param,
                    const char *format, ...) __attribute__((format(printf, 4, 5)));
/* Lends: what gw_error_write and gw_exchange_fail take. */
struct gw_error gw_refusal_error(const struct gw_refusal *r);
void gw_refusal_send(const struct gw_refusal *r, struct gw_exchange *x);

#endif
