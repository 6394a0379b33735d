/* "12 GiB", "50 ms": sizes and times with units, both ways. A bare number is refused where a unit
 * could be meant. */
#ifndef ISLET_UNITS_H
#define ISLET_UNITS_H

#include <stdint.h>

#include "err.h"

/* B KiB MiB GiB TiB (and kB MB GB TB, decimal); a fraction is allowed ("1.5 GiB"); 0 needs no
 * unit. Spaces before and behind the unit are no matter. */
enum err_code units_parse_bytes(const char *text, uint64_t *ret, struct err *e)
    __attribute__((warn_unused_result));
/* ms s min h -> milliseconds; 0 needs no unit. */
enum err_code units_parse_ms(const char *text, int64_t *ret, struct err *e)
    __attribute__((warn_unused_result));

struct units_text {
    char s[32];
};
struct units_text units_bytes(uint64_t bytes); /* "1.50 GiB" */
/* The same rounded up: what is read back is not less than `bytes`. For the least that works. */
struct units_text units_bytes_up(uint64_t bytes);
struct units_text units_ms(uint64_t ms); /* "2.4 s" */

#endif
