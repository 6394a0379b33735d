/* What the parts of the fake GPU share: the device, its memory, what its streams hold. */
#ifndef ISLET_FAKE_GPU_INNER_H
#define ISLET_FAKE_GPU_INNER_H

#include <stdbool.h>
#include <stdint.h>

#include "fake_gpu.h"
#include "k_host.h"

enum {
    MAX_BUFFERS = 32,
    MAX_PINNED = 8,
    MAX_QUEUE = 1 << 14
};

enum fake_kind {
    UPLOAD,
    DOWNLOAD,
    FETCH,
    COPY,
    AFTER,
    EMBED,
    NORM,
    QUANTISE,
    MATMUL,
    ROPE,
    KV_WRITE,
    ATTENTION,
    ADD,
    ROUTER,
    GROUPING,
    GATE_UP,
    DOWN,
    SUM,
    GATHER,
    CHECK,
    PICK,
    ARRANGE
};

struct fake_stream;

struct k_event {
    struct fake_stream *stream; /* NULL: never recorded */
    uint64_t mark;              /* what the stream had queued */
};

struct fake_command {
    enum fake_kind kind;
    union {
        struct {
            struct k_span to, from;
            void *memory; /* of the host; UPLOAD: a copy, freed when it ran */
            size_t n;
        } move;
        struct k_event after;
        struct k_embed embed;
        struct k_norm norm;
        struct k_quantise quantise;
        struct k_matmul matmul;
        struct k_rope rope;
        struct k_kv_write kv_write;
        struct k_attention attention;
        struct k_add add;
        struct k_router router;
        struct k_grouping grouping;
        struct k_moe_gate_up gate_up;
        struct k_moe_down down;
        struct k_moe_sum sum;
        struct k_gather gather;
        struct k_check check;
        struct k_pick pick;
        struct k_arrange arrange;
    };
};

struct k_graph {
    uint32_t n;
    struct fake_command commands[];
};

struct fake_buffer {
    struct k_buffer base; /* data: NULL but while an operation runs, unless pinned */
    struct fake_gpu *gpu;
    uint8_t *data;
    bool pinned;
    uint64_t n_chunks; /* of a range */
    bool *taken;
};

struct fake_gpu {
    struct k_device device;
    struct k_device *inner;
    const struct k_ops *ops; /* of inner */
    struct fake_gpu_options options;
    struct fake_buffer *buffers[MAX_BUFFERS];
    struct {
        const uint8_t *at;
        uint64_t bytes;
    } pinned[MAX_PINNED];
    uint64_t used;
    struct k_counts counts;
    struct k_cuda_fault fault;
    bool failed, lost;
};

struct fake_stream {
    struct k_stream base;
    struct fake_gpu *gpu;
    uint64_t queued, ran;
    bool captures;
    uint64_t capture_from;
    struct fake_command queue[MAX_QUEUE];
};

static inline struct fake_gpu *fake_gpu_of(struct k_device *d)
{
    return (struct fake_gpu *)(void *)d;
}

static inline struct fake_stream *fake_stream_of(struct k_stream *s)
{
    return (struct fake_stream *)(void *)s;
}

/* A call of the device's library. False: it fails, or the device failed before. */
bool fake_gpu_call(struct fake_gpu *g);
/* The test did what no GPU takes. */
void fake_gpu_die(const char *what) __attribute__((noreturn));

#endif
