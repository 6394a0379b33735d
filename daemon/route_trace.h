/* Which experts each row of each step used, as a file (setting route.trace): written by isletd,
 * replayed by cachesim. No text and no token is in it, but routes tell about the text: the file is
 * for its owner alone.
 *
 * Little-endian. Head: "ISLETRT1", u32 n_layer, n_expert, n_used, 0, u64 layer_bytes[n_layer].
 * A record for each step: u32 n_rows, then for each row u32 sequence, u32 position,
 * u16 ids[n_layer][n_used] in rank order. A worker that dies may leave its last record cut. */
#ifndef ISLET_ROUTE_TRACE_H
#define ISLET_ROUTE_TRACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "err.h"

enum {
    ROUTE_TRACE_MAX_LAYERS = 1024,
    ROUTE_TRACE_MAX_EXPERTS = 4096, /* of a layer */
    ROUTE_TRACE_MAX_USED = 128,
    ROUTE_TRACE_MAX_ROWS = 65536, /* of a step */
    ROUTE_TRACE_ALIGN = 4096      /* layer_bytes are multiples */
};

struct route_trace_shape {
    uint32_t n_layer, n_expert, n_used;
    const uint64_t *layer_bytes; /* [n_layer] bytes that an expert takes in memory */
};

struct route_trace;

/* Begins a new file at `path`; a trace that was there is cut to nothing, which the log says. Gives
 * *ret; free with route_trace_close. ERR_ARGUMENT: not a regular file, or one that holds something
 * else than a trace, which stays as it is; ERR_IO; ERR_NOMEM. */
enum err_code route_trace_open(const char *path, const struct route_trace_shape *shape,
                               struct route_trace **ret, struct err *e)
    __attribute__((warn_unused_result));
/* Appends a step: sequence and position [n_rows], layer_ids[layer] = [n_rows][n_used], all
 * borrowed. A failed write is logged once and ends the trace, nothing else. Engine thread. */
void route_trace_step(struct route_trace *t, uint32_t n_rows, const uint32_t *sequence,
                      const uint32_t *position, const uint32_t *const *layer_ids);
void route_trace_close(struct route_trace *t); /* writes what is buffered; NULL is fine */

/* A whole trace in memory. */
struct route_trace_file {
    struct route_trace_shape shape;
    uint64_t *layer_bytes; /* what shape points to */
    uint64_t n_steps, n_rows;
    uint64_t *step_first;          /* [n_steps + 1] first row of each step */
    uint32_t *sequence, *position; /* [n_rows] */
    uint16_t *ids;                 /* [n_rows][n_layer][n_used] */
    uint64_t cut_bytes;            /* of an unfinished last record, left out */
};

/* From the file's bytes. ERR_FORMAT names what is wrong; *ret is for route_trace_file_done. */
enum err_code route_trace_parse(const uint8_t *data, size_t size, struct route_trace_file *ret,
                                struct err *e) __attribute__((warn_unused_result));
enum err_code route_trace_read(const char *path, struct route_trace_file *ret, struct err *e)
    __attribute__((warn_unused_result));
void route_trace_file_done(struct route_trace_file *f); /* of zeroes is fine */

#endif
