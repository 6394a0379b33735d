/* The strict check of a request's head, and of trailers, in front of llhttp: what llhttp lets pass
 * and a server behind a proxy must not. Pure; bytes come in pieces of any size, and a bad byte is
 * refused when it is seen. Thread: any. */
#ifndef ISLET_GW_HEAD_H
#define ISLET_GW_HEAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gw_http.h"
#include "gw_limits.h"

enum {
    GW_HEAD_FIELDS = 100
};

enum gw_head_result {
    GW_HEAD_MORE,
    GW_HEAD_DONE,
    GW_HEAD_FAILED,
    GW_HEAD_ALIEN
};

struct gw_head_field {
    uint32_t name, value; /* offsets in the head */
    uint32_t n_name, n_value;
};

struct gw_head {
    const struct gw_limits *limits; /* borrowed */
    int state;
    bool is_trailer;
    uint8_t n_blank;   /* leading CRLFs */
    uint32_t size;     /* bytes of the head so far, leading blank lines not counted */
    uint32_t n_method; /* bytes of the method */
    uint32_t target;   /* offset of the target */
    uint32_t n_target; /* bytes of the target */
    uint32_t n_fields;
    char version[8]; /* "HTTP/1.1" as it comes in */
    uint8_t n_version;
    struct gw_head_field fields[GW_HEAD_FIELDS]; /* a head's; a trailer's are only counted */
    char name[32];                               /* of a trailer field, lower case, cut */
    struct gw_http_failure failure;
};

void gw_head_init(struct gw_head *h, const struct gw_limits *limits, bool is_trailer);
/* Looks at n bytes that follow those seen so far; *ret_used counts those that belong to the head.
 * Of these the last (size after - size before) bytes are the head's, the ones before are blank
 * lines in front of it. */
enum gw_head_result gw_head_scan(struct gw_head *h, const char *bytes, size_t n, size_t *ret_used);

/* After DONE, with the collected head (h->size bytes): fills all of *r but the body. False:
 * h->failure says why. The texts in *r point into head; r->fields is not set. */
bool gw_head_judge(struct gw_head *h, const char *head, struct gw_http_request *r);

bool gw_head_token_byte(uint8_t c);

#endif
