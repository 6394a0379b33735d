#include "gw_config.h"

#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/un.h>

#include "settings.h"

#define BLANKS " \t"

/* One item between commas holds no blank inside. */
static enum err_code item_check(const struct settings *s, enum setting_id id, const char *item,
                                size_t n, struct err *e)
{
    char right[120];
    size_t out = 0, blanks = 0;
    while (n > 0 && strchr(BLANKS, item[n - 1]))
        n--;
    for (size_t i = 0; i < n && out + 3 < sizeof right; i++) {
        bool blank = strchr(BLANKS, item[i]) != NULL;
        if (blank && right[out - 1] != ' ') {
            right[out++] = ',';
            right[out++] = ' ';
            blanks++;
        } else if (!blank) {
            right[out++] = item[i];
        }
    }
    right[out] = '\0';
    if (blanks == 0)
        return ERR_OK;
    return err_set(e, ERR_ARGUMENT,
                   "%s (%s): \"%.*s\" holds a blank; items are separated by commas: %s",
                   settings_name(id), settings_origin(s, id), n < 80 ? (int)n : 80, item, right);
}

static enum err_code list_check(const struct settings *s, enum setting_id id, struct err *e)
{
    enum err_code code = ERR_OK;
    for (const char *p = settings_text(s, id); code == ERR_OK && *p != '\0';) {
        p += strspn(p, "," BLANKS);
        size_t n = strcspn(p, ",");
        code = item_check(s, id, p, n, e);
        p += n;
    }
    return code;
}

static enum err_code socket_check(const struct settings *s, enum setting_id id, struct err *e)
{
    const char *path = settings_text(s, id);
    size_t n = strlen(path),
           most = sizeof(struct sockaddr_un) - offsetof(struct sockaddr_un, sun_path) - 1;
    if (n <= most)
        return ERR_OK;
    return err_set(e, ERR_ARGUMENT,
                   "%s (%s): the path has %zu bytes, and that of a socket at most %zu: choose a "
                   "shorter one than %.60s...",
                   settings_name(id), settings_origin(s, id), n, most, path);
}

enum err_code gw_config_check(const struct settings *s, struct err *e)
{
    static const enum setting_id lists[] = {SETTING_server_hosts, SETTING_server_cors,
                                            SETTING_server_listen, SETTING_model_alias};
    enum err_code code = socket_check(s, SETTING_worker_socket, e);
    if (code == ERR_OK)
        code = socket_check(s, SETTING_server_socket, e);
    for (size_t i = 0; code == ERR_OK && i < sizeof lists / sizeof *lists; i++)
        code = list_check(s, lists[i], e);
    return code;
}
