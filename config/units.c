#include "units.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "size.h"

struct units_row {
    const char *name;
    uint64_t factor;
};

static const struct units_row units_sizes[] = {
    {"B", 1},
    {"KiB", (uint64_t)1 << 10},
    {"MiB", (uint64_t)1 << 20},
    {"GiB", (uint64_t)1 << 30},
    {"TiB", (uint64_t)1 << 40},
    {"kB", 1000},
    {"MB", 1000000},
    {"GB", 1000000000},
    {"TB", 1000000000000},
    {NULL, 0},
};

static const struct units_row units_times[] = {
    {"ms", 1}, {"s", 1000}, {"min", 60000}, {"h", 3600000}, {NULL, 0},
};

/* "12", "1.5": whole part and up to nine digits behind the point. Returns the rest, or NULL if
 * there is no number. */
static const char *units_number(const char *p, uint64_t *ret_whole, uint64_t *ret_nano)
{
    uint64_t whole = 0, nano = 0, weight = 100000000;
    if (*p < '0' || *p > '9')
        return NULL;
    for (; *p >= '0' && *p <= '9'; p++)
        if (!size_mul(whole, 10, &whole) || !size_add(whole, (uint64_t)(*p - '0'), &whole))
            return NULL;
    if (*p == '.') {
        p++;
        if (*p < '0' || *p > '9')
            return NULL;
        for (; *p >= '0' && *p <= '9'; p++, weight /= 10)
            nano += (uint64_t)(*p - '0') * weight;
    }
    *ret_whole = whole;
    *ret_nano = nano;
    return p;
}

/* The value in the smallest unit of `rows`, a remainder below it dropped. `example` shows what
 * would be right. */
static enum err_code units_parse(const char *text, const struct units_row *rows,
                                 const char *example, uint64_t *ret, struct err *e)
{
    uint64_t whole, nano, value;
    const char *p = units_number(text, &whole, &nano);
    if (p == NULL)
        return err_set(e, ERR_ARGUMENT, "%.80s: not a number with a unit, for example %s", text,
                       example);
    p += strspn(p, " \t");
    const size_t unit = strcspn(p, " \t");
    const bool trailed = p[unit + strspn(p + unit, " \t")] == '\0'; /* by spaces alone */
    if (*p == '\0' && whole == 0 && nano == 0) {
        *ret = 0;
        return ERR_OK;
    }
    if (*p == '\0')
        return err_set(e, ERR_ARGUMENT, "%.80s: a unit is missing, for example %.80s %s", text,
                       text, strchr(example, ' ') + 1);
    for (const struct units_row *r = rows; r->name != NULL; r++) {
        if (!trailed || unit != strlen(r->name) || strncasecmp(p, r->name, unit) != 0)
            continue;
        /* nano < 10^9 and factor <= 2^40: the product needs more than 64 bits. */
        uint64_t part = (uint64_t)((unsigned __int128)nano * r->factor / 1000000000u);
        if (!size_mul(whole, r->factor, &value) || !size_add(value, part, &value) ||
            value > INT64_MAX)
            return err_set(e, ERR_ARGUMENT, "%.80s: too large", text);
        *ret = value;
        return ERR_OK;
    }
    char known[64] = "";
    for (const struct units_row *r = rows; r->name != NULL; r++) {
        size_t n = strlen(known);
        snprintf(known + n, sizeof known - n, "%s%s", n > 0 ? " " : "", r->name);
    }
    return err_set(e, ERR_ARGUMENT, "%.80s: unknown unit %.20s; known are %s", text, p, known);
}

enum err_code units_parse_bytes(const char *text, uint64_t *ret, struct err *e)
{
    return units_parse(text, units_sizes, "12 GiB", ret, e);
}

enum err_code units_parse_ms(const char *text, int64_t *ret, struct err *e)
{
    uint64_t value;
    enum err_code rc = units_parse(text, units_times, "50 ms", &value, e);
    if (rc == ERR_OK)
        *ret = (int64_t)value;
    return rc;
}

static unsigned units_binary(uint64_t bytes)
{
    unsigned i = 0;
    while (i < 4 && bytes >> (10 * (i + 1)) != 0)
        i++;
    return i;
}

struct units_text units_bytes(uint64_t bytes)
{
    struct units_text t;
    const unsigned i = units_binary(bytes);
    if (i == 0)
        snprintf(t.s, sizeof t.s, "%llu B", (unsigned long long)bytes);
    else
        snprintf(t.s, sizeof t.s, "%.2f %s", (double)bytes / (double)units_sizes[i].factor,
                 units_sizes[i].name);
    return t;
}

struct units_text units_bytes_up(uint64_t bytes)
{
    const unsigned i = units_binary(bytes);
    if (i == 0)
        return units_bytes(bytes);
    struct units_text t;
    const unsigned __int128 factor = units_sizes[i].factor;
    const uint64_t hundredths = (uint64_t)(((unsigned __int128)bytes * 100 + factor - 1) / factor);
    snprintf(t.s, sizeof t.s, "%llu.%02u %s", (unsigned long long)(hundredths / 100),
             (unsigned)(hundredths % 100), units_sizes[i].name);
    return t;
}

struct units_text units_ms(uint64_t ms)
{
    struct units_text t;
    unsigned i = 0;
    while (i < 3 && ms >= units_times[i + 1].factor)
        i++;
    if (i == 0)
        snprintf(t.s, sizeof t.s, "%llu ms", (unsigned long long)ms);
    else
        snprintf(t.s, sizeof t.s, "%.1f %s", (double)ms / (double)units_times[i].factor,
                 units_times[i].name);
    return t;
}
