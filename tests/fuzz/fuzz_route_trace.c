/* Traces of routes: any bytes either make whole steps within the head's limits or one clear line,
 * and leave nothing behind. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "alloc.h"
#include "route_trace.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void fuzz_check(int ok)
{
    if (!ok)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint64_t live = alloc_live_blocks();
    struct route_trace_file f = {.n_steps = 0};
    struct err e = {.code = ERR_OK};
    const enum err_code code = route_trace_parse(data, size, &f, &e);
    fuzz_check(code == e.code && (code == ERR_OK) == (e.text[0] == '\0'));
    fuzz_check(strchr(e.text, '\n') == NULL);
    if (code == ERR_OK) {
        const uint64_t n = f.n_rows * f.shape.n_layer * f.shape.n_used;
        fuzz_check(f.step_first[f.n_steps] == f.n_rows && f.cut_bytes <= size);
        for (uint64_t i = 0; i < n; i++)
            fuzz_check(f.ids[i] < f.shape.n_expert);
    }
    route_trace_file_done(&f);
    fuzz_check(alloc_live_blocks() == live);
    return 0;
}
