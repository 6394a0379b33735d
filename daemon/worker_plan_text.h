/* A plan in words and as JSON. */
#ifndef ISLET_WORKER_PLAN_TEXT_H
#define ISLET_WORKER_PLAN_TEXT_H

#include <stdio.h>

struct worker_plan;

void worker_plan_text_table(const struct worker_plan *p, FILE *out);
/* One object on one line, all sizes in bytes and rates in bytes a second. */
void worker_plan_text_json(const struct worker_plan *p, FILE *out);

#endif
