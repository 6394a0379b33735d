/* When a GPU that an engine does without is looked for again. Pure: events and the time in,
 * decisions out.
 *
 * A first look after a period (ENGINE_RETRY_MS), then as often. Each time but the first that the
 * GPU was in use and had to be given up, or did not work after all, doubles that, up to
 * ENGINE_RETRY_MOST_MS; one that failed ENGINE_RETRY_FAILURES times is not looked for any more. */
#ifndef ISLET_ENGINE_RETRY_H
#define ISLET_ENGINE_RETRY_H

#include <stdbool.h>
#include <stdint.h>

enum {
    ENGINE_RETRY_MS = 60000,
    ENGINE_RETRY_MOST_MS = 600000,
    ENGINE_RETRY_FAILURES = 3 /* of steps */
};

struct engine_retry {
    uint64_t due_ns; /* 0: never */
    uint32_t period_ms;
    uint32_t rest_ms;          /* that the first wait takes instead; 0: no other */
    uint32_t given_up, failed; /* times */
};

/* period_ms 0: ENGINE_RETRY_MS. rest_ms: of the first wait, or 0. */
void engine_retry_start(struct engine_retry *r, uint32_t period_ms, uint32_t rest_ms);
/* The CPU serves alone from now on. */
void engine_retry_wait(struct engine_retry *r, uint64_t now_ns);
/* The GPU was given up while it was in use; failed: a step did. Then engine_retry_wait. */
void engine_retry_on_loss(struct engine_retry *r, bool failed);
bool engine_retry_is_due(const struct engine_retry *r, uint64_t now_ns);

#endif
