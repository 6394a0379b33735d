/* `islet chat`: a conversation on the terminal. */
#ifndef ISLET_CLI_CHAT_H
#define ISLET_CLI_CHAT_H

struct cli_options;

int cli_chat_main(const struct cli_options *o); /* exit status */

#endif
