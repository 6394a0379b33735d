#include "gw_recent.h"

#include <string.h>

#include <xxhash.h>

#include "gw_request.h"

uint64_t gw_recent_key(struct gw_http_text key)
{
    return key.n > 0 ? XXH3_64bits(key.p, key.n) : 0;
}

static void remove_at(struct gw_recent *r, size_t i)
{
    struct gw_request *q = r->entries[i].q;
    r->n--;
    memmove(&r->entries[i], &r->entries[i + 1], (r->n - i) * sizeof *r->entries);
    gw_request_drop(q);
}

static void expire(struct gw_recent *r, uint64_t now_ns)
{
    while (r->n > 0 && now_ns - r->entries[0].at_ns >= GW_RECENT_KEEP_S * 1000000000ull)
        remove_at(r, 0);
}

static size_t index_of(const struct gw_recent *r, struct gw_http_text id, uint64_t key)
{
    size_t i = r->n;
    while (i-- > 0)
        if (r->entries[i].key == key && strlen(r->entries[i].q->client_id) == id.n &&
            memcmp(r->entries[i].q->client_id, id.p, id.n) == 0)
            return i;
    return SIZE_MAX;
}

static size_t bytes_of(const struct gw_recent *r)
{
    size_t bytes = 0;
    for (size_t i = 0; i < r->n; i++)
        bytes += gw_request_bytes(r->entries[i].q);
    return bytes;
}

void gw_recent_put(struct gw_recent *r, struct gw_request *q, uint64_t key, uint64_t now_ns)
{
    struct gw_http_text id = {q->client_id, strlen(q->client_id)};
    expire(r, now_ns);
    size_t i = index_of(r, id, key);
    if (i != SIZE_MAX)
        remove_at(r, i);
    while (r->n == GW_RECENT_MAX || (r->n > 0 && bytes_of(r) > GW_RECENT_MAX_BYTES))
        remove_at(r, 0);
    r->entries[r->n++] = (struct gw_recent_entry){gw_request_keep(q), key, now_ns};
}

struct gw_request *gw_recent_find(struct gw_recent *r, struct gw_http_text id, uint64_t key,
                                  uint64_t now_ns)
{
    expire(r, now_ns);
    size_t i = index_of(r, id, key);
    return i != SIZE_MAX ? r->entries[i].q : NULL;
}

void gw_recent_done(struct gw_recent *r)
{
    while (r->n > 0)
        remove_at(r, r->n - 1);
}
