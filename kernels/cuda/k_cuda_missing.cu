/* Operations that no other file defines yet: weak, so that each gives way to the real one. */
#include "k_cuda.cuh"

#define K_CUDA_MISSING(op)                                                                        \
    extern "C"                                                                                    \
        __attribute__((weak)) enum err_code k_cuda_##op(const struct k_##op *, struct k_stream *) \
    {                                                                                             \
        return ERR_UNSUPPORTED;                                                                   \
    }

K_CUDA_MISSING(embed)
K_CUDA_MISSING(norm)
K_CUDA_MISSING(quantise)
K_CUDA_MISSING(matmul)
K_CUDA_MISSING(rope)
K_CUDA_MISSING(kv_write)
K_CUDA_MISSING(attention)
K_CUDA_MISSING(add)
K_CUDA_MISSING(router)
K_CUDA_MISSING(grouping)
K_CUDA_MISSING(moe_gate_up)
K_CUDA_MISSING(moe_down)
K_CUDA_MISSING(moe_sum)
K_CUDA_MISSING(gather)
K_CUDA_MISSING(check)
K_CUDA_MISSING(arrange)

extern "C" __attribute__((weak)) uint64_t k_cuda_attention_bytes(const struct k_device *, uint32_t,
                                                                 uint32_t, uint32_t, uint32_t)
{
    return 64;
}
