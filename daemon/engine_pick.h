/* Draws tokens on the device that has the logits, where it can and a request asks for nothing that
 * needs all of them: they then stay there. */
#ifndef ISLET_ENGINE_PICK_H
#define ISLET_ENGINE_PICK_H

#include "engine_run.h"

/* Before a step's rows are filled in. */
void engine_pick_begin(struct engine_run *run);
/* Once the slot's rows whose logits are wanted are filled in. */
void engine_pick_ask(struct engine_run *run, struct engine_slot *slot);
/* After the step: false: the slot's token is to be drawn from its logits. */
bool engine_pick_take(const struct engine_run *run, const struct engine_slot *slot, uint32_t *ret);

#endif
