/* What a step's results mean for its sequences: events, sampled tokens, ends. The engine
 * thread's. */
#ifndef ISLET_ENGINE_ANSWER_H
#define ISLET_ENGINE_ANSWER_H

#include "engine_run.h"

/* Takes the results of the step that the forward pass has computed. */
void engine_answer_step(struct engine_run *run, uint64_t now_ns);
/* Has the answer its end already (tokens, stop token, context)? For a resumed request, before
 * anything is computed. */
bool engine_answer_ended(const struct engine_run *run, const struct proto_run *r,
                         const uint32_t *tokens, uint32_t n_tokens, enum proto_finish *ret);

#endif
