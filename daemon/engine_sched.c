#include "engine_sched.h"

int64_t engine_sched_urgency(uint32_t remaining, int8_t priority, uint64_t waited_ms)
{
    const uint64_t most = UINT32_MAX; /* 49 days: the sum cannot overflow */
    const int64_t age = (int64_t)(waited_ms < most ? waited_ms : most) * ENGINE_SCHED_AGE_ROWS;
    return (int64_t)remaining + (int64_t)priority * ENGINE_SCHED_PRIORITY_ROWS - age;
}

/* At least one prompt row a step, so that a prompt behind many answers comes to its end. */
static uint32_t prompt_rows(const struct engine_sched_limits *limits, uint32_t decoding)
{
    uint64_t rows = limits->prefill_chunk;
    if (limits->whole)
        return (uint32_t)rows;
    if (decoding > 0 && limits->row_ns == 0 && rows > ENGINE_SCHED_FIRST_ROWS)
        rows = ENGINE_SCHED_FIRST_ROWS;
    if (decoding > 0 && limits->row_ns > 0) {
        const uint64_t fit = ENGINE_SCHED_STEP_MS * 1000000ull / limits->row_ns;
        const uint64_t left = fit > decoding ? fit - decoding : 1;
        rows = left < rows ? left : rows;
    }
    return (uint32_t)rows;
}

/* The most urgent sequence that still wants prompt rows; n if none does. */
static uint32_t most_urgent(const struct engine_sched_sequence *s, uint32_t n, const uint32_t *rows)
{
    uint32_t best = n;
    int64_t best_urgency = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (s[i].decoding || rows[i] > 0 || s[i].max_rows == 0 || s[i].remaining == 0)
            continue;
        const int64_t urgency = engine_sched_urgency(s[i].remaining, s[i].priority, s[i].waited_ms);
        if (best == n || urgency < best_urgency ||
            (urgency == best_urgency && s[i].order < s[best].order)) {
            best = i;
            best_urgency = urgency;
        }
    }
    return best;
}

uint32_t engine_sched_plan(const struct engine_sched_sequence *sequences, uint32_t n,
                           const struct engine_sched_limits *limits, uint32_t *ret_rows)
{
    uint32_t sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        ret_rows[i] = sequences[i].decoding && sequences[i].max_rows > 0 ? 1 : 0;
        sum += ret_rows[i];
    }
    uint32_t left = prompt_rows(limits, sum);
    while (left > 0) {
        const uint32_t i = most_urgent(sequences, n, ret_rows);
        if (i == n)
            break;
        uint32_t rows = sequences[i].remaining;
        rows = rows < sequences[i].max_rows ? rows : sequences[i].max_rows;
        rows = rows < left ? rows : left;
        ret_rows[i] = rows;
        left -= rows;
        sum += rows;
    }
    return sum;
}

static bool wants(const struct engine_sched_sequence *s)
{
    return s->max_rows > 0 && s->remaining > 0;
}

void engine_sched_limit(struct engine_sched_sequence *sequences, uint32_t n, uint32_t most)
{
    uint64_t chosen = 0;
    for (uint32_t k = 0; k < most; k++) {
        uint32_t best = n;
        for (uint32_t i = 0; i < n; i++) {
            const struct engine_sched_sequence *s = &sequences[i], *b = &sequences[best];
            if (!wants(s) || (chosen >> i & 1))
                continue;
            if (best == n || s->served < b->served ||
                (s->served == b->served && s->order < b->order))
                best = i;
        }
        if (best < n)
            chosen |= UINT64_C(1) << best;
    }
    for (uint32_t i = 0; i < n && most > 0; i++)
        if (!(chosen >> i & 1))
            sequences[i].max_rows = 0;
}

uint32_t engine_sched_victim(const struct engine_sched_sequence *sequences, uint32_t n)
{
    uint32_t youngest = n, oldest = n;
    for (uint32_t i = 0; i < n; i++) {
        if (oldest == n || sequences[i].order < sequences[oldest].order)
            oldest = i;
        if (sequences[i].holds_pages &&
            (youngest == n || sequences[i].order > sequences[youngest].order))
            youngest = i;
    }
    return youngest == oldest ? n : youngest;
}
