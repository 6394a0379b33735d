#include "ssd_rig.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "alloc.h"

static uint8_t *make_bytes(uint32_t file, uint64_t size)
{
    uint8_t *bytes = alloc_get(ALLOC_MISC, (size_t)size + 8);
    assert_non_null(bytes);
    for (uint64_t i = 0; i < size; i += 8) {
        uint64_t x = (i + 8) * UINT64_C(0x9E3779B97F4A7C15) + file;
        x ^= x >> 29;
        x *= UINT64_C(0xBF58476D1CE4E5B9);
        memcpy(bytes + i, &x, 8);
    }
    return bytes;
}

static void write_file(const char *path, const uint8_t *bytes, uint64_t size)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    assert_true(fd >= 0);
    for (uint64_t done = 0; done < size;) {
        const ssize_t n = write(fd, bytes + done, (size_t)(size - done));
        assert_true(n > 0);
        done += (uint64_t)n;
    }
    assert_int_equal(fsync(fd), 0);
    close(fd);
}

void ssd_rig_init(struct ssd_rig *r, const char *parent, const uint64_t sizes[SSD_RIG_FILES],
                  uint64_t arena_bytes)
{
    *r = (struct ssd_rig){.arena_bytes = arena_bytes, .blocks = alloc_live_blocks()};
    snprintf(r->dir, sizeof(r->dir), "%s/islet-ssd-XXXXXX", parent);
    assert_non_null(mkdtemp(r->dir));
    for (uint32_t i = 0; i < SSD_RIG_FILES; i++) {
        r->sizes[i] = sizes[i];
        snprintf(r->paths[i], sizeof(r->paths[i]), "%s/part%u.gguf", r->dir, i);
        r->bytes[i] = make_bytes(i, sizes[i]);
        write_file(r->paths[i], r->bytes[i], sizes[i]);
    }
    r->arena = alloc_aligned(ALLOC_MISC, TIER_SSD_ALIGN, (size_t)arena_bytes);
    assert_non_null(r->arena);
    ssd_rig_clear(r);
    fake_read_init(&r->fake);
}

void ssd_rig_done(struct ssd_rig *r)
{
    ssd_rig_close(r);
    for (uint32_t i = 0; i < SSD_RIG_FILES; i++) {
        unlink(r->paths[i]);
        alloc_free(r->bytes[i]);
    }
    assert_int_equal(rmdir(r->dir), 0);
    alloc_free(r->arena);
    assert_int_equal(alloc_live_blocks(), r->blocks);
}

struct tier_ssd_options ssd_rig_options(struct ssd_rig *r, const char *paths[SSD_RIG_FILES],
                                        enum tier_ssd_io io, uint32_t depth, bool fake)
{
    for (uint32_t i = 0; i < SSD_RIG_FILES; i++)
        paths[i] = r->paths[i];
    return (struct tier_ssd_options){.paths = paths,
                                     .n_files = SSD_RIG_FILES,
                                     .io = io,
                                     .depth = depth,
                                     .arena = r->arena,
                                     .arena_bytes = r->arena_bytes,
                                     .source = fake ? &r->fake.source : NULL};
}

void ssd_rig_open(struct ssd_rig *r, enum tier_ssd_io io, uint32_t depth, bool fake)
{
    const char *paths[SSD_RIG_FILES];
    struct err e = {.code = ERR_OK};
    ssd_rig_close(r);
    const struct tier_ssd_options o = ssd_rig_options(r, paths, io, depth, fake);
    if (tier_ssd_open(&o, &r->ssd, &e) != ERR_OK)
        fail_msg("%s", e.text);
}

void ssd_rig_close(struct ssd_rig *r)
{
    tier_ssd_close(r->ssd);
    r->ssd = NULL;
    assert_false(r->fake.too_many);
    assert_false(r->fake.misplaced);
}

struct tier_ssd_part ssd_rig_part(struct ssd_rig *r, uint32_t file, uint64_t offset, uint64_t bytes)
{
    const uint64_t before = offset % TIER_SSD_ALIGN;
    const uint64_t window = (before + bytes + TIER_SSD_ALIGN - 1) / TIER_SSD_ALIGN * TIER_SSD_ALIGN;
    const struct tier_ssd_part part = {file, offset, bytes, r->used + before};
    assert_true(window <= r->arena_bytes - r->used);
    r->used += window;
    return part;
}

void ssd_rig_clear(struct ssd_rig *r)
{
    memset(r->arena, SSD_RIG_EMPTY, (size_t)r->arena_bytes);
    r->used = 0;
}

void ssd_rig_assert_part(const struct ssd_rig *r, const struct tier_ssd_part *part)
{
    const uint8_t *got = r->arena + part->place, *want = r->bytes[part->file] + part->offset;
    if (memcmp(got, want, (size_t)part->bytes) == 0)
        return;
    uint64_t i = 0;
    while (got[i] == want[i])
        i++;
    fail_msg("file %u, slice at %llu: byte %llu of %llu is wrong", part->file,
             (unsigned long long)part->offset, (unsigned long long)i,
             (unsigned long long)part->bytes);
}

void ssd_rig_assert_rest(const struct ssd_rig *r, const struct tier_ssd_part *parts, uint32_t n)
{
    uint8_t *owned = alloc_zero(ALLOC_MISC, (size_t)(r->arena_bytes / TIER_SSD_ALIGN), 1);
    assert_non_null(owned);
    for (uint32_t i = 0; i < n; i++)
        for (uint64_t w = parts[i].place / TIER_SSD_ALIGN;
             w * TIER_SSD_ALIGN < parts[i].place + parts[i].bytes; w++)
            owned[w] = 1;
    uint8_t empty[TIER_SSD_ALIGN];
    memset(empty, SSD_RIG_EMPTY, sizeof(empty));
    for (uint64_t w = 0; w < r->arena_bytes / TIER_SSD_ALIGN; w++)
        if (!owned[w] && memcmp(r->arena + w * TIER_SSD_ALIGN, empty, TIER_SSD_ALIGN) != 0)
            fail_msg("window %llu of the arena was written to and is nobody's",
                     (unsigned long long)w);
    alloc_free(owned);
}

struct tier_ssd_result ssd_rig_wait(struct ssd_rig *r)
{
    struct tier_ssd_result result;
    assert_int_equal(tier_ssd_wait(r->ssd, true, &result, 1), 1);
    return result;
}

struct tier_ssd_result ssd_rig_read(struct ssd_rig *r, const struct tier_ssd_part *parts,
                                    uint32_t n)
{
    static const uint64_t id = UINT64_C(0xFEEDFACE12345678);
    tier_ssd_start(r->ssd, id, parts, n);
    const struct tier_ssd_result result = ssd_rig_wait(r);
    assert_true(result.id == id);
    return result;
}
