#include "log.h"

#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <systemd/sd-journal.h>

#include "utf8.h"

enum {
    LOG_LINE_BYTES = 8192,
    LOG_VALUE_BYTES =
        1024, /* escaped at most six times as long: one value always fits into a line */
    LOG_STORE_BYTES = 4096,
    LOG_FIELDS = 24,
    LOG_KEY_BYTES = 48,
    LOG_TAIL_BYTES = 16, /* kept free for what ends a line */
};

static struct {
    _Atomic int level, format;
    _Atomic bool prefixed; /* <N> before each line of text, which journald takes as the priority */
} log_state = {LOG_LEVEL_INFO, LOG_FORMAT_TEXT, false};

/* One key=value pair; the value lies in the event's store. */
struct log_field {
    const char *key; /* n_key bytes of the format */
    size_t n_key;
    size_t value, n_value;
    bool quoted; /* the format has quotes around it */
};

struct log_record {
    const char *component, *event;
    enum log_level level;
    struct log_field fields[LOG_FIELDS];
    size_t n_fields;
    char store[LOG_STORE_BYTES];
    size_t n_store;
    bool cut; /* something did not fit */
};

struct log_line {
    char data[LOG_LINE_BYTES];
    size_t size;
    bool full;
};

/* ---- format and arguments to fields ---------------------------------------------------------- */

static void log_put(struct log_record *r, struct log_field *f, const char *text, size_t n)
{
    size_t room = LOG_VALUE_BYTES - f->n_value;
    if (room > LOG_STORE_BYTES - r->n_store)
        room = LOG_STORE_BYTES - r->n_store;
    if (n > room) {
        n = room;
        r->cut = true;
    }
    memcpy(r->store + r->n_store, text, n);
    r->n_store += n;
    f->n_value += n;
}

/* The variable arguments, in a struct so that helpers advance one and the same list. */
struct log_args {
    va_list list;
};

/* Strings come as they are, whatever they hold; a width makes no sense here. */
static void log_convert_text(struct log_record *r, struct log_field *f, struct log_args *args,
                             size_t limit)
{
    const char *text = va_arg(args->list, const char *);
    if (text == NULL)
        text = "(none)";
    log_put(r, f, text, strnlen(text, limit < LOG_VALUE_BYTES + 1 ? limit : LOG_VALUE_BYTES + 1));
}

static int64_t log_signed(struct log_args *args, const char *length)
{
    if (strcmp(length, "hh") == 0)
        return (signed char)va_arg(args->list, int);
    if (strcmp(length, "h") == 0)
        return (short)va_arg(args->list, int);
    if (strcmp(length, "l") == 0)
        return va_arg(args->list, long);
    if (strcmp(length, "ll") == 0)
        return va_arg(args->list, long long);
    if (strcmp(length, "z") == 0 || strcmp(length, "t") == 0)
        return va_arg(args->list, ptrdiff_t);
    if (strcmp(length, "j") == 0)
        return va_arg(args->list, intmax_t);
    return va_arg(args->list, int);
}

static uint64_t log_unsigned(struct log_args *args, const char *length)
{
    if (strcmp(length, "hh") == 0)
        return (unsigned char)va_arg(args->list, unsigned);
    if (strcmp(length, "h") == 0)
        return (unsigned short)va_arg(args->list, unsigned);
    if (strcmp(length, "l") == 0)
        return va_arg(args->list, unsigned long);
    if (strcmp(length, "ll") == 0)
        return va_arg(args->list, unsigned long long);
    if (strcmp(length, "z") == 0 || strcmp(length, "t") == 0)
        return va_arg(args->list, size_t);
    if (strcmp(length, "j") == 0)
        return va_arg(args->list, uintmax_t);
    return va_arg(args->list, unsigned);
}

/* Converts the one argument that `spec` (from '%', flags and width up to before the length) and
 * `conversion` ask for. */
static void log_convert_number(struct log_record *r, struct log_field *f, const char *spec,
                               const char *length, char conversion, struct log_args *args)
{
    char full[32], text[400];
    int n = 0;
    switch (conversion) {
    case 'd':
    case 'i':
        snprintf(full, sizeof full, "%sjd", spec);
        n = snprintf(text, sizeof text, full, (intmax_t)log_signed(args, length));
        break;
    case 'u':
    case 'x':
    case 'X':
        snprintf(full, sizeof full, "%sj%c", spec, conversion);
        n = snprintf(text, sizeof text, full, (uintmax_t)log_unsigned(args, length));
        break;
    case 'c':
        text[0] = (char)va_arg(args->list, int);
        n = 1;
        break;
    case 'p':
        n = snprintf(text, sizeof text, "%p", va_arg(args->list, void *));
        break;
    default:
        snprintf(full, sizeof full, "%s%c", spec, conversion);
        n = snprintf(text, sizeof text, full, va_arg(args->list, double));
        break;
    }
    if (n > 0)
        log_put(r, f, text, (size_t)n < sizeof text ? (size_t)n : sizeof text - 1);
}

/* `p` stands behind a '%'. Returns where the format goes on. */
static const char *log_convert(struct log_record *r, struct log_field *f, const char *p,
                               struct log_args *args)
{
    char spec[24] = "%", length[3] = "";
    size_t n = 1, n_length = 0;
    size_t limit = SIZE_MAX;
    for (; *p != '\0' && strchr("-+ #0123456789.*", *p) != NULL; p++) {
        bool precision = n > 1 && spec[n - 1] == '.';
        if (*p != '*') {
            if (n < 12)
                spec[n++] = *p;
            continue;
        }
        int given = va_arg(args->list, int);
        if (precision)
            limit = given < 0 ? SIZE_MAX : (size_t)given;
        n += (size_t)snprintf(spec + n, 11, "%d", given > 99 ? 99 : given < 0 ? 0 : given);
    }
    spec[n] = '\0';
    const char *dot = strchr(spec, '.');
    if (limit == SIZE_MAX && dot != NULL && dot[1] >= '0' && dot[1] <= '9') {
        limit = 0;
        for (const char *digit = dot + 1; *digit >= '0' && *digit <= '9'; digit++)
            limit = limit * 10 + (size_t)(*digit - '0');
    }
    for (; *p != '\0' && strchr("hlzjt", *p) != NULL; p++)
        if (n_length < 2)
            length[n_length++] = *p;
    if (*p == '\0')
        return p;
    if (*p == 's')
        log_convert_text(r, f, args, limit);
    else if (*p == '%')
        log_put(r, f, "%", 1);
    else
        log_convert_number(r, f, spec, length, *p, args);
    return p + 1;
}

static void log_parse(struct log_record *r, const char *p, struct log_args *args)
{
    for (;;) {
        while (*p == ' ')
            p++;
        if (*p == '\0')
            return;
        if (r->n_fields == LOG_FIELDS) {
            r->cut = true;
            return;
        }
        struct log_field *f = &r->fields[r->n_fields++];
        *f = (struct log_field){.key = p, .value = r->n_store};
        size_t n = strcspn(p, "= %");
        if (p[n] == '=' && n > 0) {
            f->n_key = n < LOG_KEY_BYTES ? n : LOG_KEY_BYTES;
            p += n + 1;
        } else {
            f->key = "text"; /* a bare word or %s */
            f->n_key = 4;
        }
        f->quoted = *p == '"';
        if (f->quoted)
            p++;
        char end = f->quoted ? '"' : ' ';
        while (*p != '\0' && *p != end) {
            if (*p == '%')
                p = log_convert(r, f, p + 1, args);
            else
                log_put(r, f, p++, 1);
        }
        if (f->quoted && *p == '"')
            p++;
        bool bare = f->n_key == 4 && memcmp(f->key, "text", 4) == 0;
        if (bare && f->n_value == 0)
            r->n_fields--; /* "%s" with "": no pairs */
    }
}

/* ---- fields to a line ------------------------------------------------------------------------ */

static void log_add(struct log_line *l, const char *text, size_t n)
{
    if (l->full || n > sizeof l->data - LOG_TAIL_BYTES - l->size) {
        l->full = true;
        return;
    }
    memcpy(l->data + l->size, text, n);
    l->size += n;
}

static void log_add_text(struct log_line *l, const char *text)
{
    log_add(l, text, strlen(text));
}

/* Ends a line in the room that log_add keeps free. */
static void log_end(struct log_line *l, const char *text)
{
    size_t n = strlen(text);
    memcpy(l->data + l->size, text, n);
    l->size += n;
}

/* Escapes for text (\xNN) or JSON (\u00NN; an ill-formed byte is U+FFFD). */
static void log_add_escaped(struct log_line *l, const char *text, size_t n, bool json)
{
    for (size_t i = 0; i < n;) {
        const uint8_t *p = (const uint8_t *)text + i;
        int k = utf8_sequence(p, n - i);
        size_t width = k > 0 ? (size_t)k : 1;
        bool control = p[0] < 0x20 || p[0] == 0x7F || (k == 2 && p[0] == 0xC2 && p[1] < 0xA0);
        char code[16];
        if (k > 0 && (p[0] == '"' || p[0] == '\\')) {
            log_add(l, (const char[2]){'\\', text[i]}, 2);
        } else if (p[0] == '\n' || p[0] == '\t' || p[0] == '\r') {
            log_add(l, (const char[2]){'\\', p[0] == '\n' ? 'n' : p[0] == '\t' ? 't' : 'r'}, 2);
        } else if (k > 0 && !control) {
            log_add(l, text + i, width);
        } else if (json) {
            unsigned value = k > 0 ? utf8_decode(p, width) : 0xFFFD;
            log_add(l, code, (size_t)snprintf(code, sizeof code, "\\u%04x", value));
        } else {
            for (size_t j = 0; j < width; j++)
                log_add(l, code, (size_t)snprintf(code, sizeof code, "\\x%02X", p[j]));
        }
        i += width;
    }
}

static bool log_plain(const char *text, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (text[i] <= ' ' || text[i] > '~' || strchr("\"\\=", text[i]) != NULL)
            return false;
    return n > 0;
}

/* A decimal number that every JSON reader keeps exactly. */
static bool log_number(const char *text, size_t n)
{
    size_t i = n > 0 && text[0] == '-' ? 1 : 0, first = i, dots = 0;
    if (n == 0 || n > 15 || i == n || (text[i] == '0' && n - i > 1 && text[i + 1] != '.'))
        return false;
    for (; i < n; i++) {
        if (text[i] == '.' && dots == 0 && i > first && i + 1 < n)
            dots++;
        else if (text[i] < '0' || text[i] > '9')
            return false;
    }
    return true;
}

static const char *log_level_name(enum log_level level)
{
    static const char *const names[] = {"error", "warn", "info", "debug"};
    return names[level];
}

static int log_priority(enum log_level level)
{
    static const int priority[] = {3, 4, 6, 7}; /* of syslog */
    return priority[level];
}

static void log_text_field(struct log_line *l, const struct log_record *r,
                           const struct log_field *f)
{
    const char *value = r->store + f->value;
    bool quotes = f->quoted || !log_plain(value, f->n_value);
    size_t start = l->size;
    log_add_text(l, " ");
    log_add(l, f->key, f->n_key);
    log_add_text(l, quotes ? "=\"" : "=");
    log_add_escaped(l, value, f->n_value, false);
    log_add_text(l, quotes ? "\"" : "");
    if (l->full)
        l->size = start;
}

/* `level component event key=value ...`; the journal has a field of its own for the level. */
static void log_render_text(struct log_line *l, const struct log_record *r, bool with_level)
{
    if (with_level) {
        log_add_text(l, log_level_name(r->level));
        log_add_text(l, " ");
    }
    log_add_text(l, r->component);
    log_add_text(l, " ");
    log_add_text(l, r->event);
    for (size_t i = 0; i < r->n_fields; i++)
        log_text_field(l, r, &r->fields[i]);
    if (r->cut || l->full)
        log_end(l, " cut=1");
}

static void log_json_pair(struct log_line *l, const char *key, size_t n_key, const char *value,
                          size_t n, bool bare)
{
    size_t start = l->size;
    log_add_text(l, l->size > 1 ? ",\"" : "\"");
    log_add_escaped(l, key, n_key, true);
    log_add_text(l, bare ? "\":" : "\":\"");
    log_add_escaped(l, value, n, true);
    log_add_text(l, bare ? "" : "\"");
    if (l->full)
        l->size = start;
}

static void log_render_json(struct log_line *l, const struct log_record *r)
{
    struct timespec now;
    struct tm tm;
    char time[64];
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &tm);
    size_t n = strftime(time, sizeof time, "%Y-%m-%dT%H:%M:%S", &tm);
    n += (size_t)snprintf(time + n, sizeof time - n, ".%03ldZ", now.tv_nsec / 1000000);
    log_add_text(l, "{");
    log_json_pair(l, "time", 4, time, n, false);
    const char *level = log_level_name(r->level);
    log_json_pair(l, "level", 5, level, strlen(level), false);
    log_json_pair(l, "component", 9, r->component, strlen(r->component), false);
    log_json_pair(l, "event", 5, r->event, strlen(r->event), false);
    for (size_t i = 0; i < r->n_fields; i++) {
        const struct log_field *f = &r->fields[i];
        const char *value = r->store + f->value;
        bool bare = !f->quoted && log_number(value, f->n_value);
        log_json_pair(l, f->key, f->n_key, value, f->n_value, bare);
    }
    log_end(l, r->cut || l->full ? ",\"cut\":1}\n" : "}\n");
}

/* ---- where lines go -------------------------------------------------------------------------- */

static void log_write(const char *data, size_t n)
{
    /* A log that cannot be written has nobody to tell. */
    while (write(STDERR_FILENO, data, n) < 0 && errno == EINTR)
        continue;
}

static size_t log_journal_field(char *out, size_t room, const char *key, size_t n_key,
                                const char *value, size_t n_value)
{
    int n = snprintf(out, room, "ISLET_%.*s=%.*s", (int)n_key, key, (int)n_value, value);
    for (char *p = out; *p != '\0' && *p != '='; p++) {
        if (*p >= 'a' && *p <= 'z')
            *p = (char)(*p - 'a' + 'A');
        else if (!(*p >= 'A' && *p <= 'Z') && !(*p >= '0' && *p <= '9'))
            *p = '_';
    }
    return n < 0 ? 0 : (size_t)n < room ? (size_t)n : room - 1;
}

/* True if journald took it. The keys are fields of the same names in capitals, with ISLET_
 * before. */
static bool log_send_journal(const struct log_record *r)
{
    struct log_line message = {.size = 0};
    char fields[LOG_STORE_BYTES + (LOG_FIELDS + 2) * (LOG_KEY_BYTES + 8)], level[16];
    struct iovec iov[LOG_FIELDS + 4];
    int n = 0;
    size_t used = 0;
    log_add_text(&message, "MESSAGE=");
    log_render_text(&message, r, false);
    iov[n++] = (struct iovec){message.data, message.size};
    snprintf(level, sizeof level, "PRIORITY=%d", log_priority(r->level));
    iov[n++] = (struct iovec){level, strlen(level)};
    for (size_t i = 0; i < r->n_fields + 2; i++) {
        const struct log_field *f = i < 2 ? NULL : &r->fields[i - 2];
        const char *key = i == 0 ? "component" : i == 1 ? "event" : f->key;
        const char *value = i == 0 ? r->component : i == 1 ? r->event : r->store + f->value;
        size_t size = log_journal_field(fields + used, sizeof fields - used, key,
                                        f != NULL ? f->n_key : strlen(key), value,
                                        f != NULL ? f->n_value : strlen(value));
        iov[n++] = (struct iovec){fields + used, size};
        used += size;
    }
    return sd_journal_sendv(iov, n) >= 0;
}

bool log_under_journal(void)
{
    const char *stream = getenv("JOURNAL_STREAM");
    unsigned long long device, inode;
    struct stat st;
    return stream != NULL && sscanf(stream, "%llu:%llu", &device, &inode) == 2 &&
           fstat(STDERR_FILENO, &st) == 0 && st.st_dev == device && st.st_ino == inode;
}

void log_setup(enum log_level level, enum log_format format)
{
    /* sd_journal_sendv says 0 also where there is no journald: its lines would be lost. */
    bool unreachable =
        format == LOG_FORMAT_JOURNAL && access("/run/systemd/journal/socket", W_OK) != 0;
    if (unreachable)
        format = LOG_FORMAT_TEXT;
    atomic_store(&log_state.prefixed, unreachable && log_under_journal());
    atomic_store(&log_state.level, (int)level);
    atomic_store(&log_state.format, (int)format);
}

enum log_level log_level(void)
{
    return (enum log_level)atomic_load(&log_state.level);
}

void log_event(enum log_level level, const char *component, const char *event, const char *format,
               ...)
{
    if (level > log_level())
        return;
    int saved = errno;
    struct log_record r;
    r.component = component;
    r.event = event;
    r.level = level;
    r.n_fields = r.n_store = 0;
    r.cut = false;
    struct log_args args;
    va_start(args.list, format);
    log_parse(&r, format, &args);
    va_end(args.list);

    enum log_format to = (enum log_format)atomic_load(&log_state.format);
    if (to != LOG_FORMAT_JOURNAL || !log_send_journal(&r)) {
        struct log_line l;
        l.size = 0;
        l.full = false;
        if (to == LOG_FORMAT_JSON) {
            log_render_json(&l, &r);
        } else {
            if (atomic_load(&log_state.prefixed)) {
                char prefix[8];
                log_add(&l, prefix,
                        (size_t)snprintf(prefix, sizeof prefix, "<%d>", log_priority(level)));
            }
            log_render_text(&l, &r, true);
            log_end(&l, "\n");
        }
        log_write(l.data, l.size);
    }
    errno = saved;
}
