/* Log lines: `level component event key=value ...` on stderr, journald fields under systemd, or JSON objects.
 * Event names are fixed words; values with spaces are quoted by the caller with %s inside "..." -- use LOG_Q. */
#ifndef ISLET_LOG_H
#define ISLET_LOG_H

enum log_level { LOG_LEVEL_ERROR, LOG_LEVEL_WARN, LOG_LEVEL_INFO, LOG_LEVEL_DEBUG };
enum log_format { LOG_FORMAT_TEXT, LOG_FORMAT_JSON, LOG_FORMAT_JOURNAL };

/* Sets what is written from now on. Safe before any other call; the default is INFO and TEXT. Any thread. */
void log_setup(enum log_level level, enum log_format format);
enum log_level log_level(void);

/* `format` gives space-separated key=value pairs; a value that may hold spaces, quotes or '=' is written with
 * key=\"%s\": quotes and control characters inside are escaped by log_event. One write(2) a line; any thread. */
void log_event(enum log_level level, const char *component, const char *event, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

#define log_error(component, event, ...) log_event(LOG_LEVEL_ERROR, component, event, __VA_ARGS__)
#define log_warn(component, event, ...) log_event(LOG_LEVEL_WARN, component, event, __VA_ARGS__)
#define log_info(component, event, ...) log_event(LOG_LEVEL_INFO, component, event, __VA_ARGS__)
#define log_debug(component, event, ...) log_event(LOG_LEVEL_DEBUG, component, event, __VA_ARGS__)

#endif
