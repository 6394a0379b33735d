/* `islet up`: worker and gateway in the foreground, kept running. */
#ifndef ISLET_CLI_UP_H
#define ISLET_CLI_UP_H

struct cli_options;

int cli_up_run(const struct cli_options *o); /* exit status */

#endif
