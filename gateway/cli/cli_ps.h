/* `islet ps`: what runs now. */
#ifndef ISLET_CLI_PS_H
#define ISLET_CLI_PS_H

struct cli_options;

int cli_ps_main(const struct cli_options *o); /* exit status */

#endif
