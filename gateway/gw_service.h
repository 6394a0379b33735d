/* What the handlers share: settings, model, queue, counters. One for the process; main makes it.
 * Thread: loop. */
#ifndef ISLET_GW_SERVICE_H
#define ISLET_GW_SERVICE_H

#include <stdbool.h>
#include <stdint.h>

#include "err.h"
#include "gw_answer.h"
#include "gw_loop.h"
#include "gw_metrics.h"
#include "gw_recent.h"
#include "list.h"
#include "ticks.h"

struct gw_auth;
struct gw_dispatch;
struct gw_model;
struct settings;

struct gw_service {
    struct settings *settings; /* NULL: the configuration is bad, `trouble` says how */
    /* Those that the model was opened with: where they differ from `settings`, a restart is due.
     * NULL: not yet; may be the same. */
    struct settings *in_force;
    struct gw_model *model; /* NULL: none could be opened, `trouble` says why */
    char trouble[400];
    struct gw_auth *auth;
    struct gw_loop *loop;
    struct gw_dispatch *dispatch; /* NULL while there is no model */
    struct gw_answer_context answers;
    struct gw_recent recent;
    struct gw_metrics metrics;
    struct ticks ticks;
    uint64_t started_ns;
    struct list status_waiters; /* of gw_api_health */
    bool draining;
};

/* Opens the model and the link to the worker, after the loop is there. What fails becomes
 * `trouble`; called again by a reload, it tries again what had failed. */
void gw_service_start(struct gw_service *s);
/* The settings that SIGHUP applies, from `next` (taken on success). */
enum err_code gw_service_reload(struct gw_service *s, struct settings *next, struct err *e)
    __attribute__((warn_unused_result));
void gw_service_drain(struct gw_service *s);
void gw_service_deadline(struct gw_service *s);
/* No exchange is left: closes handles, so that the loop can end. */
void gw_service_stop(struct gw_service *s);
/* After the loop has ended. */
void gw_service_done(struct gw_service *s);

/* Text of model.alias. */
const char *gw_service_aliases(const struct gw_service *s);
/* The gauges, as of now. */
void gw_service_gauges(struct gw_service *s);

#endif
