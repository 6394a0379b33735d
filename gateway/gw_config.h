/* What the gateway asks of its settings beyond what each row says: lists are separated by commas,
 * and paths of sockets fit. */
#ifndef ISLET_GW_CONFIG_H
#define ISLET_GW_CONFIG_H

#include "err.h"

struct settings;

/* ERR_ARGUMENT: the text names the setting, where it comes from, and what would be right. */
enum err_code gw_config_check(const struct settings *s, struct err *e)
    __attribute__((warn_unused_result));

#endif
