/* What the files of the CUDA backend share: its device, buffers and streams, access to spans, the
 * launch through which every kernel goes, and the functions of the table (k_ops), each defined in
 * exactly one file.
 *
 * Rules for an operation:
 *   - it launches kernels by K_CUDA_LAUNCH and returns ERR_OK, or ERR_UNSUPPORTED having done
 *     nothing;
 *   - it never waits, allocates, nor reads device memory: any operation can be recorded in a graph.
 *     Row counts, tokens, positions, page tables, expert lists and slots are read by kernels. Grids
 *     come from the upper bounds (rows.max_rows; groups: min(n_expert, max_rows * n_used)); blocks
 *     beyond the actual counts return at once;
 *   - its bits are those of kernels/ref (ARITHMETIC.md): float operations by k_float_* or the
 *     __f*_rn intrinsics. */
#ifndef ISLET_K_CUDA_CUH
#define ISLET_K_CUDA_CUH

#include <cuda_runtime.h>
#include <stdint.h>

#include "err.h"
#include "k_cuda_act.h"
#include "k_device.h"
#include "k_float.h"
#include "k_format.h"
#include "kernels.h"

enum {
    K_CUDA_RING_PIECES = 16,
    K_CUDA_RING_PIECE_BYTES = 256 * 1024,
    K_CUDA_MAX_PENDING = 256, /* downloads between two waits that go through the ring */
    K_CUDA_MAX_PINNED = 64,
    K_CUDA_ROUTE_WORDS = 8 * 512 /* of a stream: rows by experts */
};

struct k_cuda_heap; /* k_cuda_entry.h */

/* Memory of the host that the device can reach. */
struct k_cuda_pinned {
    const uint8_t *first;
    uint64_t bytes;
};

struct k_cuda {
    struct k_device device;
    const struct k_cuda_heap *heap;
    int ordinal;
    int major, minor;      /* compute capability */
    uint32_t sm_count;     /* multiprocessors */
    uint32_t shared_bytes; /* most shared memory a block may ask for */
    uint32_t pinned_count;
    struct k_cuda_pinned pinned[K_CUDA_MAX_PINNED];
    struct k_counts counts;
    struct k_cuda_fault fault;
    struct err first; /* what failed first */
    bool lost;
    cudaError_t lost_error;
    char text[400];  /* k_ops.describe */
    char bus_id[32]; /* k_ops.bus_id */
};

struct k_buffer {
    struct k_device *device;
    uint8_t *data; /* device address, aligned to 256 */
    uint64_t bytes;
    uint8_t *host;              /* the same memory as the CPU sees it: pinned buffers only */
    struct k_cuda_range *range; /* of k_ops.range_new, or NULL */
};

struct k_cuda_pending { /* a download that lies in the ring until its stream has passed it */
    void *to;
    const uint8_t *from;
    uint64_t n;
    uint32_t piece;
};

struct k_stream {
    struct k_device *device;
    cudaStream_t stream;
    cudaError_t error; /* the first since the last wait */
    bool capturing;
    /* The ring: pinned memory through which small copies go. */
    uint8_t *ring;
    cudaEvent_t passed[K_CUDA_RING_PIECES]; /* recorded when a piece was left */
    bool left[K_CUDA_RING_PIECES];
    uint32_t piece, used; /* now filled, and bytes of it */
    struct k_cuda_pending pending[K_CUDA_MAX_PENDING];
    uint32_t n_pending;
    uint64_t
        *words; /* K_CUDA_ROUTE_WORDS on the device, 0 between kernels: between blocks of one */
};

static inline struct k_cuda *k_cuda_of(const struct k_device *d)
{
    return (struct k_cuda *)(void *)(uintptr_t)d;
}

/* Device address of a span; NULL for one without a buffer. */
static inline void *k_cuda_at(struct k_span s)
{
    return s.buffer == NULL ? NULL : s.buffer->data + s.offset;
}

/* struct k_rows as kernels take it. */
struct k_cuda_rows {
    const uint32_t *n_rows, *token, *position, *sequence;
    uint32_t *faults;
    uint32_t max_rows;
};
static inline struct k_cuda_rows k_cuda_rows_of(const struct k_rows *r)
{
    struct k_cuda_rows rows;
    rows.n_rows = (const uint32_t *)k_cuda_at(r->n_rows);
    rows.token = (const uint32_t *)k_cuda_at(r->token);
    rows.position = (const uint32_t *)k_cuda_at(r->position);
    rows.sequence = (const uint32_t *)k_cuda_at(r->sequence);
    rows.faults = (uint32_t *)k_cuda_at(r->faults);
    rows.max_rows = r->max_rows;
    return rows;
}

/* True: the call may be made. False: a test's fault was due (*ret is its error), or the device is
 * lost. Counts the call. */
bool k_cuda_device_may(struct k_cuda *c, cudaError_t *ret);
/* Books a call's result, which `what` names: the stream's first error sticks until k_ops.wait, the
 * device's for ever. s may be NULL. Returns `result`. */
cudaError_t k_cuda_device_book(struct k_cuda *c, struct k_stream *s, cudaError_t result,
                               const char *what);

/* cudaError_t of a call of the CUDA library, which is not made when a test's fault is due. */
#define K_CUDA_CALL(c, s, call)                                    \
    ([&]() -> cudaError_t {                                        \
        cudaError_t k_cuda_result = cudaSuccess;                   \
        if (k_cuda_device_may((c), &k_cuda_result))                \
            k_cuda_result = (call);                                \
        return k_cuda_device_book((c), (s), k_cuda_result, #call); \
    }())

template <typename... P, typename... A>
static inline void k_cuda_launch(struct k_stream *s, const char *name, bool ahead,
                                 void (*kernel)(P...), dim3 grid, dim3 block, size_t shared_bytes,
                                 A... args)
{
    struct k_cuda *c = k_cuda_of(s->device);
    cudaError_t result = cudaSuccess;
    if (s->error != cudaSuccess) /* what follows a failure would compute on rubbish */
        return;
    if (shared_bytes > 48 * 1024)
        result =
            K_CUDA_CALL(c, s,
                        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             (int)shared_bytes));
    if (result == cudaSuccess) {
        if (k_cuda_device_may(c, &result)) {
            cudaLaunchAttribute early = {};
            early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
            early.val.programmaticStreamSerializationAllowed = 1;
            cudaLaunchConfig_t config = {};
            config.gridDim = grid;
            config.blockDim = block;
            config.dynamicSmemBytes = shared_bytes;
            config.stream = s->stream;
            config.attrs = &early;
            config.numAttrs = ahead && c->major >= 9 ? 1 : 0;
            result = cudaLaunchKernelEx(&config, kernel, args...);
        }
        (void)k_cuda_device_book(c, s, result, name);
    }
}
/* Launches kernel<<<grid, block, shared_bytes, the stream>>>(...). A kernel with commas in its
 * template arguments stands in parentheses. Arguments convert to the parameters' types. No
 * dimension of the grid may be 0. */
#define K_CUDA_LAUNCH(s, kernel, grid, block, shared_bytes, ...) \
    k_cuda_launch((s), #kernel, false, kernel, (grid), (block), (shared_bytes), __VA_ARGS__)

/* The same for a kernel that begins with what no kernel before it has a part in, and calls
 * k_cuda_await before all else: where the device can, its blocks come onto multiprocessors while
 * the kernel before runs out, once all blocks of that one have called k_cuda_release or ended. */
#define K_CUDA_LAUNCH_AHEAD(s, kernel, grid, block, shared_bytes, ...) \
    k_cuda_launch((s), #kernel, true, kernel, (grid), (block), (shared_bytes), __VA_ARGS__)

/* Waits until the kernels before this one are done and their stores are seen. */
static __device__ __forceinline__ void k_cuda_await(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Lets the next kernel's blocks come. Only after k_cuda_await, so that a kernel that has come finds
 * all but this one done. */
static __device__ __forceinline__ void k_cuda_release(void)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

extern "C" {
uint64_t k_cuda_attention_bytes(const struct k_device *d, uint32_t n_head, uint32_t head_dim,
                                uint32_t max_rows, uint32_t max_pages);
enum err_code k_cuda_embed(const struct k_embed *a, struct k_stream *s);
enum err_code k_cuda_norm(const struct k_norm *a, struct k_stream *s);
enum err_code k_cuda_quantise(const struct k_quantise *a, struct k_stream *s);
enum err_code k_cuda_matmul(const struct k_matmul *a, struct k_stream *s);
enum err_code k_cuda_rope(const struct k_rope *a, struct k_stream *s);
enum err_code k_cuda_kv_write(const struct k_kv_write *a, struct k_stream *s);
enum err_code k_cuda_attention(const struct k_attention *a, struct k_stream *s);
enum err_code k_cuda_add(const struct k_add *a, struct k_stream *s);
enum err_code k_cuda_router(const struct k_router *a, struct k_stream *s);
enum err_code k_cuda_grouping(const struct k_grouping *a, struct k_stream *s);
enum err_code k_cuda_moe_gate_up(const struct k_moe_gate_up *a, struct k_stream *s);
enum err_code k_cuda_moe_down(const struct k_moe_down *a, struct k_stream *s);
enum err_code k_cuda_moe_sum(const struct k_moe_sum *a, struct k_stream *s);
enum err_code k_cuda_gather(const struct k_gather *a, struct k_stream *s);
enum err_code k_cuda_check(const struct k_check *a, struct k_stream *s);
enum err_code k_cuda_pick(const struct k_pick *a, struct k_stream *s);
enum err_code k_cuda_arrange(const struct k_arrange *a, struct k_stream *s);
enum err_code k_cuda_bring(const struct k_bring *a, struct k_stream *s);
enum err_code k_cuda_fetch_rows(const struct k_fetch_rows *a, struct k_stream *s);
enum err_code k_cuda_enter(const struct k_enter *a, struct k_stream *s);
enum err_code k_cuda_heads(const struct k_heads *a, struct k_stream *s);
enum err_code k_cuda_attend(const struct k_attention *a, const struct k_act *y, struct k_stream *s);
enum err_code k_cuda_route(const struct k_enter *e, const struct k_matmul *m,
                           const struct k_router *a, const struct k_grouping *g,
                           struct k_stream *s);
}

#endif
