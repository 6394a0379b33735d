/* islet.conf: INI by libinih, overridden by --set section.key=value, checked as a whole before it
 * is used. One row per key in settings.def. Immutable after load; a reload makes a new one and
 * settings_diff says what changed. */
#ifndef ISLET_SETTINGS_H
#define ISLET_SETTINGS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "err.h"

enum setting_id {
#define SETTING(section, key, kind, value, reloadable, help) SETTING_##section##_##key,
#include "settings.def"
#undef SETTING
    SETTING_N
};

enum {
    SETTING_TIME_OFF = -1
}; /* settings_ms of a time that is "off" */

struct settings; /* values of all rows */

/* Defaults, then `path` (NULL: $XDG_CONFIG_HOME/islet/islet.conf, ~/.config/islet/islet.conf,
 * /etc/islet/islet.conf, the first that exists; none is fine), then the n_set overrides
 * "section.key=value". Gives *ret; free with settings_free. Errors: ARGUMENT / FORMAT with file and
 * line (or "--set"), the bad word and what would be right; an unknown key names the nearest known
 * one. All-or-nothing. */
enum err_code settings_load(const char *path, const char *const *sets, unsigned n_set,
                            struct settings **ret, struct err *e)
    __attribute__((warn_unused_result));
void settings_free(struct settings *s);

/* The value as text (never NULL; "" when empty), as a number (COUNT), bytes (not when it is auto),
 * milliseconds (SETTING_TIME_OFF when off) or index of a CHOICE. Asking for the wrong kind is a bug
 * and asserts. */
const char *settings_text(const struct settings *s, enum setting_id id);
uint64_t settings_count(const struct settings *s, enum setting_id id);
bool settings_is_auto(const struct settings *s,
                      enum setting_id id); /* the value is the word "auto" */
uint64_t settings_bytes(const struct settings *s, enum setting_id id);
int64_t settings_ms(const struct settings *s, enum setting_id id);
unsigned settings_choice(const struct settings *s, enum setting_id id);
/* Where the value came from: "default", "FILE:LINE" or "--set". */
const char *settings_origin(const struct settings *s, enum setting_id id);
/* File that was read, or "" if none. */
const char *settings_path(const struct settings *s);

/* Calls fn for each key whose value differs. */
void settings_diff(const struct settings *a, const struct settings *b,
                   void (*fn)(void *context, enum setting_id id, bool reloadable), void *context);

/* The table of --help-config: section.key, default, range, whether SIGHUP applies it, help. */
void settings_print_help(FILE *out);
/* A commented islet.conf with every key at its default (config/islet.conf is this text; a test
 * compares). */
void settings_print_example(FILE *out);
const char *settings_name(enum setting_id id); /* "section.key" */

#endif
