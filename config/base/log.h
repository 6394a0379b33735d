/* Log lines: `level component event key=value ...` on stderr, journald fields under systemd, or
 * JSON objects. Components and events are fixed words. JSON lines carry the wall-clock time; the
 * journal keeps its own. */
#ifndef ISLET_LOG_H
#define ISLET_LOG_H

#include <stdbool.h>

enum log_level {
    LOG_LEVEL_ERROR,
    LOG_LEVEL_WARN,
    LOG_LEVEL_INFO,
    LOG_LEVEL_DEBUG
};
enum log_format {
    LOG_FORMAT_TEXT,
    LOG_FORMAT_JSON,
    LOG_FORMAT_JOURNAL
};

/* True if stderr is the stream to the journal that systemd gave this unit ($JOURNAL_STREAM names it
 * by device and inode), not one that a parent handed down. */
bool log_under_journal(void);
/* Sets what is written from now on. Safe before any other call; the default is INFO and TEXT. Any
 * thread. JOURNAL where journald cannot be reached is TEXT, with the priority as <N> before each
 * line if stderr is its stream all the same. */
void log_setup(enum log_level level, enum log_format format);
enum log_level log_level(void);

/* `format` gives space-separated key=value pairs, for example "path=%s bytes=%zu"; "%s", "" where
 * there are none. What a %s brings is one value whatever it holds: quoted where it needs it,
 * quotes, control characters and ill-formed UTF-8 escaped, cut at 1 KiB. key=\"%s\" quotes in any
 * case. A pair that no longer fits into the line is dropped and said (cut=1). Conversions: d i u x
 * X c s p e f g with h hh l ll z t j. One write(2) a line; errno is kept; any thread. */
void log_event(enum log_level level, const char *component, const char *event, const char *format,
               ...) __attribute__((format(printf, 4, 5)));

#define log_error(component, event, ...) log_event(LOG_LEVEL_ERROR, component, event, __VA_ARGS__)
#define log_warn(component, event, ...)  log_event(LOG_LEVEL_WARN, component, event, __VA_ARGS__)
#define log_info(component, event, ...)  log_event(LOG_LEVEL_INFO, component, event, __VA_ARGS__)
#define log_debug(component, event, ...) log_event(LOG_LEVEL_DEBUG, component, event, __VA_ARGS__)

#endif
