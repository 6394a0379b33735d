#include "gw_auth.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "alloc.h"
#include "buf.h"

enum {
    KEY_BYTES = 512,
    KEYS = 1024
};

struct
    words { /* of a comma-separated setting; each ends with a NUL, one more NUL behind the last */
    char *text;
};

struct gw_auth {
    struct words hosts, origins;
    size_t n_keys;
    char (*keys)[KEY_BYTES]; /* zero-padded */
};

/* ---- settings -------------------------------------------------------------------------------- */

/* Splits at commas and white space. */
static enum err_code words_new(struct words *w, const char *setting, struct err *e)
{
    size_t n = strlen(setting), out = 0;
    char *text = alloc_zero(ALLOC_CONFIG, n + 2, 1);
    if (text == NULL)
        return err_set(e, ERR_NOMEM, "no memory for server.hosts or server.cors");
    for (size_t i = 0; i <= n; i++) {
        char c = setting[i];
        if (c != '\0' && strchr(", \t", c) == NULL)
            text[out++] = c;
        else if (out > 0 && text[out - 1] != '\0')
            text[out++] = '\0';
    }
    text[out] = '\0';
    w->text = text;
    return ERR_OK;
}

#define words_each(word, words) \
    for (const char *word = (words).text; *word != '\0'; word += strlen(word) + 1)

static enum err_code key_add(struct gw_auth *a, const char *file, unsigned line, const char *key,
                             size_t n, struct err *e)
{
    if (n >= KEY_BYTES)
        return err_set(e, ERR_FORMAT, "%s:%u: the key has %zu bytes, at most %d are allowed", file,
                       line, n, KEY_BYTES - 1);
    for (size_t i = 0; i < n; i++)
        if (key[i] < 0x21 || key[i] > 0x7E)
            return err_set(e, ERR_FORMAT,
                           "%s:%u: a key may hold printable ASCII without spaces only", file, line);
    if (a->n_keys == KEYS)
        return err_set(e, ERR_LIMIT, "%s:%u: more than %d keys", file, line, KEYS);
    char(*keys)[KEY_BYTES] = alloc_zero(ALLOC_CONFIG, a->n_keys + 1, KEY_BYTES);
    if (keys == NULL)
        return err_set(e, ERR_NOMEM, "%s: no memory for the keys", file);
    if (a->keys != NULL) {
        memcpy(keys, a->keys, a->n_keys * KEY_BYTES);
        explicit_bzero(a->keys, a->n_keys * KEY_BYTES);
        alloc_free(a->keys);
    }
    memcpy(keys[a->n_keys], key, n);
    a->keys = keys;
    a->n_keys++;
    return ERR_OK;
}

static enum err_code keys_read(struct gw_auth *a, const char *file, struct err *e)
{
    FILE *f = fopen(file, "re");
    if (f == NULL)
        return err_set_os(e, ERR_ARGUMENT, errno, "server.api_key_file: cannot open %s", file);
    char line[2 * KEY_BYTES];
    enum err_code code = ERR_OK;
    unsigned at = 0;
    while (code == ERR_OK && fgets(line, sizeof line, f) != NULL) {
        at++;
        size_t n = strlen(line);
        if (n + 1 == sizeof line)
            code = err_set(e, ERR_FORMAT, "%s:%u: the line is too long for a key", file, at);
        while (n > 0 && strchr(" \t\r\n", line[n - 1]) != NULL)
            n--;
        size_t from = strspn(line, " \t");
        if (code == ERR_OK && from < n && line[from] != '#')
            code = key_add(a, file, at, line + from, n - from, e);
    }
    if (code == ERR_OK && ferror(f))
        code = err_set_os(e, ERR_IO, errno, "server.api_key_file: cannot read %s", file);
    if (code == ERR_OK && a->n_keys == 0) /* an emptied file must not open the door */
        code = err_set(e, ERR_ARGUMENT,
                       "server.api_key_file: %s holds no key; write one a line, or leave the "
                       "setting empty to ask for none",
                       file);
    explicit_bzero(line, sizeof line);
    fclose(f);
    return code;
}

enum err_code gw_auth_new(const char *hosts, const char *cors, const char *key_file,
                          struct gw_auth **ret, struct err *e)
{
    struct gw_auth *a = alloc_zero(ALLOC_CONFIG, 1, sizeof *a);
    if (a == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the access rules");
    enum err_code code = words_new(&a->hosts, hosts, e);
    if (code == ERR_OK)
        code = words_new(&a->origins, cors, e);
    if (code == ERR_OK)
        words_each(origin, a->origins) if (code == ERR_OK && strstr(origin, "://") == NULL) code =
            err_set(e, ERR_ARGUMENT,
                    "server.cors: %.100s is no origin; write https://name:port or scheme://*",
                    origin);
    if (code == ERR_OK && key_file[0] != '\0')
        code = keys_read(a, key_file, e);
    if (code != ERR_OK) {
        gw_auth_free(a);
        return code;
    }
    *ret = a;
    return ERR_OK;
}

void gw_auth_free(struct gw_auth *a)
{
    if (a == NULL)
        return;
    alloc_free(a->hosts.text);
    alloc_free(a->origins.text);
    if (a->keys != NULL)
        explicit_bzero(a->keys, a->n_keys * KEY_BYTES);
    alloc_free(a->keys);
    alloc_free(a);
}

bool gw_auth_asks_key(const struct gw_auth *a)
{
    return a->n_keys > 0;
}

/* ---- Host and Origin ------------------------------------------------------------------------- */

/* The name or address of "host:port", "[v6]:port"; one dot behind a name goes. */
static struct gw_http_text host_part(struct gw_http_text host)
{
    size_t n = 0;
    if (host.n > 0 && host.p[0] == '[') {
        const char *end = memchr(host.p, ']', host.n);
        return end == NULL ? (struct gw_http_text){0}
                           : (struct gw_http_text){host.p, (size_t)(end - host.p) + 1};
    }
    while (n < host.n && host.p[n] != ':')
        n++;
    if (n > 0 && host.p[n - 1] == '.')
        n--;
    return (struct gw_http_text){host.p, n};
}

static bool ends_with_word(struct gw_http_text text, const char *end)
{
    size_t n = strlen(end);
    return text.n > n && strncasecmp(text.p + text.n - n, end, n) == 0;
}

/* Reads an IP literal ([v6] or v4); returns its bytes, 0 if it is none. */
static uint8_t parse_ip(struct gw_http_text part, uint8_t ip[16])
{
    char text[INET6_ADDRSTRLEN];
    bool v6 = part.n > 2 && part.p[0] == '[';
    size_t n = v6 ? part.n - 2 : part.n;
    if (n == 0 || n >= sizeof text)
        return 0;
    memcpy(text, part.p + v6, n);
    text[n] = '\0';
    if (inet_pton(v6 ? AF_INET6 : AF_INET, text, ip) != 1)
        return 0;
    return v6 ? 16 : 4;
}

static bool loopback(const uint8_t *ip, uint8_t n)
{
    static const uint8_t one[16] = {[15] = 1};
    static const uint8_t mapped[13] = {[10] = 0xFF, 0xFF, 127};
    if (n == 4)
        return ip[0] == 127;
    return n == 16 && (memcmp(ip, one, 16) == 0 || memcmp(ip, mapped, sizeof mapped) == 0);
}

bool gw_auth_host_allowed(const struct gw_auth *a, const struct gw_auth_listener *l,
                          struct gw_http_text host)
{
    if (l->is_unix)
        return true;
    struct gw_http_text part = host_part(host);
    uint8_t ip[16];
    uint8_t n = parse_ip(part, ip);
    if (n > 0)
        return loopback(ip, n) || (n == l->n_ip && memcmp(ip, l->ip, n) == 0);
    if (gw_http_text_is_word(part, "localhost") || ends_with_word(part, ".localhost"))
        return true;
    words_each(name, a->hosts) if (part.n > 0 && gw_http_text_is_word(part, name)) return true;
    return false;
}

/* True where `origin` is scheme "://" host, or that and a port of digits. */
static bool origin_is_local(struct gw_http_text origin)
{
    static const char *const schemes[] = {"http://", "https://"};
    static const char *const hosts[] = {"localhost", "127.0.0.1", "[::1]"};
    for (size_t s = 0; s < 2; s++) {
        size_t k = strlen(schemes[s]);
        if (origin.n <= k || strncasecmp(origin.p, schemes[s], k) != 0)
            continue;
        for (size_t h = 0; h < 3; h++) {
            size_t n = strlen(hosts[h]);
            if (origin.n - k < n || strncasecmp(origin.p + k, hosts[h], n) != 0)
                continue;
            struct gw_http_text port = {origin.p + k + n, origin.n - k - n};
            size_t i = 1;
            while (i < port.n && port.p[i] >= '0' && port.p[i] <= '9')
                i++;
            if (port.n == 0 || (port.p[0] == ':' && port.n > 1 && i == port.n))
                return true;
        }
    }
    return false;
}

bool gw_auth_origin_allowed(const struct gw_auth *a, struct gw_http_text origin)
{
    if (gw_http_text_is_word(origin, "null"))
        return false;
    for (size_t i = 0; i < origin.n; i++) /* it is echoed */
        if (origin.p[i] < 0x21 || origin.p[i] > 0x7E || origin.p[i] == ',')
            return false;
    if (origin_is_local(origin))
        return true;
    words_each(allowed, a->origins)
    {
        size_t n = strlen(allowed);
        bool any = n > 4 && strcmp(allowed + n - 4, "://*") == 0;
        if (any ? origin.n > n - 1 && strncasecmp(origin.p, allowed, n - 1) == 0
                : gw_http_text_is_word(origin, allowed))
            return true;
    }
    return false;
}

bool gw_auth_page_allowed(const struct gw_auth *a, const struct gw_http_request *r)
{
    size_t n = gw_http_count(r, "origin");
    if (n > 1)
        return false;
    if (n == 1)
        return gw_auth_origin_allowed(a, gw_http_field(r, "origin"));
    return !gw_http_text_is_word(gw_http_field(r, "sec-fetch-site"), "cross-site");
}

/* ---- key ------------------------------------------------------------------------------------- */

struct gw_http_text gw_auth_key_of(const struct gw_http_request *r)
{
    struct gw_http_text value = gw_http_field(r, "authorization");
    if (value.n > 7 && strncasecmp(value.p, "bearer ", 7) == 0) {
        size_t from = 7;
        while (from < value.n && value.p[from] == ' ')
            from++;
        return (struct gw_http_text){value.p + from, value.n - from};
    }
    return gw_http_field(r, "x-api-key");
}

bool gw_auth_key_allowed(const struct gw_auth *a, struct gw_http_text key)
{
    if (a->n_keys == 0)
        return true;
    char shown[KEY_BYTES] = {0};
    bool fits = key.n > 0 && key.n < KEY_BYTES && memchr(key.p, 0, key.n) == NULL;
    if (fits)
        memcpy(shown, key.p, key.n);
    unsigned found = 0;
    for (size_t i = 0; i < a->n_keys; i++) { /* all of each, whatever the first bytes say */
        volatile unsigned differ = 0;
        for (size_t k = 0; k < KEY_BYTES; k++)
            differ |= (unsigned char)(shown[k] ^ a->keys[i][k]);
        found |= differ == 0;
    }
    explicit_bzero(shown, sizeof shown);
    return fits && found != 0;
}

/* ---- media type ------------------------------------------------------------------------------ */

static struct gw_http_text trim(struct gw_http_text t)
{
    while (t.n > 0 && (t.p[0] == ' ' || t.p[0] == '\t')) {
        t.p++;
        t.n--;
    }
    while (t.n > 0 && (t.p[t.n - 1] == ' ' || t.p[t.n - 1] == '\t'))
        t.n--;
    return t;
}

/* Cuts the text before the next ';' off *rest. */
static struct gw_http_text next_part(struct gw_http_text *rest)
{
    size_t n = 0;
    while (n < rest->n && rest->p[n] != ';')
        n++;
    struct gw_http_text part = trim((struct gw_http_text){rest->p, n});
    size_t skip = n < rest->n ? n + 1 : n;
    rest->p += skip;
    rest->n -= skip;
    return part;
}

static bool charset_allowed(struct gw_http_text parameters)
{
    while (parameters.n > 0) {
        struct gw_http_text p = next_part(&parameters);
        if (p.n < 8 || strncasecmp(p.p, "charset=", 8) != 0)
            continue;
        p.p += 8;
        p.n -= 8;
        if (p.n >= 2 && p.p[0] == '"' && p.p[p.n - 1] == '"') {
            p.p++;
            p.n -= 2;
        }
        if (!gw_http_text_is_word(p, "utf-8") && !gw_http_text_is_word(p, "utf8"))
            return false;
    }
    return true;
}

bool gw_auth_media_allowed(const struct gw_http_request *r)
{
    struct gw_http_text coding = gw_http_field(r, "content-encoding");
    if (gw_http_count(r, "content-encoding") > 1 ||
        (coding.n > 0 && !gw_http_text_is_word(coding, "identity")))
        return false;
    if (gw_http_count(r, "content-type") > 1)
        return false;
    struct gw_http_text rest = gw_http_field(r, "content-type");
    if (rest.p == NULL)
        rest.p = "";
    struct gw_http_text type = next_part(&rest);
    bool json = gw_http_text_is_word(type, "application/json") ||
                (type.n > strlen("application/+json") &&
                 strncasecmp(type.p, "application/", strlen("application/")) == 0 &&
                 ends_with_word(type, "+json"));
    if (json)
        return charset_allowed(rest);
    /* A page could send these without a preflight; a program is free to. */
    bool simple = type.n == 0 || gw_http_text_is_word(type, "text/plain") ||
                  gw_http_text_is_word(type, "application/x-www-form-urlencoded");
    bool page = gw_http_count(r, "origin") > 0 || gw_http_count(r, "sec-fetch-site") > 0;
    return simple && !page && charset_allowed(rest);
}
