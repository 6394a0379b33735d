/* Who gets a slot and pages, and who gives them back. The engine thread's. */
#ifndef ISLET_ENGINE_ADMIT_H
#define ISLET_ENGINE_ADMIT_H

#include "engine_run.h"

/* Gives pages to pre-empted sequences, then slots and pages to waiting requests, as far as there
 * are any. */
void engine_admit_all(struct engine_run *run, uint64_t now_ns);
/* Chooses the rows of the next step (slot.rows) and makes sure of their pages; returns their
 * sum. */
uint32_t engine_admit_rows(struct engine_run *run, uint64_t now_ns);

#endif
