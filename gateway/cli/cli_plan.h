/* `islet plan`: what a model needs, what fits and what speed to expect, before it is started. */
#ifndef ISLET_CLI_PLAN_H
#define ISLET_CLI_PLAN_H

struct cli_options;

int cli_plan_main(const struct cli_options *o); /* exit status, if at all: becomes isletd */

#endif
