/* `islet status`: every figure of /status. */
#ifndef ISLET_CLI_STATUS_H
#define ISLET_CLI_STATUS_H

struct cli_options;

int cli_status_main(const struct cli_options *o); /* exit status */

#endif
