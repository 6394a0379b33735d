/* Who has rows in a step when the experts do not all fit in memory: pure; measured times come in as
 * arguments. Rows of different texts choose different experts: a step of many rows may read more
 * than as many steps of one row. So sequences take turns, `width` of them at a time, and the width
 * is what gave most tokens a second when it was last tried. Bits do not depend on it.
 *
 * A sequence's prompt is computed at the start of its first turn, so that its first answers find
 * what the prompt read. A chunk of it is whole, its rows share what is read; long prompts that wait
 * share it with one another too, which saves more than the second turn has to read again. Those who
 * decode in the same turn have as long for themselves after it. */
#ifndef ISLET_ENGINE_TURNS_H
#define ISLET_ENGINE_TURNS_H

#include <stdbool.h>
#include <stdint.h>

enum {
    ENGINE_TURNS_SEQUENCES = 32,
    ENGINE_TURNS_MOST_STEPS = 96,   /* of a turn: a change of text costs about ten tokens' time */
    ENGINE_TURNS_PAUSE_MS = 30000,  /* that a sequence should wait for its next turn at most, for
                                     * prompts and for answers of others each */
    ENGINE_TURNS_FIRST_MS = 2500,   /* of decoding in a turn, before one that never had one may end
                                     * it, unless it is a first one too */
    ENGINE_TURNS_LONG_ROWS = 32,    /* of a prompt that shares a chunk */
    ENGINE_TURNS_FIRST_STEPS = 192, /* before the first trial of another width */
    ENGINE_TURNS_BASE_STEPS = 48,   /* before the next, after one that was better; doubled when it
                                     * was worse */
    ENGINE_TURNS_MOST_BASE_STEPS = 1536,
    ENGINE_TURNS_TRIAL_STEPS = 12, /* of a trial */
    ENGINE_TURNS_SETTLE_STEPS = 4  /* of them not counted: the cache gets used to it */
};

/* Masks of sequences, 1 << index. */
struct engine_turns_seen {
    uint32_t present;      /* there are such sequences, whether they can have rows now or not */
    uint32_t decoding;     /* may have one row */
    uint32_t prompts;      /* may have rows of a prompt */
    uint32_t long_prompts; /* of them: ENGINE_TURNS_LONG_ROWS or more */
};

struct engine_turns_choice {
    uint32_t decoding, prompts;
};

struct engine_turns_rate {
    uint64_t rows, ns;
    uint32_t steps;
};

struct engine_turns {
    bool active;     /* false: every sequence has rows in every step */
    uint32_t n;      /* sequences that want rows */
    uint32_t width;  /* of them in a turn */
    uint32_t trial;  /* width that is tried now; 0: none */
    bool trial_down; /* the next trial is of half the width */
    uint32_t period; /* steps before the next trial */
    struct engine_turns_rate base, tried;
    uint32_t base_width; /* rows of the steps in base: `width`, or fewer where fewer decode */
    double base_rate;    /* rows a nanosecond of them, or of those before; 0: never measured */
    uint64_t step_ns;    /* of the last decode step */
    uint32_t current;    /* mask of those whose turn it is */
    uint32_t steps;      /* of the turn: without prompt rows */
    uint64_t prompt_ns;  /* of the turn: steps with prompt rows */
    uint64_t decode_ns;  /* of it: the others */
    uint64_t owed_ns;    /* decode time of the turn before its next chunk of a prompt */
    uint32_t known;      /* mask of those that were present */
    uint32_t fresh;      /* of them: never had a turn */
    uint32_t first;      /* of current: it is their first turn */
    uint64_t clock, last[ENGINE_TURNS_SEQUENCES]; /* when a sequence came, or had its last step */
};

/* width: the first guess, 1..32. */
void engine_turns_start(struct engine_turns *t, bool active, uint32_t width);
/* Which of them have rows in the next step; never none of some. */
struct engine_turns_choice engine_turns_pick(struct engine_turns *t,
                                             const struct engine_turns_seen *seen);
/* A step with so many decode and prompt rows took ns. */
void engine_turns_done(struct engine_turns *t, uint32_t decode_rows, uint32_t prompt_rows,
                       uint64_t ns);

#endif
