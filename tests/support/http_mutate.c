#include "http_mutate.h"

#include <string.h>

#include "http_shapes.h"
#include "rng.h"

struct dice {
    uint64_t seed;
    uint32_t at;
};

static uint32_t roll(struct dice *d, size_t sides)
{
    return (uint32_t)(rng_draw(d->seed, d->at++) % (sides > 0 ? sides : 1));
}

static const char *const words[] = {
    "\r\n",
    "\n",
    "\r",
    " ",
    "\t",
    ":",
    "0",
    "chunked",
    "Content-Length: 2\r\n",
    "Transfer-Encoding: chunked\r\n",
    "Host: a\r\n",
    "Connection: close\r\n",
    "Expect: 100-continue\r\n",
    "HTTP/1.1",
    "HTTP/1.0",
    "0\r\n\r\n",
    "2\r\n{}\r\n",
    ";a=b",
    "ffffffff",
    "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "\\ud83d",
    "\"",
    "{",
    "[",
    "}",
    "1e999",
    "null",
};

static const char *const bodies[] = {
    "{\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"max_tokens\":1,\"temperature\":0}",
    "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\\ud83d b\"}]}],\"max_tokens\":0}",
    "{\"prompt\":[1,2,3],\"max_tokens\":1,\"logit_bias\":{\"5\":-100},\"stop\":[\"x\",\"\"],\"stream\":true}",
    "{\"content\":\"one two\",\"add_special\":true,\"with_pieces\":true}",
};

/* A sound request with a JSON body, sometimes in chunks of one to eight bytes. */
static void compose(struct dice *d, struct buf *out)
{
    static const char *const paths[] = {"/v1/chat/completions", "/v1/completions", "/tokenize",
                                        "/apply-template"};
    const char *body = bodies[roll(d, 4)];
    size_t n = strlen(body);
    buf_format(out, "POST %s HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n",
               paths[roll(d, 4)]);
    if (roll(d, 2) == 0) {
        buf_format(out, "Content-Length: %zu\r\n\r\n%s", n, body);
        return;
    }
    buf_text(out, "Transfer-Encoding: chunked\r\n\r\n");
    for (size_t at = 0; at < n;) {
        size_t piece = 1 + roll(d, 8);
        piece = piece < n - at ? piece : n - at;
        buf_format(out, "%zx\r\n%.*s\r\n", piece, (int)piece, body + at);
        at += piece;
    }
    buf_text(out, "0\r\n\r\n");
}

static void start(struct dice *d, struct buf *out)
{
    if (roll(d, 2) == 0) {
        compose(d, out);
        return;
    }
    const struct http_shape *s = &http_shapes[roll(d, http_shapes_count)];
    buf_append(out, s->bytes, s->n);
}

static void insert(struct buf *out, size_t at, const void *bytes, size_t n)
{
    struct buf tail = BUF_INIT(SIZE_MAX);
    buf_append(&tail, out->data + at, out->size - at);
    out->size = at;
    buf_append(out, bytes, n);
    buf_append(out, tail.data, tail.size);
    buf_done(&tail);
}

static void damage(struct dice *d, struct buf *out)
{
    size_t at = roll(d, out->size), n = 1 + roll(d, 8);
    n = n < out->size - at ? n : out->size - at;
    const char *word = words[roll(d, sizeof words / sizeof words[0])];
    switch (roll(d, 6)) {
    case 0:
        out->data[at] = (uint8_t)roll(d, 256);
        break;
    case 1:
        out->data[at] ^= 0x20;
        break;
    case 2:
        memmove(out->data + at, out->data + at + n, out->size - at - n);
        out->size -= n;
        break;
    case 3: {
        uint8_t copy[8];
        memcpy(copy, out->data + at, n);
        insert(out, roll(d, out->size), copy, n);
        break;
    }
    case 4:
        insert(out, at, word, strlen(word));
        break;
    default:
        start(d, out); /* another request behind this one */
    }
}

void http_mutate(uint64_t seed, uint32_t index, struct buf *out)
{
    struct dice d = {.seed = rng_draw(seed, index)};
    buf_clear(out);
    start(&d, out);
    for (uint32_t times = roll(&d, 5); times > 0 && out->size > 0; times--)
        damage(&d, out);
}
