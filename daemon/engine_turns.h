/* Who decodes in a step when the experts do not all fit in memory: pure; measured times come in as
 * arguments. Rows of different texts choose different experts: a step of many rows may read more
 * than as many steps of one row. So decoding sequences take turns, `width` of them at a time, and
 * the width is what gave most tokens a second when it was last tried. Bits do not depend on it.
 *
 * A prompt's rows share what is read, so a chunk is computed whole even while others decode; after
 * it the decoding ones have the engine to themselves for as long as it took. Prompts share with one
 * another too: where several sequences decode, a new one would wait for their turns anyway, so it
 * waits for company first, three chunks' time at most. */
#ifndef ISLET_ENGINE_TURNS_H
#define ISLET_ENGINE_TURNS_H

#include <stdbool.h>
#include <stdint.h>

enum {
    ENGINE_TURNS_SEQUENCES = 32,
    ENGINE_TURNS_MOST_STEPS = 96,   /* of a turn: a change of text costs about ten tokens' time */
    ENGINE_TURNS_PAUSE_MS = 30000,  /* that a sequence should wait for its next turn at most */
    ENGINE_TURNS_FIRST_STEPS = 192, /* before the first trial of another width */
    ENGINE_TURNS_BASE_STEPS = 48,   /* before the next, after one that was better; doubled when it
                                     * was worse */
    ENGINE_TURNS_MOST_BASE_STEPS = 1536,
    ENGINE_TURNS_TRIAL_STEPS = 12, /* of a trial */
    ENGINE_TURNS_SETTLE_STEPS = 4, /* of them not counted: the cache gets used to it */
    ENGINE_TURNS_COMPANY = 3       /* chunks' time that a prompt waits for others at most */
};

struct engine_turns_rate {
    uint64_t rows, ns;
    uint32_t steps;
};

struct engine_turns {
    bool active;     /* false: every sequence decodes in every step */
    uint32_t n;      /* sequences that decode */
    uint32_t width;  /* of them in a turn */
    uint32_t trial;  /* width that is tried now; 0: none */
    bool trial_down; /* the next trial is of half the width */
    uint32_t period; /* steps before the next trial */
    struct engine_turns_rate base, tried;
    uint32_t base_width; /* rows of the steps in base: `width`, or fewer where fewer decode */
    double base_rate;    /* rows a nanosecond of them, or of those before; 0: never measured */
    uint64_t step_ns;    /* of the last decode step */
    uint64_t owed_ns;    /* decode time before the next chunk of a prompt */
    uint64_t chunk_ns;   /* of the last step with prompt rows */
    uint32_t current;    /* mask of those whose turn it is */
    uint32_t left;       /* steps of the turn that are left */
    uint64_t clock, last[ENGINE_TURNS_SEQUENCES]; /* when a sequence's last turn began */
};

/* width: the first guess, 1..32. */
void engine_turns_start(struct engine_turns *t, bool active, uint32_t width);
/* Which of the decoding sequences (mask) have a row in the next step; never none of some. */
uint32_t engine_turns_pick(struct engine_turns *t, uint32_t decoding);
/* Prompts that are to be computed. */
struct engine_turns_prompts {
    uint32_t n;         /* of them */
    uint64_t waited_ns; /* the one that has waited longest */
    bool urgent;        /* one is under way, or comes before others by its priority */
};

/* May the next step have prompt rows while the sequences of the mask decode? */
bool engine_turns_prompt(const struct engine_turns *t, uint32_t decoding,
                         const struct engine_turns_prompts *prompts);
/* A step with so many decode and prompt rows took ns. */
void engine_turns_done(struct engine_turns *t, uint32_t decode_rows, uint32_t prompt_rows,
                       uint64_t ns);

#endif
