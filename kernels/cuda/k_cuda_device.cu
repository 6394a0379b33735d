/* The device: opening it, what its calls gave, and the table of operations. */
#include <stdio.h>
#include <string.h>

#include "k_cuda.cuh"
#include "k_cuda_entry.h"
#include "k_cuda_fault.h"
#include "k_cuda_memory.cuh"
#include "k_cuda_stream.cuh"

/* ---- calls ----------------------------------------------------------------------------------- */

bool k_cuda_device_may(struct k_cuda *c, cudaError_t *ret)
{
    c->counts.calls++;
    if (c->lost) {
        *ret = c->lost_error;
        return false;
    }
    if (k_cuda_fault_due(&c->fault)) {
        *ret = (cudaError_t)c->fault.error;
        return false;
    }
    return true;
}

/* Length of the function's name at the start of a call's text. */
static int name_length(const char *what)
{
    return (int)strcspn(what, what[0] == '(' ? "<" : "(");
}

cudaError_t k_cuda_device_book(struct k_cuda *c, struct k_stream *s, cudaError_t result,
                               const char *what)
{
    if (result == cudaSuccess)
        return result;
    (void)cudaGetLastError(); /* the library keeps a copy that the next launch would report */
    if (s != NULL && s->error == cudaSuccess)
        s->error = result;
    if (k_cuda_fault_is_lost(result) && !c->lost) {
        c->lost = true;
        c->lost_error = result;
        memset(&c->first, 0, sizeof c->first); /* what came before was survived */
    }
    /* Memory that was asked for and is not there is the caller's to tell. */
    if (s != NULL || result != cudaErrorMemoryAllocation)
        (void)err_set(&c->first, ERR_DEVICE, "%.*s: %s (CUDA error %d, %s)", name_length(what),
                      what, cudaGetErrorString(result), (int)result, cudaGetErrorName(result));
    return result;
}

static bool lost(const struct k_device *d, struct err *ret_why)
{
    const struct k_cuda *c = k_cuda_of(d);
    if (c->first.code != ERR_OK && ret_why != NULL)
        *ret_why = c->first;
    return c->lost;
}

static void counts(const struct k_device *d, struct k_counts *ret)
{
    *ret = k_cuda_of(d)->counts;
}

static void inject(struct k_device *d, const struct k_cuda_fault *fault)
{
    k_cuda_of(d)->fault = *fault;
}

static const char *describe(const struct k_device *d)
{
    return k_cuda_of(d)->text;
}

static const char *bus_id(const struct k_device *d)
{
    return k_cuda_of(d)->bus_id;
}

static uint64_t act_bytes(enum k_form form, uint32_t n, uint32_t max_rows)
{
    return k_cuda_act_stride(form, n) * max_rows;
}

/* ---- open ------------------------------------------------------------------------------------ */

/* Version of the driver's kernel module, as the system tells it; "" if it does not. */
static void driver_version(char *ret, size_t n)
{
    char line[256] = "";
    FILE *f = fopen("/proc/driver/nvidia/version", "re");
    if (f != NULL) {
        if (fgets(line, sizeof line, f) == NULL)
            line[0] = 0;
        fclose(f);
    }
    ret[0] = 0;
    for (const char *at = line; *at != 0; at += strcspn(at, " \n"), at += strspn(at, " \n")) {
        const size_t length = strspn(at, "0123456789.");
        if (length >= 5 && (at[length] == ' ' || at[length] == '\n') && length < n) {
            memcpy(ret, at, length);
            ret[length] = 0;
            return;
        }
    }
}

/* One line for what kept the device from being opened. */
static enum err_code refuse(cudaError_t result, const char *what, struct err *e)
{
    int library = 0;
    switch ((int)result) {
    case cudaErrorInsufficientDriver:
    case cudaErrorStubLibrary:
        (void)cudaRuntimeGetVersion(&library);
        return err_set(e, ERR_UNSUPPORTED,
                       "no NVIDIA driver, or one older than CUDA %d.%d needs; install or update it",
                       library / 1000, library % 1000 / 10);
    case cudaErrorNoDevice:
        return err_set(e, ERR_UNSUPPORTED,
                       "the NVIDIA driver sees no GPU (nvidia-smi and CUDA_VISIBLE_DEVICES tell)");
    case cudaErrorDevicesUnavailable:
        return err_set(e, ERR_DEVICE,
                       "the GPU is in use by another process alone or prohibits computing "
                       "(nvidia-smi -q -d COMPUTE tells)");
    case cudaErrorMemoryAllocation:
        return err_set(e, ERR_NOMEM, "no memory on the GPU even to begin; end what fills it");
    case cudaErrorECCUncorrectable:
        return err_set(e, ERR_DEVICE,
                       "the GPU's memory has errors that cannot be corrected; reset or replace it");
    default:
        return err_set(e, k_cuda_fault_code(result), "%s: %s (CUDA error %d, %s)", what,
                       cudaGetErrorString(result), (int)result, cudaGetErrorName(result));
    }
}

enum {
    PROBES = 4
};

/* Fused, subnormal, divided and rooted: what a wrong flag or a wrong architecture would change. */
static __host__ __device__ void probe(float x, float *y)
{
    y[0] = k_float_fma(x, x, -k_float_mul(x, x));
    y[1] = k_float_mul(x, 0x1p-140f);
    y[2] = k_float_div(1.0f, x);
    y[3] = k_float_exp32(-x);
}

static __global__ void probe_kernel(float x, float *y)
{
    probe(x, y);
}

static enum err_code check_arithmetic(struct k_cuda *c, struct err *e)
{
    const float x = 0x1.8bcdf2p+1f;
    float want[PROBES], got[PROBES] = {0}, *y = NULL;
    enum err_code code = ERR_OK;
    cudaError_t result = K_CUDA_CALL(c, NULL, cudaMalloc(&y, sizeof got));
    if (result == cudaSuccess && k_cuda_device_may(c, &result)) {
        probe_kernel<<<1, 1>>>(x, y);
        result = cudaGetLastError();
    }
    if (k_cuda_device_book(c, NULL, result, "the first kernel") == cudaSuccess)
        result = K_CUDA_CALL(c, NULL, cudaMemcpy(got, y, sizeof got, cudaMemcpyDeviceToHost));
    (void)cudaFree(y);
    probe(x, want);
    if (result == cudaErrorNoKernelImageForDevice || result == cudaErrorUnsupportedPtxVersion)
        code = err_set(e, ERR_UNSUPPORTED,
                       "islet-cuda.so has no code for sm_%d%d; build it with CUDA_ARCHS=%d%d",
                       c->major, c->minor, c->major, c->minor);
    else if (result != cudaSuccess)
        code = refuse(result, "the first kernel", e);
    else if (memcmp(want, got, sizeof got) != 0)
        code = err_set(e, ERR_DEVICE, "the GPU's arithmetic differs from the CPU's; not used");
    return code;
}

/* The device asked for, or the one with most memory; *ret_properties is its. */
static enum err_code pick(struct k_cuda *c, int32_t wanted, struct cudaDeviceProp *ret_properties,
                          struct err *e)
{
    int count = 0;
    cudaError_t result = K_CUDA_CALL(c, NULL, cudaGetDeviceCount(&count));
    if (result == cudaSuccess && count == 0)
        result = cudaErrorNoDevice;
    if (result != cudaSuccess)
        return refuse(result, "looking for GPUs", e);
    if (wanted >= count)
        return err_set(e, ERR_UNSUPPORTED, "GPU %d was asked for, there are %d, from 0", wanted,
                       count);
    struct cudaDeviceProp best;
    memset(&best, 0, sizeof best);
    c->ordinal = -1;
    for (int i = wanted < 0 ? 0 : wanted; i < (wanted < 0 ? count : wanted + 1); i++) {
        struct cudaDeviceProp p;
        result = K_CUDA_CALL(c, NULL, cudaGetDeviceProperties(&p, i));
        if (result != cudaSuccess)
            return refuse(result, "asking a GPU for its properties", e);
        const bool better = (p.major >= 8) != (best.major >= 8)
                                ? p.major >= 8
                                : p.totalGlobalMem > best.totalGlobalMem;
        if (c->ordinal < 0 || better) {
            best = p;
            c->ordinal = i;
        }
    }
    if (best.major < 8)
        return err_set(e, ERR_UNSUPPORTED,
                       "%s has compute capability %d.%d; 8.0 is needed (RTX 30 series, A100 and "
                       "later)",
                       best.name, best.major, best.minor);
    *ret_properties = best;
    return ERR_OK;
}

static enum err_code start(struct k_cuda *c, const struct k_cuda_options *o, struct err *e)
{
    struct cudaDeviceProp p;
    enum err_code code = pick(c, o->ordinal, &p, e);
    if (code != ERR_OK)
        return code;
    c->major = p.major;
    c->minor = p.minor;
    c->sm_count = (uint32_t)p.multiProcessorCount;
    c->shared_bytes = (uint32_t)p.sharedMemPerBlockOptin;
    cudaError_t result = K_CUDA_CALL(c, NULL, cudaSetDevice(c->ordinal));
    if (result == cudaSuccess)
        result = K_CUDA_CALL(c, NULL, cudaFree(NULL)); /* makes the context */
    if (result != cudaSuccess)
        return refuse(result, "starting the GPU", e);
    result =
        K_CUDA_CALL(c, NULL, cudaDeviceGetPCIBusId(c->bus_id, (int)sizeof c->bus_id, c->ordinal));
    if (result != cudaSuccess)
        return refuse(result, "asking where the GPU is", e);
    int cuda = 0;
    (void)cudaDriverGetVersion(&cuda);
    char driver[32];
    driver_version(driver, sizeof driver);
    snprintf(c->text, sizeof c->text,
             "%s, sm_%d%d, %u multiprocessors, %.1f GiB, driver %s%sCUDA %d.%d", p.name, p.major,
             p.minor, c->sm_count, (double)p.totalGlobalMem / (1 << 30), driver,
             driver[0] ? ", " : "", cuda / 1000, cuda % 1000 / 10);
    return check_arithmetic(c, e);
}

static void close_device(struct k_device *d)
{
    struct k_cuda *c = k_cuda_of(d);
    c->heap->free(c);
}

/* ---- the table ------------------------------------------------------------------------------- */

static void fill(struct k_ops *ret)
{
    ret->name = "cuda";
    k_cuda_memory_fill(ret);
    k_cuda_stream_fill(ret);
    ret->act_bytes = act_bytes;
    ret->attention_bytes = k_cuda_attention_bytes;
    ret->embed = k_cuda_embed;
    ret->norm = k_cuda_norm;
    ret->quantise = k_cuda_quantise;
    ret->matmul = k_cuda_matmul;
    ret->rope = k_cuda_rope;
    ret->kv_write = k_cuda_kv_write;
    ret->attention = k_cuda_attention;
    ret->add = k_cuda_add;
    ret->router = k_cuda_router;
    ret->grouping = k_cuda_grouping;
    ret->moe_gate_up = k_cuda_moe_gate_up;
    ret->moe_down = k_cuda_moe_down;
    ret->moe_sum = k_cuda_moe_sum;
    ret->gather = k_cuda_gather;
    ret->check = k_cuda_check;
    ret->arrange = k_cuda_arrange;
    ret->bring = k_cuda_bring;
    ret->fetch_rows = k_cuda_fetch_rows;
    ret->enter = k_cuda_enter;
    ret->heads = k_cuda_heads;
    ret->attend = k_cuda_attend;
    ret->route = k_cuda_route;
    ret->pick = k_cuda_pick;
    ret->lost = lost;
    ret->describe = describe;
    ret->bus_id = bus_id;
    ret->counts = counts;
    ret->inject = inject;
}

static enum err_code open_device(const struct k_cuda_options *o, const struct k_cuda_heap *heap,
                                 struct k_device **ret, struct err *e)
{
    struct k_cuda *c = (struct k_cuda *)heap->zero(sizeof *c);
    if (c == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the compute device");
    fill(&c->device.ops);
    c->device.threads = 1;
    c->device.close = close_device;
    c->heap = heap;
    c->fault = o->fault;
    const enum err_code code = start(c, o, e);
    if (code != ERR_OK) {
        heap->free(c);
        return code;
    }
    *ret = &c->device;
    return ERR_OK;
}

/* `extern` gives a constant of C++ a name outside. */
extern "C" {
extern const struct k_cuda_entry islet_cuda_entry;
const struct k_cuda_entry islet_cuda_entry = {K_CUDA_ABI, K_ARITHMETIC_VERSION,
                                              (uint32_t)sizeof(struct k_ops), open_device};
}
