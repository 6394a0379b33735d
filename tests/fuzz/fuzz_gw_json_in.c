/* Any bytes: refused with a text, or an object. What goes in again as jansson writes it gives the
 * same object. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "gw_json_in.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct err e = {0};
    json_t *root = NULL, *again = NULL;
    char *body = malloc(n > 0 ? n : 1);
    if (!body)
        return 0;
    if (n > 0)
        memcpy(body, data, n);
    if (gw_json_in_parse(body, n, &root, &e) == ERR_OK) {
        char *text = json_dumps(root, JSON_COMPACT | JSON_REAL_PRECISION(17));
        if (!text || gw_json_in_parse(text, strlen(text), &again, NULL) != ERR_OK ||
            !json_equal(root, again))
            abort();
        free(text);
    } else if (e.text[0] == '\0') {
        abort();
    }
    json_decref(root);
    json_decref(again);
    free(body);
    return 0;
}
