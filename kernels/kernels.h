/* The seam between the engine and whoever computes: one table of operations per backend (reference,
 * AVX2, AVX-512, CUDA), all giving the same bits (ARITHMETIC.md).
 *
 * Made to be recorded once and replayed: an operation takes a stream and spans of opaque buffers;
 * row counts, tokens, positions, page tables, expert lists and expert addresses are read from
 * buffers when the operation runs, never passed by value. What is passed by value is fixed for the
 * life of a model: sizes, formats, weights' places, upper bounds.
 *
 * A *row* is one token's vector in a step. A weight matrix has *outputs* and *inputs*. A row's bits
 * never depend on the other rows, their number, threads or the backend (A7).
 *
 * Threads: a device and its streams belong to one thread (the engine); operations run in the order
 * they were given. On the CPU an operation has finished when it returns; on others after
 * k_ops.wait. Contracts are asserted by K_ASSERT in debug builds only; outside data (formats,
 * sizes) is checked by the daemon before it reaches this table. */
#ifndef ISLET_KERNELS_H
#define ISLET_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "err.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- levels and formats ---------------------------------------------------------------------- */

enum k_level {
    K_LEVEL_AUTO,
    K_LEVEL_REFERENCE,
    K_LEVEL_AVX2,
    K_LEVEL_AVX512
}; /* order of compute.cpu_level */

/* Weight formats with kernels; numbers are ggml's, so that a tensor's type needs no translation. */
enum k_format {
    K_F32 = 0,
    K_F16 = 1,
    K_Q4_0 = 2,
    K_Q8_0 = 8,
    K_Q4_K = 12,
    K_Q5_K = 13,
    K_Q6_K = 14,
    K_BF16 = 30,
};

/* Forms in which an activation row is needed: which one a weight format reads (k_format_form). */
enum k_form {
    K_FORM_F32 = 1,
    K_FORM_Q32 = 2,
    K_FORM_Q256 = 4
};

enum k_form k_format_form(enum k_format format);
uint32_t k_format_block_elements(enum k_format format); /* elements of a block */
uint32_t k_format_block_bytes(enum k_format format);    /* bytes of a block */
/* Bytes of n_out x n_in weights; n_in is a multiple of the block. */
uint64_t k_format_bytes(enum k_format format, uint64_t n_out, uint64_t n_in);
/* Dequantises n elements (whole blocks) as the format defines (A8b), for tests and the
 * embedding. */
void k_dequantise(enum k_format format, const void *blocks, float *out, size_t n);
/* A3: a non-finite scale or value among n elements? Returns the index of the first bad block, or
 * -1. */
int64_t k_find_invalid(enum k_format format, const void *blocks, uint64_t n);

/* Limits of every backend; the daemon checks a model against them. */
enum {
    K_MAX_INPUTS = 65536,
    K_MAX_EXPERTS = 4096,
    K_MAX_THREADS = 256
};

/* ---- memory ---------------------------------------------------------------------------------- */

struct k_device; /* a backend at work: level, threads */
struct k_stream; /* ordered operations */
struct k_buffer; /* memory of the device */
struct k_graph;  /* operations recorded once, to be replayed */
struct k_event;  /* a place in a stream */

struct k_span {
    struct k_buffer *buffer;
    size_t offset; /* bytes; aligned to 64 for every span the engine makes */
};

/* An activation row in the forms that matmul reads; a span whose form is not needed has buffer
 * NULL. `f32` is the row itself. Layout of q32 and q256 is the backend's own: k_ops.act_bytes. */
struct k_act {
    struct k_span f32, q32, q256;
    uint32_t n; /* elements of a row */
};

/* Weights [n_out][n_in] blocks of `format`, in the file's own layout, or as k_ops.arrange left them
 * where a backend has it. */
struct k_matrix {
    struct k_span data;
    enum k_format format;
    uint32_t n_out, n_in;
};

/* The rows of a step. Spans of uint32: n_rows[1]; token, position, sequence [max_rows]. `sequence`
 * is the row of the page table. faults[max_rows]: set to non-zero by any operation that meets a
 * non-finite value in that row (A3). */
struct k_rows {
    struct k_span n_rows, token, position, sequence, faults;
    uint32_t max_rows;
};

/* KV pages of 64 positions (A17, B6). In a page, per layer: K [n_head_kv][D][64], then V
 * [n_head_kv][64][D], f16; or the 8-bit form (k_kv_layer_bytes). table: uint32
 * [n_sequences][max_pages], page ids. */
enum k_kv_type {
    K_KV_F16,
    K_KV_Q8_0
}; /* order of memory.kv_type */
enum {
    K_PAGE = 64,
    K_CHUNK_GROUP = 8
};

struct k_kv {
    struct k_span pool, table;
    uint64_t page_bytes;   /* n_layer * k_kv_layer_bytes, rounded up to 64 */
    uint64_t layer_offset; /* of this layer in a page */
    uint32_t max_pages;    /* of a sequence */
    enum k_kv_type type;
    uint32_t n_head_kv, head_dim;
};
uint64_t k_kv_layer_bytes(enum k_kv_type type, uint32_t n_head_kv, uint32_t head_dim);

/* ---- operations ------------------------------------------------------------------------------ */

/* x[row][i] = dequantised row token[row] of `table` (A8b). x: float [max_rows][table.n_in]. */
struct k_embed {
    struct k_rows rows;
    struct k_matrix table; /* n_out = vocabulary */
    struct k_span x;
};

/* RMS norm of each of `groups` vectors of n elements in a row (A10): y[row][g] = norm(x[row][g]) *
 * weight. y may be x. weight: float [n]. */
struct k_norm {
    struct k_rows rows;
    struct k_span x, y, weight;
    uint32_t n, groups;
    float eps;
};

/* Quantises act.f32 into the forms whose spans are set (A4). Non-finite input sets the row's
 * fault. */
struct k_quantise {
    struct k_rows rows;
    struct k_act act;
};

/* y[m][row][out] = sum over i of w[m][out][i] * x[row][i] (A5, A6, A8) for up to 4 matrices with
 * the same input. y: float [max_rows][w.n_out]; must not overlap the inputs. */
enum {
    K_MATMUL_MAX = 4
};
struct k_matmul {
    struct k_rows rows;
    struct k_act act;
    uint32_t n_matrices;
    struct k_matrix w[K_MATMUL_MAX];
    struct k_span y[K_MATMUL_MAX];
};

/* Rotates pairs (i, i + rope_dim/2) of each of `heads` vectors of head_dim (A15), in place. table:
 * float [positions][rope_dim/2][2] = cos, sin (k_rope_table). */
struct k_rope {
    struct k_rows rows;
    struct k_span x, table;
    uint32_t heads, head_dim, rope_dim;
};

/* Writes k and v [max_rows][n_head_kv * D] to the rows' positions in their sequences' pages
 * (A17). */
struct k_kv_write {
    struct k_rows rows;
    struct k_span k, v;
    struct k_kv kv;
};

/* y[row][head] = attention of q[row][head] over positions 0..position[row] of the row's sequence
 * (A18, A19). q, y: float [max_rows][n_head * D]. scratch: k_ops.attention_bytes, zeros before its
 * first use, and of the attention of one stream alone: counters there rest at 0 between uses. */
struct k_attention {
    struct k_rows rows;
    struct k_span q, y, scratch;
    struct k_kv kv;
    uint32_t n_head;
    float scale;
};

/* x[row][i] = x[row][i] + y[row][i] (A16). */
struct k_add {
    struct k_rows rows;
    struct k_span x, y;
    uint32_t n;
};

/* Softmax of logits [max_rows][n_expert], the n_used best (ties: lower index) and their weights
 * (A13). ids: uint32 [max_rows][n_used], weights: float [max_rows][n_used], both in rank order. */
struct k_router {
    struct k_rows rows;
    struct k_span logits, ids, weights;
    uint32_t n_expert, n_used;
    bool normalise;
    float scale; /* factor on the weights, 1: none applied */
};

/* Groups the step's (row, rank) pairs by expert, experts ascending, rows ascending within one.
 *   n_groups  uint32[1]
 *   groups    struct k_group [min(n_expert, max_rows * n_used)]
 *   order     uint32 [max_rows * n_used]: pairs as row * n_used + rank, those of a group
 *             contiguous */
struct k_group {
    uint32_t expert, first, count; /* pairs order[first .. first + count) */
};
struct k_grouping {
    struct k_rows rows;
    struct k_span ids, n_groups, groups, order;
    uint32_t n_expert, n_used;
};

/* Where experts are: slots uint64 [n_expert][3] = byte offsets of the gate, up and down slices in
 * `arena`, each aligned to the element of its format (4 bytes for F32, 2 for every other). Read
 * when the operation runs, so that residency may change between replays. */
struct k_experts {
    struct k_buffer *arena;
    struct k_span slots;
    enum k_format gate, up, down; /* formats of the slices */
    uint32_t n_embd, n_ff, n_expert, n_used;
};

/* For the groups named by `selected` (uint32 indices into groups, n_selected uint32[1] of them; the
 * engine passes hits first and misses as they arrive): h[pair] = swiglu(gate . x, up . x) (A12),
 * quantised for `down`. x: the rows' activations in the forms that gate and up read; h: act of
 * [max_rows * n_used] rows of n_ff. */
struct k_moe_gate_up {
    struct k_rows rows;
    struct k_experts experts;
    struct k_span groups, order, n_selected, selected;
    struct k_act x, h;
};
/* out[pair][n_embd] = down . h[pair]. float [max_rows * n_used][n_embd]. */
struct k_moe_down {
    struct k_rows rows;
    struct k_experts experts;
    struct k_span groups, order, n_selected, selected;
    struct k_act h;
    struct k_span out;
};
/* y = +0; for rank r ascending: y = fma(weights[row][r], out[row][r], y); x[row] = x[row] + y (A14,
 * A16). */
struct k_moe_sum {
    struct k_rows rows;
    struct k_span weights, out, x;
    uint32_t n, n_used;
};

/* y[i] = x[index[i]] for i < n[0]; rows of `width` floats. Also carries faults: to_rows.faults[i]
 * |= faults[index[i]]. */
struct k_gather {
    struct k_rows rows, to_rows; /* to_rows.n_rows is the count */
    struct k_span index, x, y;
    uint32_t width;
};

/* Puts weights from the file's order into the one in which this backend computes: the same number
 * of bytes, which must not overlap. Bases are aligned to 256 bytes. Every k_matrix and expert slice
 * given to a backend that has this operation went through it, whole. */
struct k_arrange {
    struct k_span from, to;
    enum k_format format;
    uint32_t n_out, n_in;
};

/* Copies experts of a layer, gate, up and down each in the file's order, from registered or pinned
 * memory of the host to their places in the layer's arena, arranged, and enters these in its slots:
 * as fetch, arrange and upload would, on the way in `staging`, which is the caller's again when the
 * stream got there. The host's memory holds still until then. What computes with the experts is in
 * another stream and waits for an event after this. */
enum {
    K_BRING_MOST = 8, /* experts at once */
    K_BRING_SLICES = 3
};
struct k_bring_expert {
    const uint8_t *from[K_BRING_SLICES];
    uint64_t to[K_BRING_SLICES]; /* offsets in the arena, multiples of 256 */
    uint32_t expert;
};
struct k_bring {
    struct k_experts layer;
    uint32_t n;
    struct k_bring_expert experts[K_BRING_MOST];
    struct k_span staging; /* aligned to 256 bytes: n times the slices, each rounded up to that */
};

/* Copies rows[0..n) of `from` to the same rows of `to`: as fetches would, by one operation. `from`
 * is aligned to 128 bytes, `bytes` a multiple of 16; both lists lie in registered memory and hold
 * still until the stream got there. */
struct k_fetch_rows {
    struct k_span to;
    const void *from;
    const uint32_t *rows;
    uint32_t n, bytes; /* bytes: of a row */
};

/* Sets a row's fault if any of its n values is not finite (A20). */
struct k_check {
    struct k_rows rows;
    struct k_span x;
    uint32_t n;
};

/* What a step does between two matrix products, as one: the sum of the experts' `out` by `weights`
 * (k_moe_sum), or without weights `out` itself (k_add), onto x, or without `out` nothing; the norm
 * of x into act.f32 (k_norm, one group of act.n); act's forms (k_quantise). */
struct k_enter {
    struct k_rows rows;
    struct k_span x, out, weights, norm;
    struct k_act act;
    uint32_t n_used;
    float eps;
};
/* Norm, where there is a weight, and rope of q's and k's heads, in place (k_norm, k_rope); k and v
 * into the pages (k_kv_write). k is undefined afterwards. */
struct k_heads {
    struct k_rows rows;
    struct k_span q, k, v, q_norm, k_norm, table;
    struct k_kv kv;
    uint32_t n_head, rope_dim;
    float eps;
};

/* ids[row] = the token drawn from the row's logits (A21), without filters. how: struct k_pick_row
 * [max_rows]; ids: uint32 [max_rows]; scratch: 16 bytes for each row and each K_PICK_PIECE values
 * begun. Logits that are not finite give any id. */
struct k_pick_row {
    uint64_t random;
    float temperature; /* below FLT_MIN: the first of the highest */
    uint32_t unused;
};
struct k_pick {
    struct k_rows rows;
    struct k_span logits, how, ids, scratch;
    uint32_t n_vocab;
};
enum {
    K_PICK_PIECE = 4096
};

/* Since a device was opened, so that a test sees that a step allocates nothing. */
struct k_counts {
    uint64_t calls;       /* of the device's library, launches among them */
    uint64_t allocations; /* of memory, streams, events and graphs */
};
/* What fails for a test: the nth call of the device's library from now (1: the next one), once or
 * from then on, with the library's error number. nth 0: nothing. */
struct k_cuda_fault {
    uint64_t nth;
    int error; /* 2: no memory, 700: illegal address, 719: launch failure, 46: device unavailable */
    bool forever;
};

struct k_ops {
    const char *name; /* "reference", "avx2", "avx512", "cuda" */

    /* Memory: aligned to 64 (CUDA: 256), cleared. host: the bytes as the CPU sees them, or NULL on
     * a device. */
    enum err_code (*buffer_new)(struct k_device *d, uint64_t bytes, struct k_buffer **ret,
                                struct err *e);
    void (*buffer_free)(struct k_buffer *b);
    void *(*buffer_host)(struct k_buffer *b);
    /* `from` may change once the call has returned. Not while a graph is recorded: use fetch. */
    void (*upload)(struct k_stream *s, struct k_span to, const void *from, size_t n);
    void (*download)(struct k_stream *s, void *to, struct k_span from,
                     size_t n); /* done after wait */
    void (*copy)(struct k_stream *s, struct k_span to, struct k_span from, size_t n);

    enum err_code (*stream_new)(struct k_device *d, struct k_stream **ret, struct err *e);
    void (*stream_free)(struct k_stream *s);
    enum err_code (*wait)(
        struct k_stream *s); /* ERR_DEVICE: the device failed; nothing of the step may be used */

    /* Bytes of one row of n elements in `form`, and of attention's scratch. */
    uint64_t (*act_bytes)(enum k_form form, uint32_t n, uint32_t max_rows);
    uint64_t (*attention_bytes)(const struct k_device *d, uint32_t n_head, uint32_t head_dim,
                                uint32_t max_rows, uint32_t max_pages);

    /* ERR_UNSUPPORTED: no kernel for this format here; outputs are then untouched. */
    enum err_code (*embed)(const struct k_embed *a, struct k_stream *s);
    enum err_code (*norm)(const struct k_norm *a, struct k_stream *s);
    enum err_code (*quantise)(const struct k_quantise *a, struct k_stream *s);
    enum err_code (*matmul)(const struct k_matmul *a, struct k_stream *s);
    enum err_code (*rope)(const struct k_rope *a, struct k_stream *s);
    enum err_code (*kv_write)(const struct k_kv_write *a, struct k_stream *s);
    enum err_code (*attention)(const struct k_attention *a, struct k_stream *s);
    enum err_code (*add)(const struct k_add *a, struct k_stream *s);
    enum err_code (*router)(const struct k_router *a, struct k_stream *s);
    enum err_code (*grouping)(const struct k_grouping *a, struct k_stream *s);
    enum err_code (*moe_gate_up)(const struct k_moe_gate_up *a, struct k_stream *s);
    enum err_code (*moe_down)(const struct k_moe_down *a, struct k_stream *s);
    enum err_code (*moe_sum)(const struct k_moe_sum *a, struct k_stream *s);
    enum err_code (*gather)(const struct k_gather *a, struct k_stream *s);
    enum err_code (*check)(const struct k_check *a, struct k_stream *s);
    enum err_code (*arrange)(const struct k_arrange *a,
                             struct k_stream *s);                        /* NULL: file's order */
    enum err_code (*bring)(const struct k_bring *a, struct k_stream *s); /* NULL: step by step */
    enum err_code (*fetch_rows)(const struct k_fetch_rows *a,
                                struct k_stream *s); /* NULL: so too */
    /* Several operations as one, with their bits, for a device where each costs a launch. NULL: one
     * after the other. attend: attention, then quantise of y, whose f32 is a's y. route: enter,
     * matmul of its act by one matrix, router of the logits, grouping of the ids; of one stream at
     * a time. */
    enum err_code (*enter)(const struct k_enter *a, struct k_stream *s);
    enum err_code (*heads)(const struct k_heads *a, struct k_stream *s);
    enum err_code (*attend)(const struct k_attention *a, const struct k_act *y, struct k_stream *s);
    enum err_code (*route)(const struct k_enter *e, const struct k_matmul *m,
                           const struct k_router *a, const struct k_grouping *g,
                           struct k_stream *s);
    /* NULL: whoever has the logits draws (k_weigh). */
    enum err_code (*pick)(const struct k_pick *a, struct k_stream *s);

    /* ---- from here on NULL on the CPU: what a device with memory of its own needs ---- */

    /* Memory of the host that the CPU (buffer_host) and the device (as any buffer) read and write
     * in place; cleared, aligned to 64. buffer_free frees it. */
    enum err_code (*pinned_new)(struct k_device *d, uint64_t bytes, struct k_buffer **ret,
                                struct err *e);
    /* Pins the caller's memory (page-aligned), so that fetch may read it and download fill it
     * without the CPU's help. Unregister before it is unmapped. */
    enum err_code (*host_register)(struct k_device *d, void *memory, uint64_t bytes, struct err *e);
    void (*host_unregister)(struct k_device *d, void *memory);
    /* As upload, from registered or pinned memory, read when the stream gets there: `from` must
     * hold still until then. May be recorded. */
    void (*fetch)(struct k_stream *s, struct k_span to, const void *from, size_t n);

    /* Addresses without memory; chunks of K_CHUNK_BYTES (the last one: what is left, in steps of 2
     * MiB) get some (not cleared) and give it back. buffer_free gives back all. No operation in
     * flight may touch a chunk that is returned. chunks_take: of chunks that have none; ERR_NOMEM
     * and nothing taken where the device has not that much. range_new: ERR_UNSUPPORTED where the
     * driver cannot. */
    enum err_code (*range_new)(struct k_device *d, uint64_t bytes, struct k_buffer **ret,
                               struct err *e);
    enum err_code (*chunks_take)(struct k_buffer *range, uint64_t first, uint64_t n, struct err *e);
    void (*chunks_return)(struct k_buffer *range, uint64_t first, uint64_t n);
    void (*memory)(struct k_device *d, uint64_t *ret_free, uint64_t *ret_total); /* 0: unknown */

    /* Order between streams, and times. An event that was never recorded has passed. One that was
     * recorded after an error of its stream, as wait has not yet told, never passes, and gives the
     * error to the streams that go on after it. */
    enum err_code (*event_new)(struct k_device *d, struct k_event **ret, struct err *e);
    void (*event_free)(struct k_event *v);
    void (*event_record)(struct k_event *v, struct k_stream *s);
    void (*event_after)(struct k_event *v, struct k_stream *s);   /* s goes on once v has passed */
    bool (*event_passed)(struct k_event *v);                      /* true also of a lost device */
    double (*event_us)(struct k_event *from, struct k_event *to); /* both passed; -1: unknown */

    /* Between begin and end operations, copies and fetches are recorded, not run; only of this
     * stream and of streams that its events lead to and back. replay runs them all. */
    enum err_code (*capture_begin)(struct k_stream *s);
    enum err_code (*capture_end)(struct k_stream *s, struct k_graph **ret);
    enum err_code (*replay)(struct k_graph *g, struct k_stream *s);
    void (*graph_free)(struct k_graph *g);

    /* After ERR_DEVICE. What failed first goes to *ret_why, if something did. True: this process
     * can never use the device again. False: the next step may. */
    bool (*lost)(const struct k_device *d, struct err *ret_why);
    /* "NVIDIA H200, sm_90, driver 13.0, 139.7 GiB", for logs and reports. */
    const char *(*describe)(const struct k_device *d);
    /* "0000:1b:00.0", by which other libraries know the device too. */
    const char *(*bus_id)(const struct k_device *d);
    void (*counts)(const struct k_device *d, struct k_counts *ret);
    void (*inject)(struct k_device *d, const struct k_cuda_fault *fault); /* for tests */
};
enum {
    K_CHUNK_BYTES = 32 << 20
};

/* Opens a backend. AUTO takes the best level the CPU has; a level that it lacks is ERR_UNSUPPORTED
 * naming the missing CPU features: there is no silent fall-back. threads 0: one per physical core.
 * Checks that FTZ and DAZ are off and rounding is to nearest in every thread. Gives *ret; free with
 * k_close. */
enum err_code k_open(enum k_level level, uint32_t threads, struct k_device **ret, struct err *e)
    __attribute__((warn_unused_result));

struct k_cuda_options {
    const char *file; /* islet-cuda.so; NULL: beside the program's ../lib, then the installed one */
    int32_t ordinal;  /* of the device; -1: the one with most memory */
    struct k_cuda_fault fault;
};
/* Opens a GPU through islet-cuda.so. ERR_UNSUPPORTED: no such file, another version of it, no
 * driver, no device, or one that is too old (e says which, and the remedy); ERR_NOMEM: no memory on
 * the device; ERR_DEVICE: it failed. Gives *ret; free with k_close. Thread: the one that uses
 * it. */
enum err_code k_open_cuda(const struct k_cuda_options *o, struct k_device **ret, struct err *e)
    __attribute__((warn_unused_result));
/* Is there a file to open, whether or not that works? */
bool k_cuda_open_finds(const char *file);
void k_close(struct k_device *d);
const struct k_ops *k_ops(const struct k_device *d);
uint32_t k_threads(const struct k_device *d);
/* Lists "reference avx2 avx512" as far as this CPU has them. */
const char *k_levels_available(void);

/* Host mathematics (A11, A15, A20), the same everywhere. */
float k_exp32(float x);
/* 2^40: weight 1 of the sampler, in fixed point (A21). */
#define K_WEIGHT_ONE 1099511627776.0f
/* ret[i] = trunc(exp32((x[i] - best) / temperature) * K_WEIGHT_ONE) (A21); gives their sum. best:
 * the highest of x, or of more. n < 2^23. */
uint64_t k_weigh(const float *x, uint32_t n, float best, float temperature, uint64_t *ret);
/* The first of the highest of n > 0 floats; what is not a number is passed over. */
uint32_t k_highest(const float *x, uint32_t n);
double k_exp64(double x);
double k_log64(double x);
/* cos and sin of position * base^(-2i/rope_dim): float [n_positions][rope_dim/2][2] (A15). */
void k_rope_table(double base, uint32_t rope_dim, uint32_t n_positions, float *out);

/* Version of the arithmetic: part of system_fingerprint and of the welcome. A change of any bit
 * raises it. */
enum {
    K_ARITHMETIC_VERSION = 1
};

#ifdef __cplusplus
}
#endif

#endif
