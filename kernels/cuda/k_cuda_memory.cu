#include "k_cuda_memory.cuh"

#include <cuda.h>
#include <dlfcn.h>
#include <string.h>

#include "k_cuda_entry.h"
#include "k_cuda_fault.h"

enum {
    GRANULE = 2 << 20 /* bytes: memory that is mapped comes in multiples of it */
};

/* The driver's calls for addresses and memory apart from each other. Found when the first range is
 * made: the driver is loaded by then, and nothing is linked against it. */
struct driver {
    CUresult (*reserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
    CUresult (*unreserve)(CUdeviceptr, size_t);
    CUresult (*create)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,
                       unsigned long long);
    CUresult (*release)(CUmemGenericAllocationHandle);
    CUresult (*map)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
    CUresult (*unmap)(CUdeviceptr, size_t);
    CUresult (*access)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
};

struct k_cuda_range {
    struct driver driver;
    uint64_t n_chunks;
    CUmemGenericAllocationHandle chunk[]; /* 0: no memory */
};

static double mib(uint64_t bytes)
{
    return (double)bytes / (1 << 20);
}

static void memory(struct k_device *d, uint64_t *ret_free, uint64_t *ret_total)
{
    struct k_cuda *c = k_cuda_of(d);
    size_t available = 0, total = 0;
    if (K_CUDA_CALL(c, NULL, cudaMemGetInfo(&available, &total)) != cudaSuccess)
        available = total = 0;
    *ret_free = available;
    *ret_total = total;
}

/* The error for memory that was not there, or for a device that failed meanwhile. */
static enum err_code no_memory(struct k_cuda *c, cudaError_t result, uint64_t bytes, struct err *e)
{
    size_t available = 0, total = 0;
    if (result != cudaErrorMemoryAllocation)
        return err_set(e, ERR_DEVICE, "asking the GPU for %.1f MiB: %s (CUDA error %d)", mib(bytes),
                       cudaGetErrorString(result), (int)result);
    if (!c->lost)
        (void)cudaMemGetInfo(&available, &total);
    return err_set(e, ERR_NOMEM,
                   "the GPU has no room for %.1f MiB: %.1f MiB of %.1f are free; lower "
                   "memory.vram_budget or end what fills it",
                   mib(bytes), mib(available), mib(total));
}

static enum err_code new_handle(struct k_cuda *c, uint64_t bytes, struct k_buffer **ret,
                                struct err *e)
{
    struct k_buffer *b = (struct k_buffer *)c->heap->zero(sizeof *b);
    if (b == NULL)
        return err_set(e, ERR_NOMEM, "no memory for a buffer");
    b->device = &c->device;
    b->bytes = bytes == 0 ? 64 : bytes;
    *ret = b;
    return ERR_OK;
}

static enum err_code buffer_new(struct k_device *d, uint64_t bytes, struct k_buffer **ret,
                                struct err *e)
{
    struct k_cuda *c = k_cuda_of(d);
    struct k_buffer *b = NULL;
    if (new_handle(c, bytes, &b, e) != ERR_OK)
        return ERR_NOMEM;
    cudaError_t result = K_CUDA_CALL(c, NULL, cudaSetDevice(c->ordinal));
    if (result == cudaSuccess)
        result = K_CUDA_CALL(c, NULL, cudaMalloc(&b->data, b->bytes));
    /* On the stream that waits for none and is waited for here: others must find it cleared. */
    if (result == cudaSuccess)
        result = K_CUDA_CALL(c, NULL, cudaMemsetAsync(b->data, 0, b->bytes, cudaStreamPerThread));
    if (result == cudaSuccess)
        result = K_CUDA_CALL(c, NULL, cudaStreamSynchronize(cudaStreamPerThread));
    if (result != cudaSuccess) {
        const uint64_t wanted = b->bytes;
        (void)cudaFree(b->data);
        c->heap->free(b);
        return no_memory(c, result, wanted, e);
    }
    c->counts.allocations++;
    *ret = b;
    return ERR_OK;
}

/* ---- the host's memory ----------------------------------------------------------------------- */

bool k_cuda_memory_is_pinned(const struct k_cuda *c, const void *first, uint64_t n)
{
    const uint8_t *p = (const uint8_t *)first;
    for (uint32_t i = 0; i < c->pinned_count; i++) {
        const struct k_cuda_pinned *x = &c->pinned[i];
        if (p >= x->first && (uint64_t)(p - x->first) <= x->bytes &&
            n <= x->bytes - (uint64_t)(p - x->first))
            return true;
    }
    return false;
}

static void pinned_add(struct k_cuda *c, const void *first, uint64_t bytes)
{
    c->pinned[c->pinned_count].first = (const uint8_t *)first;
    c->pinned[c->pinned_count++].bytes = bytes;
}

/* False: never added. */
static bool pinned_remove(struct k_cuda *c, const void *first)
{
    for (uint32_t i = 0; i < c->pinned_count; i++)
        if (c->pinned[i].first == first) {
            c->pinned[i] = c->pinned[--c->pinned_count];
            return true;
        }
    return false;
}

static enum err_code pinned_room(const struct k_cuda *c, struct err *e)
{
    if (c->pinned_count < K_CUDA_MAX_PINNED)
        return ERR_OK;
    return err_set(e, ERR_LIMIT, "pinned memory: at most %d pieces", K_CUDA_MAX_PINNED);
}

static enum err_code pin_failed(cudaError_t result, uint64_t bytes, struct err *e)
{
    return err_set(e, result == cudaErrorMemoryAllocation ? ERR_NOMEM : ERR_DEVICE,
                   "pinning %.1f MiB of memory for the GPU: %s (CUDA error %d); a lower "
                   "memory.ram_budget needs less of it",
                   mib(bytes), cudaGetErrorString(result), (int)result);
}

static enum err_code pinned_new(struct k_device *d, uint64_t bytes, struct k_buffer **ret,
                                struct err *e)
{
    struct k_cuda *c = k_cuda_of(d);
    struct k_buffer *b = NULL;
    enum err_code code = pinned_room(c, e);
    if (code == ERR_OK)
        code = new_handle(c, bytes, &b, e);
    if (code != ERR_OK)
        return code;
    cudaError_t result = K_CUDA_CALL(
        c, NULL,
        cudaHostAlloc((void **)&b->host, b->bytes, cudaHostAllocMapped | cudaHostAllocPortable));
    if (result == cudaSuccess)
        result = K_CUDA_CALL(c, NULL, cudaHostGetDevicePointer((void **)&b->data, b->host, 0));
    if (result != cudaSuccess) {
        const uint64_t wanted = b->bytes;
        (void)cudaFreeHost(b->host);
        c->heap->free(b);
        return pin_failed(result, wanted, e);
    }
    memset(b->host, 0, b->bytes);
    pinned_add(c, b->host, b->bytes);
    c->counts.allocations++;
    *ret = b;
    return ERR_OK;
}

static void *buffer_host(struct k_buffer *b)
{
    return b->host;
}

static enum err_code host_register(struct k_device *d, void *first, uint64_t bytes, struct err *e)
{
    struct k_cuda *c = k_cuda_of(d);
    const enum err_code code = pinned_room(c, e);
    if (code != ERR_OK)
        return code;
    const cudaError_t result = K_CUDA_CALL(
        c, NULL, cudaHostRegister(first, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable));
    if (result != cudaSuccess)
        return pin_failed(result, bytes, e);
    void *device = NULL; /* kernels read it by the host's addresses */
    if (K_CUDA_CALL(c, NULL, cudaHostGetDevicePointer(&device, first, 0)) != cudaSuccess ||
        device != first) {
        (void)cudaHostUnregister(first);
        return err_set(e, ERR_UNSUPPORTED, "the GPU has other addresses for memory of the host");
    }
    pinned_add(c, first, bytes);
    c->counts.allocations++;
    return ERR_OK;
}

static void host_unregister(struct k_device *d, void *first)
{
    if (pinned_remove(k_cuda_of(d), first))
        (void)cudaHostUnregister(first);
}

/* ---- ranges ---------------------------------------------------------------------------------- */

static bool find_driver(struct driver *ret)
{
    void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (lib == NULL)
        return false;
    *(void **)&ret->reserve = dlsym(lib, "cuMemAddressReserve");
    *(void **)&ret->unreserve = dlsym(lib, "cuMemAddressFree");
    *(void **)&ret->create = dlsym(lib, "cuMemCreate");
    *(void **)&ret->release = dlsym(lib, "cuMemRelease");
    *(void **)&ret->map = dlsym(lib, "cuMemMap");
    *(void **)&ret->unmap = dlsym(lib, "cuMemUnmap");
    *(void **)&ret->access = dlsym(lib, "cuMemSetAccess");
    dlclose(lib); /* the CUDA library holds it */
    return ret->reserve && ret->unreserve && ret->create && ret->release && ret->map &&
           ret->unmap && ret->access;
}

static enum err_code range_new(struct k_device *d, uint64_t bytes, struct k_buffer **ret,
                               struct err *e)
{
    struct k_cuda *c = k_cuda_of(d);
    struct k_buffer *b = NULL;
    const uint64_t n = bytes / K_CHUNK_BYTES + (bytes % K_CHUNK_BYTES != 0);
    if (n == 0 || n > UINT32_MAX)
        return err_set(e, ERR_ARGUMENT, "a range of %.1f MiB on the GPU", mib(bytes));
    enum err_code code = new_handle(c, (bytes + GRANULE - 1) / GRANULE * GRANULE, &b, e);
    if (code != ERR_OK)
        return code;
    b->range =
        (struct k_cuda_range *)c->heap->zero(sizeof *b->range + n * sizeof b->range->chunk[0]);
    CUdeviceptr at = 0;
    cudaError_t result = cudaSuccess;
    if (b->range == NULL)
        code =
            err_set(e, ERR_NOMEM, "no memory for the table of %llu chunks", (unsigned long long)n);
    else if (!find_driver(&b->range->driver))
        code = err_set(e, ERR_UNSUPPORTED, "the NVIDIA driver cannot map memory in chunks");
    else
        result =
            K_CUDA_CALL(c, NULL, (cudaError_t)b->range->driver.reserve(&at, b->bytes, 0, 0, 0));
    if (result != cudaSuccess)
        code = err_set(e, ERR_UNSUPPORTED, "reserving %.1f MiB of addresses: CUDA error %d",
                       mib(b->bytes), (int)result);
    if (code != ERR_OK) {
        c->heap->free(b->range);
        c->heap->free(b);
        return code;
    }
    b->range->n_chunks = n;
    b->data = (uint8_t *)(uintptr_t)at;
    c->counts.allocations++;
    *ret = b;
    return ERR_OK;
}

/* The range's last chunk may be a short one. */
static uint64_t chunk_bytes(const struct k_buffer *b, uint64_t i)
{
    const uint64_t left = b->bytes - i * K_CHUNK_BYTES;
    return left < K_CHUNK_BYTES ? left : (uint64_t)K_CHUNK_BYTES;
}

static void chunks_return(struct k_buffer *b, uint64_t first, uint64_t n)
{
    struct k_cuda_range *r = b->range;
    for (uint64_t i = first; i < first + n && i < r->n_chunks; i++)
        if (r->chunk[i] != 0) {
            (void)r->driver.unmap((CUdeviceptr)(uintptr_t)b->data + i * K_CHUNK_BYTES,
                                  chunk_bytes(b, i));
            (void)r->driver.release(r->chunk[i]);
            r->chunk[i] = 0;
        }
}

static cudaError_t chunk_take(struct k_cuda *c, struct k_buffer *b, uint64_t i)
{
    const struct driver *driver = &b->range->driver;
    const CUdeviceptr at = (CUdeviceptr)(uintptr_t)b->data + i * K_CHUNK_BYTES;
    const uint64_t bytes = chunk_bytes(b, i);
    CUmemAllocationProp wanted;
    CUmemAccessDesc access;
    CUmemGenericAllocationHandle chunk = 0;
    memset(&wanted, 0, sizeof wanted);
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    wanted.location.id = c->ordinal;
    memset(&access, 0, sizeof access);
    access.location = wanted.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    cudaError_t result =
        K_CUDA_CALL(c, NULL, (cudaError_t)driver->create(&chunk, bytes, &wanted, 0));
    if (result != cudaSuccess)
        return result;
    result = K_CUDA_CALL(c, NULL, (cudaError_t)driver->map(at, bytes, 0, chunk, 0));
    if (result != cudaSuccess) {
        (void)driver->release(chunk);
        return result;
    }
    b->range->chunk[i] = chunk;
    c->counts.allocations++;
    return K_CUDA_CALL(c, NULL, (cudaError_t)driver->access(at, bytes, &access, 1));
}

static enum err_code chunks_take(struct k_buffer *b, uint64_t first, uint64_t n, struct err *e)
{
    struct k_cuda *c = k_cuda_of(b->device);
    if (first > b->range->n_chunks || n > b->range->n_chunks - first)
        return err_set(e, ERR_ARGUMENT, "chunks %llu to %llu of a range of %llu",
                       (unsigned long long)first, (unsigned long long)(first + n),
                       (unsigned long long)b->range->n_chunks);
    for (uint64_t i = first; i < first + n; i++)
        if (b->range->chunk[i] != 0)
            return err_set(e, ERR_ARGUMENT, "chunk %llu has memory", (unsigned long long)i);
    for (uint64_t i = first; i < first + n; i++) {
        const cudaError_t result = chunk_take(c, b, i);
        if (result != cudaSuccess) {
            chunks_return(b, first, i + 1 - first);
            return no_memory(c, result, n * K_CHUNK_BYTES, e);
        }
    }
    return ERR_OK;
}

static void buffer_free(struct k_buffer *b)
{
    if (b == NULL)
        return;
    struct k_cuda *c = k_cuda_of(b->device);
    if (b->range != NULL) {
        chunks_return(b, 0, b->range->n_chunks);
        (void)b->range->driver.unreserve((CUdeviceptr)(uintptr_t)b->data, b->bytes);
        c->heap->free(b->range);
    } else if (b->host != NULL) {
        (void)pinned_remove(c, b->host);
        (void)cudaFreeHost(b->host);
    } else {
        (void)cudaFree(b->data);
    }
    c->heap->free(b);
}

void k_cuda_memory_fill(struct k_ops *ret)
{
    ret->buffer_new = buffer_new;
    ret->buffer_free = buffer_free;
    ret->buffer_host = buffer_host;
    ret->pinned_new = pinned_new;
    ret->host_register = host_register;
    ret->host_unregister = host_unregister;
    ret->range_new = range_new;
    ret->chunks_take = chunks_take;
    ret->chunks_return = chunks_return;
    ret->memory = memory;
}
