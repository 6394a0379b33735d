/* Bodies of /v1/chat/completions and /v1/completions (first byte odd): any bytes are refused or
 * give a checked struct whose values are inside their ranges. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "gw_chat_request.h"
#include "gw_json_in.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void must(bool ok)
{
    if (!ok)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const struct gw_chat_request_limits limits = {2048, 4096, 32};
    struct gw_chat_request q;
    struct gw_refusal refusal;
    struct err e = {0};
    json_t *root = NULL;
    if (n == 0)
        return 0;
    enum gw_chat_request_kind kind =
        (data[0] & 1) != 0 ? GW_CHAT_REQUEST_COMPLETION : GW_CHAT_REQUEST_CHAT;
    char *body = malloc(n);
    must(body != NULL);
    memcpy(body, data + 1, n - 1);
    if (gw_json_in_parse(body, n - 1, &root, &e) == ERR_OK &&
        gw_chat_request_parse(root, kind, &limits, &q, &refusal)) {
        must(q.temperature >= 0 && q.temperature <= 10 && q.top_p >= 0 && q.top_p <= 1);
        must(q.n >= 1 && q.n <= 8 && q.max_new >= -1 && q.seed >= -1);
        must(q.n_stops <= GW_CHAT_REQUEST_MAX_STOPS && q.n_bias <= GW_CHAT_REQUEST_MAX_BIAS);
        must((kind == GW_CHAT_REQUEST_CHAT) == (q.messages != NULL));
        must(strpbrk(q.ignored, "\r\n") == NULL);
        gw_chat_request_done(&q);
    }
    json_decref(root);
    free(body);
    return 0;
}
