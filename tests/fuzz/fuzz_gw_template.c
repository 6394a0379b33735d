/* Input: a template. Compiling it probes it with conversations; a good one renders one more. */
#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

#include "alloc.h"
#include "gw_template.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char messages[] =
        "[{\"role\":\"system\",\"content\":\"s\"},{\"role\":\"user\",\"content\":\"\\u00e9 u\"},"
        "{\"role\":\"assistant\",\"content\":\"a \"}]";
    struct gw_template *t;
    struct err e = {0};
    char *text;
    size_t n;
    if (gw_template_compile((const char *)data, size,
                            &(struct gw_template_model){.bos = "<s>", .eos = "</s>"}, &t,
                            &e) != ERR_OK)
        return 0;
    json_t *m = json_loads(messages, 0, NULL);
    if (m && gw_template_render(
                 t, &(struct gw_template_input){.messages = m, .continue_final_message = true},
                 &text, &n, &e) == ERR_OK)
        alloc_free(text);
    json_decref(m);
    gw_template_free(t);
    return 0;
}
