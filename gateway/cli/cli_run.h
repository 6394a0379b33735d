/* `islet run`: one question, the answer on standard output. */
#ifndef ISLET_CLI_RUN_H
#define ISLET_CLI_RUN_H

struct cli_options;

int cli_run_main(const struct cli_options *o); /* exit status */

#endif
