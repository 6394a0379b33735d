/* What the engine is told by the settings. */
#ifndef ISLET_WORKER_CONFIG_H
#define ISLET_WORKER_CONFIG_H

#include "engine.h"

struct settings;

/* .model_path and .trace_path are lent by the settings. .trouble, .max_waiting, .notify and its
 * context are the caller's. */
struct engine_config worker_config_engine(const struct settings *s);

#endif
