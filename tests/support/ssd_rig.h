/* Files of known bytes, an arena of known bytes and a tier_ssd between them: starts requests and
 * proves that what came is what the files hold and that nothing else of the arena changed. */
#ifndef ISLET_SSD_RIG_H
#define ISLET_SSD_RIG_H

#include <stdbool.h>
#include <stdint.h>

#include "fake_read.h"
#include "tier_ssd.h"

enum {
    SSD_RIG_FILES = 3,
    SSD_RIG_EMPTY = 0xEE /* every byte of the arena that no request owns */
};

struct ssd_rig {
    char dir[64];
    char paths[SSD_RIG_FILES][96];
    uint64_t sizes[SSD_RIG_FILES];
    uint8_t *bytes[SSD_RIG_FILES]; /* what the files hold */
    uint8_t *arena;
    uint64_t arena_bytes;
    uint64_t used;   /* of the arena, by requests that were placed */
    uint64_t blocks; /* of the heap, before */
    struct fake_read fake;
    struct tier_ssd *ssd;
};

/* A folder under `parent` with SSD_RIG_FILES files of these sizes, no two windows alike, synced. Ends the test where that
 * fails. */
void ssd_rig_init(struct ssd_rig *r, const char *parent, const uint64_t sizes[SSD_RIG_FILES],
                  uint64_t arena_bytes);
void ssd_rig_done(struct ssd_rig *r);

/* Options for the rig's files and arena; `fake`: with the reader that misbehaves. */
struct tier_ssd_options ssd_rig_options(struct ssd_rig *r, const char *paths[SSD_RIG_FILES],
                                        enum tier_ssd_io io, uint32_t depth, bool fake);
/* Opens with the above; a failure ends the test. */
void ssd_rig_open(struct ssd_rig *r, enum tier_ssd_io io, uint32_t depth, bool fake);
void ssd_rig_close(struct ssd_rig *r);

/* A part at the next free place of the arena. */
struct tier_ssd_part ssd_rig_part(struct ssd_rig *r, uint32_t file, uint64_t offset,
                                  uint64_t bytes);
/* Fills the arena with SSD_RIG_EMPTY and forgets all places. */
void ssd_rig_clear(struct ssd_rig *r);
/* Ends the test unless the part's bytes are those of the file. */
void ssd_rig_assert_part(const struct ssd_rig *r, const struct tier_ssd_part *part);
/* Ends the test unless all of the arena outside of the parts' windows is SSD_RIG_EMPTY. */
void ssd_rig_assert_rest(const struct ssd_rig *r, const struct tier_ssd_part *parts, uint32_t n);
/* Waits for one result. Ends the test if none is open. */
struct tier_ssd_result ssd_rig_wait(struct ssd_rig *r);
/* Starts one request and waits for it alone. */
struct tier_ssd_result ssd_rig_read(struct ssd_rig *r, const struct tier_ssd_part *parts,
                                    uint32_t n);

#endif
