#include "guard_page.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static size_t guard_page_round(size_t n)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    return (n + page - 1) / page * page;
}

uint8_t *guard_page_copy(const void *data, size_t n)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), room = guard_page_round(n);
    uint8_t *base =
        mmap(NULL, room + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED || mprotect(base + room, page, PROT_NONE) != 0)
        abort();
    uint8_t *copy = base + room - n;
    if (n > 0)
        memcpy(copy, data, n);
    return copy;
}

void guard_page_free(uint8_t *copy, size_t n)
{
    if (copy == NULL)
        return;
    size_t room = guard_page_round(n);
    munmap(copy + n - room, room + (size_t)sysconf(_SC_PAGESIZE));
}
