/* Opens a backend: by the CPU's bits and the level asked for. */
#include "alloc.h"
#include "k_cpu.h"
#include "k_cpu_ops.h"
#include "k_host.h"
#include "k_pool.h"
#include "k_ref.h"
#include "kernels.h"

static const char *const names[] = {"auto", "reference", "avx2", "avx512"};

const char *k_levels_available(void)
{
    if (k_cpu_has(K_LEVEL_AVX512))
        return "reference avx2 avx512";
    return k_cpu_has(K_LEVEL_AVX2) ? "reference avx2" : "reference";
}

static void host_close(struct k_device *d)
{
    struct k_host *h = k_host_of(d);
    k_pool_free(h->pool);
    alloc_free(h);
}

enum err_code k_open(enum k_level level, uint32_t threads, struct k_device **ret, struct err *e)
{
    if (level == K_LEVEL_AUTO)
        level = k_cpu_has(K_LEVEL_AVX512) ? K_LEVEL_AVX512
                : k_cpu_has(K_LEVEL_AVX2) ? K_LEVEL_AVX2
                                          : K_LEVEL_REFERENCE;
    if (!k_cpu_has(level))
        return err_set(e, ERR_UNSUPPORTED,
                       "compute.cpu_level = %s: this processor lacks %s; it has %s", names[level],
                       k_cpu_needs(level), k_levels_available());
    if (threads > K_MAX_THREADS)
        return err_set(e, ERR_ARGUMENT, "compute.threads = %u: at most %d", threads, K_MAX_THREADS);
    if (!k_pool_float_mode_is_exact())
        return err_set(e, ERR_UNSUPPORTED,
                       "the floating-point mode flushes denormals or does not round to nearest; "
                       "answers would not be exact");
    struct k_host *h = alloc_zero(ALLOC_WORK, 1, sizeof *h);
    if (h == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the compute device");
    struct k_device *d = &h->device;
    d->close = host_close;
    d->threads = level == K_LEVEL_REFERENCE ? 1 : threads == 0 ? k_cpu_cores() : threads;
    if (level == K_LEVEL_REFERENCE) {
        d->ops = *k_ref_ops();
    } else {
        k_cpu_ops_fill(level, &h->inner);
        k_cpu_ops_table(&h->inner, &d->ops);
        const enum err_code code = k_pool_new(d->threads, k_cpu_ops_scratch_bytes(), &h->pool, e);
        if (code != ERR_OK) {
            alloc_free(h);
            return code;
        }
    }
    *ret = d;
    return ERR_OK;
}

void k_close(struct k_device *d)
{
    if (d != NULL)
        d->close(d);
}

const struct k_ops *k_ops(const struct k_device *d)
{
    return &d->ops;
}

uint32_t k_threads(const struct k_device *d)
{
    return d->threads;
}
