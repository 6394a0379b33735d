#include "settings.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <ini.h>

#include "alloc.h"
#include "units.h"

enum {
    SETTINGS_MAX_FILE = 1024 * 1024,
    SETTINGS_MAX_PATH = 4096,
    SETTINGS_HELP_WIDTH = 98,
};

/* ---- the table ------------------------------------------------------------------------------- */

enum settings_kind {
    SETTINGS_TEXT,
    SETTINGS_PATH,
    SETTINGS_COUNT,
    SETTINGS_SIZE,
    SETTINGS_TIME,
    SETTINGS_CHOICE
};

static const struct settings_row {
    const char *section, *key, *name;
    enum settings_kind kind;
    const char *low, *high; /* bounds as texts; CHOICE: low holds the words, separated by '|' */
    const char *value, *help;
    bool reloadable;
} settings_rows[SETTING_N] = {
/* A kind stands for the members kind, low and high. */
#define TEXT             SETTINGS_TEXT, NULL, NULL
#define PATH             SETTINGS_PATH, NULL, NULL
#define COUNT(low, high) SETTINGS_COUNT, #low, #high
#define SIZE(low, high)  SETTINGS_SIZE, low, high
#define TIME(low, high)  SETTINGS_TIME, low, high
#define CHOICE(words)    SETTINGS_CHOICE, words, NULL
#define SETTING(section, key, kind, value, reloadable, help) \
    {#section, #key, #section "." #key, kind, value, help, reloadable},
#include "settings.def"
#undef SETTING
#undef TEXT
#undef PATH
#undef COUNT
#undef SIZE
#undef TIME
#undef CHOICE
};

struct settings_value {
    char *text;      /* owned */
    char *origin;    /* owned; NULL: the default */
    uint64_t number; /* count, bytes, milliseconds (as int64_t) or index of the choice */
    unsigned line;   /* of the file; 0: not from it */
};

struct settings {
    char *path; /* owned */
    struct settings_value values[SETTING_N];
};

static bool settings_explains(const struct settings_row *row, const char *word)
{
    const char *found = strstr(row->help, word);
    return found != NULL && found[strlen(word)] == ':';
}

/* ---- checking a value ------------------------------------------------------------------------ */

static enum err_code settings_check_count(const struct settings_row *row, const char *text,
                                          uint64_t *ret, struct err *e)
{
    uint64_t low = strtoull(row->low, NULL, 10), high = strtoull(row->high, NULL, 10);
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || value < low || value > high)
        return err_set(e, ERR_ARGUMENT, "%.80s: must be a whole number from %s to %s", text,
                       row->low, row->high);
    *ret = value;
    return ERR_OK;
}

static enum err_code settings_check_size(const struct settings_row *row, const char *text,
                                         uint64_t *ret, struct err *e)
{
    uint64_t value, low = 0, high = 0;
    if (strcmp(text, "auto") == 0 && settings_explains(row, "auto")) {
        *ret = 0;
        return ERR_OK;
    }
    enum err_code rc = units_parse_bytes(text, &value, e);
    if (rc != ERR_OK)
        return rc;
    if (units_parse_bytes(row->low, &low, NULL) != ERR_OK ||
        units_parse_bytes(row->high, &high, NULL) != ERR_OK || value < low || value > high)
        return err_set(e, ERR_ARGUMENT, "%.80s: must be %s to %s", text, row->low, row->high);
    *ret = value;
    return ERR_OK;
}

static enum err_code settings_check_time(const struct settings_row *row, const char *text,
                                         uint64_t *ret, struct err *e)
{
    int64_t value, low = 0, high = 0;
    if (strcmp(text, "off") == 0 && settings_explains(row, "off")) {
        *ret = (uint64_t)(int64_t)SETTING_TIME_OFF;
        return ERR_OK;
    }
    enum err_code rc = units_parse_ms(text, &value, e);
    if (rc != ERR_OK)
        return rc;
    if (units_parse_ms(row->low, &low, NULL) != ERR_OK ||
        units_parse_ms(row->high, &high, NULL) != ERR_OK || value < low || value > high)
        return err_set(e, ERR_ARGUMENT, "%.80s: must be %s to %s", text, row->low, row->high);
    *ret = (uint64_t)value;
    return ERR_OK;
}

static enum err_code settings_check_choice(const struct settings_row *row, const char *text,
                                           uint64_t *ret, struct err *e)
{
    size_t n = strlen(text);
    uint64_t index = 0;
    for (const char *word = row->low; *word != '\0'; index++) {
        size_t n_word = strcspn(word, "|");
        if (n == n_word && memcmp(word, text, n) == 0) {
            *ret = index;
            return ERR_OK;
        }
        word += n_word + (word[n_word] == '|');
    }
    return err_set(e, ERR_ARGUMENT, "%.80s: must be one of %s", text, row->low);
}

static enum err_code settings_check(const struct settings_row *row, const char *text, uint64_t *ret,
                                    struct err *e)
{
    for (const char *p = text; *p != '\0'; p++)
        if ((unsigned char)*p < ' ' || *p == 0x7F)
            return err_set(e, ERR_ARGUMENT, "a control character stands in the value");
    switch (row->kind) {
    case SETTINGS_COUNT:
        return settings_check_count(row, text, ret, e);
    case SETTINGS_SIZE:
        return settings_check_size(row, text, ret, e);
    case SETTINGS_TIME:
        return settings_check_time(row, text, ret, e);
    case SETTINGS_CHOICE:
        return settings_check_choice(row, text, ret, e);
    case SETTINGS_TEXT:
        return ERR_OK;
    case SETTINGS_PATH:
        break;
    }
    if (strlen(text) >= SETTINGS_MAX_PATH)
        return err_set(e, ERR_ARGUMENT, "a path of %zu bytes; the limit is %d", strlen(text),
                       SETTINGS_MAX_PATH - 1);
    return ERR_OK;
}

/* ---- nearest name ---------------------------------------------------------------------------- */

enum {
    SETTINGS_NAME_BYTES = 64
};

/* Letters to insert, drop or change to make one of the other; both are cut at 63 bytes. */
static unsigned settings_distance(const char *a, const char *b)
{
    unsigned row[SETTINGS_NAME_BYTES];
    size_t n_a = strnlen(a, SETTINGS_NAME_BYTES - 1), n_b = strnlen(b, SETTINGS_NAME_BYTES - 1);
    for (size_t j = 0; j <= n_b; j++)
        row[j] = (unsigned)j;
    for (size_t i = 1; i <= n_a; i++) {
        unsigned corner = row[0];
        row[0] = (unsigned)i;
        for (size_t j = 1; j <= n_b; j++) {
            unsigned change = corner + (a[i - 1] != b[j - 1]);
            unsigned insert = row[j - 1] + 1, drop = row[j] + 1;
            corner = row[j];
            row[j] = change < insert ? change : insert;
            row[j] = row[j] < drop ? row[j] : drop;
        }
    }
    return row[n_b];
}

/* The row that was meant, or NULL where nothing is near. A wrong section costs one letter. */
static const struct settings_row *settings_nearest(const char *section, const char *key)
{
    const struct settings_row *best = NULL;
    unsigned best_cost = UINT32_MAX;
    for (size_t i = 0; i < SETTING_N; i++) {
        const struct settings_row *row = &settings_rows[i];
        unsigned cost = 2 * settings_distance(key, row->key);
        cost += strcmp(section, row->section) != 0;
        if (cost < best_cost) {
            best_cost = cost;
            best = row;
        }
    }
    size_t n = strlen(key);
    return best_cost / 2 <= (n < 6 ? 2 : n / 3) ? best : NULL;
}

static bool settings_section_known(const char *section)
{
    for (size_t i = 0; i < SETTING_N; i++)
        if (strcmp(settings_rows[i].section, section) == 0)
            return true;
    return false;
}

static enum err_code settings_refuse_key(const char *where, const char *section, const char *key,
                                         struct err *e)
{
    const struct settings_row *near = settings_nearest(section, key);
    if (section[0] == '\0')
        return err_set(e, ERR_ARGUMENT, "%s: key %s stands before any [section]", where, key);
    if (near != NULL && strcmp(near->section, section) == 0)
        return err_set(e, ERR_ARGUMENT, "%s: unknown key [%s] %s; did you mean %s?", where, section,
                       key, near->key);
    if (near != NULL)
        return err_set(e, ERR_ARGUMENT, "%s: unknown key [%s] %s; did you mean [%s] %s?", where,
                       section, key, near->section, near->key);
    return err_set(e, ERR_ARGUMENT, "%s: unknown %s [%s] %s; --help-config lists all keys", where,
                   settings_section_known(section) ? "key" : "section", section, key);
}

/* ---- setting a value ------------------------------------------------------------------------- */

static const struct settings_row *settings_find(const char *section, const char *key)
{
    for (size_t i = 0; i < SETTING_N; i++)
        if (strcmp(settings_rows[i].section, section) == 0 &&
            strcmp(settings_rows[i].key, key) == 0)
            return &settings_rows[i];
    return NULL;
}

/* Checks and stores. `origin` NULL: a default. */
static enum err_code settings_put(struct settings *s, const struct settings_row *row,
                                  const char *text, const char *origin, struct err *e)
{
    struct settings_value *v = &s->values[row - settings_rows];
    struct err why = {.code = ERR_OK};
    uint64_t number = 0;
    enum err_code rc = settings_check(row, text, &number, &why);
    if (rc != ERR_OK)
        return err_set(e, rc, "%s: [%s] %s = %s", origin != NULL ? origin : "default", row->section,
                       row->key, why.text);
    char *copy = alloc_text(ALLOC_CONFIG, text, strlen(text));
    char *from = origin != NULL ? alloc_text(ALLOC_CONFIG, origin, strlen(origin)) : NULL;
    if (copy == NULL || (origin != NULL && from == NULL)) {
        alloc_free(copy);
        alloc_free(from);
        return err_set(e, ERR_NOMEM, "no memory for the settings");
    }
    alloc_free(v->text);
    alloc_free(v->origin);
    *v = (struct settings_value){.text = copy, .origin = from, .number = number};
    return ERR_OK;
}

/* ---- the file -------------------------------------------------------------------------------- */

struct settings_reader {
    struct settings *settings;
    const char *path;
    const char *at, *end; /* what libinih has not yet been given */
    unsigned line;        /* of what it was given last */
    enum err_code rc;
    struct err *e;
};

static enum err_code settings_refuse_line(struct settings_reader *r, enum err_code code,
                                          const char *why)
{
    if (r->rc == ERR_OK)
        r->rc = err_set(r->e, code, "%s:%u: %s", r->path, r->line, why);
    return r->rc;
}

/* Gives libinih one line as fgets would, without its indent: libinih takes an indented line for
 * more of the value before it. A line that does not fit is refused, since libinih would cut it
 * without a word. */
static char *settings_read_line(char *line, int room, void *stream)
{
    struct settings_reader *r = stream;
    if (r->at == r->end || r->rc != ERR_OK)
        return NULL;
    const char *newline = memchr(r->at, '\n', (size_t)(r->end - r->at));
    const char *next = newline != NULL ? newline + 1 : r->end;
    const char *from = r->at;
    r->line++;
    while (from < next && (*from == ' ' || *from == '\t'))
        from++;
    r->at = next;
    size_t n = (size_t)(next - from), n_text = n - (newline != NULL);
    if (n_text > (size_t)room - 2) {
        char why[96];
        snprintf(why, sizeof why, "the line has %zu bytes; the limit is %d (--set has none)",
                 n_text, room - 2);
        settings_refuse_line(r, ERR_FORMAT, why);
        return NULL;
    }
    memcpy(line, from, n);
    line[n] = '\0';
    size_t word = strcspn(line, "\r\n");
    bool start = line[0] == '[' || line[0] == ';' || line[0] == '#' || word == 0;
    if (!start && strpbrk(line, "=:") == NULL) {
        settings_refuse_line(r, ERR_FORMAT, "neither a [section] nor key = value");
        return NULL;
    }
    if (line[0] == '[' && strchr(line, ']') == NULL) {
        settings_refuse_line(r, ERR_FORMAT, "the section's name does not end with ]");
        return NULL;
    }
    return line;
}

/* libinih's call for one key. Returns 1 to go on. */
static int settings_on_key(void *context, const char *section, const char *key, const char *value)
{
    struct settings_reader *r = context;
    char where[SETTINGS_MAX_PATH + 16];
    if (r->rc != ERR_OK)
        return 0;
    snprintf(where, sizeof where, "%s:%u", r->path, r->line);
    const struct settings_row *row = settings_find(section, key);
    if (row == NULL) {
        r->rc = settings_refuse_key(where, section, key, r->e);
        return 0;
    }
    struct settings_value *v = &r->settings->values[row - settings_rows];
    if (v->line != 0)
        r->rc = err_set(r->e, ERR_ARGUMENT, "%s: [%s] %s is set twice; first in line %u", where,
                        section, key, v->line);
    else
        r->rc = settings_put(r->settings, row, value, where, r->e);
    v->line = r->line;
    return r->rc == ERR_OK;
}

/* Reads at most SETTINGS_MAX_FILE bytes. Gives *ret; free with alloc_free. */
static enum err_code settings_slurp(int fd, const char *path, char **ret, size_t *ret_size,
                                    struct err *e)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return err_set_os(e, ERR_IO, errno, "%s", path);
    if (S_ISDIR(st.st_mode))
        return err_set(e, ERR_IO, "%s is a directory, not a file of settings", path);
    if (!S_ISREG(st.st_mode) && !S_ISCHR(st.st_mode))
        return err_set(e, ERR_IO, "%s is not a regular file", path);
    char *data = alloc_get(ALLOC_CONFIG, SETTINGS_MAX_FILE + 1);
    if (data == NULL)
        return err_set(e, ERR_NOMEM, "%s: no memory to read it", path);
    size_t n = 0;
    ssize_t got = 1;
    while (got != 0 && n <= SETTINGS_MAX_FILE) {
        got = read(fd, data + n, SETTINGS_MAX_FILE + 1 - n);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0) {
            int saved = errno;
            alloc_free(data);
            return err_set_os(e, ERR_IO, saved, "%s", path);
        }
        n += (size_t)got;
    }
    if (n > SETTINGS_MAX_FILE) {
        alloc_free(data);
        return err_set(e, ERR_FORMAT, "%s is larger than 1 MiB: not a file of settings", path);
    }
    *ret = data;
    *ret_size = n;
    return ERR_OK;
}

static enum err_code settings_parse(struct settings *s, const char *path, const char *data,
                                    size_t n, struct err *e)
{
    struct settings_reader r = {.settings = s, .path = path, .at = data, .end = data + n, .e = e};
    static const char mark[] = "\xEF\xBB\xBF"; /* byte order mark */
    if (n >= 3 && memcmp(data, mark, 3) == 0)
        r.at += 3;
    const char *nul = memchr(data, '\0', n);
    if (nul != NULL) {
        for (const char *p = data; p < nul; p++)
            r.line += *p == '\n';
        r.line++;
        return settings_refuse_line(&r, ERR_FORMAT, "a NUL byte: not a text file");
    }
    int bad = ini_parse_stream(settings_read_line, &r, settings_on_key, &r);
    if (r.rc == ERR_OK && bad > 0) {
        r.line = (unsigned)bad;
        return settings_refuse_line(&r, ERR_FORMAT, "neither a [section] nor key = value");
    }
    if (r.rc == ERR_OK && bad < 0)
        return err_set(e, ERR_NOMEM, "%s: no memory to read it", path);
    return r.rc;
}

/* A file that is not there is an error only where it `must` be. *ret_read: it was there. */
static enum err_code settings_read_file(struct settings *s, const char *path, bool must,
                                        bool *ret_read, struct err *e)
{
    char *data = NULL;
    size_t n = 0;
    *ret_read = false;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && !must && (errno == ENOENT || errno == ENOTDIR))
        return ERR_OK;
    if (fd < 0)
        return err_set_os(e, ERR_IO, errno, "settings file %s", path);
    enum err_code rc = settings_slurp(fd, path, &data, &n, e);
    close(fd);
    if (rc == ERR_OK)
        rc = settings_parse(s, path, data, n, e);
    alloc_free(data);
    if (rc != ERR_OK)
        return rc;
    s->path = alloc_text(ALLOC_CONFIG, path, strlen(path));
    if (s->path == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the settings");
    *ret_read = true;
    return ERR_OK;
}

/* The usual places, the first file that exists. */
static enum err_code settings_read_usual(struct settings *s, struct err *e)
{
    const char *xdg = getenv("XDG_CONFIG_HOME"), *home = getenv("HOME");
    char paths[3][SETTINGS_MAX_PATH] = {"", "", "/etc/islet/islet.conf"};
    bool found = false;
    enum err_code rc = ERR_OK;
    if (xdg != NULL && xdg[0] == '/')
        snprintf(paths[0], sizeof paths[0], "%.4000s/islet/islet.conf", xdg);
    if (home != NULL && home[0] == '/')
        snprintf(paths[1], sizeof paths[1], "%.4000s/.config/islet/islet.conf", home);
    for (size_t i = 0; i < 3 && !found && rc == ERR_OK; i++)
        if (paths[i][0] != '\0')
            rc = settings_read_file(s, paths[i], false, &found, e);
    return rc;
}

/* ---- --set ----------------------------------------------------------------------------------- */

/* "section.key=value" */
static enum err_code settings_override(struct settings *s, const char *set, struct err *e)
{
    char section[SETTINGS_NAME_BYTES], key[SETTINGS_NAME_BYTES];
    const char *dot = strchr(set, '.'), *equals = strchr(set, '=');
    if (equals == NULL || dot == NULL || dot > equals || dot == set || equals - dot < 2)
        return err_set(e, ERR_ARGUMENT,
                       "--set %.80s: expected section.key=value, for example server.queue=8", set);
    snprintf(section, sizeof section, "%.*s", (int)(dot - set), set);
    snprintf(key, sizeof key, "%.*s", (int)(equals - dot - 1), dot + 1);
    const struct settings_row *row = settings_find(section, key);
    if (row == NULL)
        return settings_refuse_key("--set", section, key, e);
    return settings_put(s, row, equals + 1, "--set", e);
}

/* ---- public ---------------------------------------------------------------------------------- */

enum err_code settings_load(const char *path, const char *const *sets, unsigned n_set,
                            struct settings **ret, struct err *e)
{
    bool found;
    struct settings *s = alloc_zero(ALLOC_CONFIG, 1, sizeof *s);
    if (s == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the settings");
    enum err_code rc = ERR_OK;
    for (size_t i = 0; i < SETTING_N && rc == ERR_OK; i++)
        rc = settings_put(s, &settings_rows[i], settings_rows[i].value, NULL, e);
    if (rc == ERR_OK && path != NULL)
        rc = settings_read_file(s, path, true, &found, e);
    else if (rc == ERR_OK)
        rc = settings_read_usual(s, e);
    for (unsigned i = 0; i < n_set && rc == ERR_OK; i++)
        rc = settings_override(s, sets[i], e);
    if (rc != ERR_OK) {
        settings_free(s);
        return rc;
    }
    *ret = s;
    return ERR_OK;
}

void settings_free(struct settings *s)
{
    if (s == NULL)
        return;
    for (size_t i = 0; i < SETTING_N; i++) {
        alloc_free(s->values[i].text);
        alloc_free(s->values[i].origin);
    }
    alloc_free(s->path);
    alloc_free(s);
}

const char *settings_text(const struct settings *s, enum setting_id id)
{
    return s->values[id].text;
}

uint64_t settings_count(const struct settings *s, enum setting_id id)
{
    assert(settings_rows[id].kind == SETTINGS_COUNT);
    return s->values[id].number;
}

bool settings_is_auto(const struct settings *s, enum setting_id id)
{
    return strcmp(s->values[id].text, "auto") == 0;
}

uint64_t settings_bytes(const struct settings *s, enum setting_id id)
{
    assert(settings_rows[id].kind == SETTINGS_SIZE && !settings_is_auto(s, id));
    return s->values[id].number;
}

int64_t settings_ms(const struct settings *s, enum setting_id id)
{
    assert(settings_rows[id].kind == SETTINGS_TIME);
    return (int64_t)s->values[id].number;
}

unsigned settings_choice(const struct settings *s, enum setting_id id)
{
    assert(settings_rows[id].kind == SETTINGS_CHOICE);
    return (unsigned)s->values[id].number;
}

const char *settings_origin(const struct settings *s, enum setting_id id)
{
    return s->values[id].origin != NULL ? s->values[id].origin : "default";
}

const char *settings_path(const struct settings *s)
{
    return s->path != NULL ? s->path : "";
}

void settings_diff(const struct settings *a, const struct settings *b,
                   void (*fn)(void *context, enum setting_id id, bool reloadable), void *context)
{
    for (size_t i = 0; i < SETTING_N; i++) {
        enum settings_kind kind = settings_rows[i].kind;
        bool same = strcmp(a->values[i].text, b->values[i].text) == 0;
        /* "1 min" and "60 s" are one value, but "auto" is none of the numbers. */
        if (!same && (kind == SETTINGS_SIZE || kind == SETTINGS_TIME || kind == SETTINGS_COUNT))
            same = a->values[i].number == b->values[i].number &&
                   !settings_is_auto(a, (enum setting_id)i) &&
                   !settings_is_auto(b, (enum setting_id)i);
        if (!same)
            fn(context, (enum setting_id)i, settings_rows[i].reloadable);
    }
}

/* "0 to 256", "a|b|c", "text" */
static void settings_print_range(FILE *out, const struct settings_row *row)
{
    static const char *const kinds[] = {"text", "path", "whole number", "size", "time", ""};
    fputs(kinds[row->kind], out);
    if (row->kind == SETTINGS_CHOICE)
        fputs(row->low, out);
    else if (row->low != NULL)
        fprintf(out, ", %s to %s", row->low, row->high);
    if (row->kind == SETTINGS_SIZE && settings_explains(row, "auto"))
        fputs(", or auto", out);
    if (row->kind == SETTINGS_TIME && settings_explains(row, "off"))
        fputs(", or off", out);
}

/* Words of `text` in lines that begin with `indent`. */
static void settings_print_wrapped(FILE *out, const char *indent, const char *text)
{
    size_t column = 0;
    while (*text != '\0') {
        size_t n = strcspn(text, " ");
        if (column > 0 && column + 1 + n > SETTINGS_HELP_WIDTH) {
            fputc('\n', out);
            column = 0;
        }
        if (column == 0)
            column = (size_t)fprintf(out, "%s", indent) + n;
        else
            column += (size_t)fprintf(out, " ") + n;
        fwrite(text, 1, n, out);
        text += n + (text[n] == ' ');
    }
    fputc('\n', out);
}

void settings_print_help(FILE *out)
{
    for (size_t i = 0; i < SETTING_N; i++) {
        const struct settings_row *row = &settings_rows[i];
        fprintf(out, "%s = %s\n    (", row->name, row->value[0] != '\0' ? row->value : "(empty)");
        settings_print_range(out, row);
        fprintf(out, "; %s)\n",
                row->reloadable ? "SIGHUP applies a change" : "a change needs a restart");
        settings_print_wrapped(out, "    ", row->help);
    }
}

void settings_print_example(FILE *out)
{
    const char *section = "";
    fputs("# islet.conf: the settings of isletd and islet-gateway, every key with its default.\n"
          "# Sizes: 12 GiB, 1.5 MiB. Times: 50 ms, 2 min. A comment begins a line with # or ;, or\n"
          "# follows a value after \" ;\". A line has at most 198 bytes; --set section.key=value\n"
          "# has no such limit and overrides this file.\n",
          out);
    for (size_t i = 0; i < SETTING_N; i++) {
        const struct settings_row *row = &settings_rows[i];
        if (strcmp(section, row->section) != 0)
            fprintf(out, "\n[%s]\n", row->section);
        else
            fputc('\n', out);
        section = row->section;
        settings_print_wrapped(out, "# ", row->help);
        fputs("# (", out);
        settings_print_range(out, row);
        fprintf(out, "; %s)\n",
                row->reloadable ? "SIGHUP applies a change" : "a change needs a restart");
        fprintf(out, "%s =%s%s\n", row->key, row->value[0] != '\0' ? " " : "", row->value);
    }
}

const char *settings_name(enum setting_id id)
{
    return settings_rows[id].name;
}
