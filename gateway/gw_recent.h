/* The last 256 generations, for ten minutes, so that an answer can be fetched again by its request
 * id, with the key that asked for it. Pure but for the references it holds. Thread: loop. */
#ifndef ISLET_GW_RECENT_H
#define ISLET_GW_RECENT_H

#include <stddef.h>
#include <stdint.h>

#include "gw_http.h"

struct gw_request;

enum {
    GW_RECENT_MAX = 256,
    GW_RECENT_MAX_BYTES = 64 * 1024 * 1024,
    GW_RECENT_KEEP_S = 600
};

struct gw_recent_entry {
    struct gw_request *q;
    uint64_t key; /* gw_recent_key of the API key */
    uint64_t at_ns;
};

struct gw_recent {
    struct gw_recent_entry entries[GW_RECENT_MAX]; /* oldest first */
    size_t n;
};

uint64_t gw_recent_key(struct gw_http_text key);
/* Keeps a reference; one with the same id and key is replaced, the oldest give way. */
void gw_recent_put(struct gw_recent *r, struct gw_request *q, uint64_t key, uint64_t now_ns);
/* Lends, or NULL. */
struct gw_request *gw_recent_find(struct gw_recent *r, struct gw_http_text id, uint64_t key,
                                  uint64_t now_ns);
void gw_recent_done(struct gw_recent *r);

#endif
