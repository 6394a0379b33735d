/* Who may ask: Host, Origin, key, media type. Pure decisions on a head; the policy is immutable and
 * replaced as a whole by a reload. */
#ifndef ISLET_GW_AUTH_H
#define ISLET_GW_AUTH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "err.h"
#include "gw_http.h"

/* The listener that a connection came in on. */
struct gw_auth_listener {
    bool is_unix;
    uint8_t ip[16]; /* the bound address, network order */
    uint8_t n_ip;   /* 4 or 16; 0 for a Unix socket */
};

struct gw_auth; /* allowed hosts and origins, keys */

/* hosts, cors: texts of server.hosts and server.cors. key_file: "" or a file with one key per line,
 * '#' starts a comment, blank lines are skipped; without any key none is asked for (and only
 * loopback may be listened on). Gives *ret; free with gw_auth_free. Errors name the setting, or
 * file and line. */
enum err_code gw_auth_new(const char *hosts, const char *cors, const char *key_file,
                          struct gw_auth **ret, struct err *e) __attribute__((warn_unused_result));
void gw_auth_free(struct gw_auth *a); /* NULL is fine; wipes the keys */
bool gw_auth_asks_key(const struct gw_auth *a);

bool gw_auth_host_allowed(const struct gw_auth *a, const struct gw_auth_listener *l,
                          struct gw_http_text host);
bool gw_auth_origin_allowed(const struct gw_auth *a, struct gw_http_text origin);
/* Origin and Sec-Fetch-Site of a request. */
bool gw_auth_page_allowed(const struct gw_auth *a, const struct gw_http_request *r);
/* The key that a request shows (Bearer or x-api-key), n 0 if none. */
struct gw_http_text gw_auth_key_of(const struct gw_http_request *r);
/* Constant time in the keys. True also when no key is asked for. */
bool gw_auth_key_allowed(const struct gw_auth *a, struct gw_http_text key);
/* Content-Type and Content-Encoding of a POST. */
bool gw_auth_media_allowed(const struct gw_http_request *r);

#endif
