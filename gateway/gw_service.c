#include "gw_service.h"

#include <stdio.h>
#include <string.h>

#include "gw_api_health.h"
#include "gw_auth.h"
#include "gw_config.h"
#include "gw_dispatch.h"
#include "gw_model.h"
#include "gw_response.h"
#include "log.h"
#include "paths.h"
#include "settings.h"

static enum err_code dispatch_start(struct gw_service *s, struct err *e)
{
    char path[108];
    enum err_code code = paths_socket(settings_text(s->settings, SETTING_worker_socket),
                                      "worker.sock", path, sizeof path, e);
    if (code != ERR_OK)
        return code;
    struct gw_dispatch_options o = {
        .loop = gw_loop_uv(s->loop),
        .ticks = s->ticks,
        .socket = path,
        .max_frame = settings_bytes(s->settings, SETTING_worker_max_frame),
        .max_sequences = (uint32_t)settings_count(s->settings, SETTING_batch_max_sequences),
        .queue = settings_count(s->settings, SETTING_server_queue),
        .resume_deadline_ms = settings_ms(s->settings, SETTING_worker_resume_deadline),
        .model = s->model,
        .metrics = &s->metrics,
        .on_status = gw_api_health_on_status,
        .context = s,
    };
    code = gw_dispatch_new(&o, &s->dispatch, e);
    if (code == ERR_OK)
        gw_dispatch_set_context(s->dispatch,
                                (uint32_t)settings_count(s->settings, SETTING_model_context));
    return code;
}

static void answers_set(struct gw_service *s)
{
    s->answers = (struct gw_answer_context){
        .loop = gw_loop_uv(s->loop),
        .ticks = s->ticks,
        .model = s->model,
        .dispatch = s->dispatch,
        .json_pad_after_ms = settings_ms(s->settings, SETTING_server_json_pad_after),
        .sse_ping_interval_ms = settings_ms(s->settings, SETTING_server_sse_ping_interval),
    };
}

/* What every response says of the worker. */
static void tell(void *context, struct gw_response *r)
{
    const struct gw_service *s = context;
    const char *degraded = s->dispatch ? gw_dispatch_degraded(s->dispatch) : "";
    r->degraded = degraded[0] != '\0' ? degraded : NULL;
    r->celsius = s->dispatch ? gw_dispatch_gpu_celsius(s->dispatch) : 0;
}

void gw_service_start(struct gw_service *s)
{
    struct gw_conn_shared *shared = gw_loop_shared(s->loop);
    struct err e = {0};
    shared->tell = tell;
    shared->tell_context = s;
    if (!s->settings || s->dispatch)
        return;
    const char *path = settings_text(s->settings, SETTING_model_path);
    enum err_code code = ERR_OK;
    if (path[0] == '\0')
        code = err_set(&e, ERR_ARGUMENT, "model.path is not set: name the GGUF file to serve");
    else if (!s->model)
        code = gw_model_open(path, &s->model, &e);
    if (code == ERR_OK)
        code = dispatch_start(s, &e);
    if (code != ERR_OK) {
        snprintf(s->trouble, sizeof s->trouble,
                 "%s (model.path from %s); correct it, then send SIGHUP", e.text,
                 settings_origin(s->settings, SETTING_model_path));
        log_error("gateway", "no_model", "reason=\"%s\"", s->trouble);
        gw_loop_status(s->loop, "not serving: %s", s->trouble);
        return;
    }
    s->trouble[0] = '\0';
    s->in_force = s->settings;
    answers_set(s);
    log_info("gateway", "model", "id=%s path=%s params=%llu vocabulary=%u", s->model->id, path,
             (unsigned long long)s->model->shape.n_params, s->model->shape.n_vocab);
    if (!s->model->template)
        log_warn("gateway", "no_chat", "reason=\"%s\" continuing=\"completions are served\"",
                 s->model->template_trouble);
    gw_loop_status(s->loop, "serving %s", s->model->id);
}

static void on_difference(void *context, enum setting_id id, bool reloadable)
{
    (void)context;
    if (reloadable)
        log_info("settings", "changed", "name=%s", settings_name(id));
}

static void on_pending(void *context, enum setting_id id, bool reloadable)
{
    (void)context;
    if (!reloadable)
        log_warn("settings", "needs_restart", "name=%s continuing=\"the old value stays in force\"",
                 settings_name(id));
}

static void limits_set(struct gw_service *s)
{
    struct gw_conn_shared *shared = gw_loop_shared(s->loop);
    shared->limits.max_body_bytes = settings_bytes(s->settings, SETTING_server_max_body);
    gw_loop_set_drain_deadline(s->loop, settings_ms(s->settings, SETTING_server_drain_deadline));
    if (!s->dispatch)
        return;
    gw_dispatch_set(s->dispatch, settings_count(s->settings, SETTING_server_queue),
                    settings_ms(s->settings, SETTING_worker_resume_deadline));
    answers_set(s);
}

enum err_code gw_service_reload(struct gw_service *s, struct settings *next, struct err *e)
{
    struct gw_auth *auth = NULL;
    enum err_code code = gw_config_check(next, e);
    if (code == ERR_OK)
        code = gw_auth_new(settings_text(next, SETTING_server_hosts),
                           settings_text(next, SETTING_server_cors),
                           settings_text(next, SETTING_server_api_key_file), &auth, e);
    if (code != ERR_OK)
        return code;
    if (gw_loop_beyond_loopback(s->loop) && !gw_auth_asks_key(auth)) {
        gw_auth_free(auth);
        return err_set(e, ERR_ARGUMENT,
                       "server.api_key_file is empty, but server.listen has an address beyond "
                       "loopback: a key is required there");
    }
    if (s->settings)
        settings_diff(s->settings, next, on_difference, NULL);
    if (s->in_force)
        settings_diff(s->in_force, next, on_pending, NULL);
    gw_loop_set_auth(s->loop, auth);
    gw_auth_free(s->auth);
    s->auth = auth;
    /* Values that need a restart are not read again once the model is open. */
    if (s->settings != s->in_force)
        settings_free(s->settings);
    s->settings = next;
    limits_set(s);
    gw_service_start(s);
    return ERR_OK;
}

void gw_service_drain(struct gw_service *s)
{
    s->draining = true;
    if (s->dispatch)
        gw_dispatch_drain(s->dispatch);
}

void gw_service_deadline(struct gw_service *s)
{
    if (s->dispatch)
        gw_dispatch_end_all(s->dispatch);
}

void gw_service_stop(struct gw_service *s)
{
    gw_recent_done(&s->recent);
    gw_dispatch_close(s->dispatch);
    s->dispatch = NULL;
}

void gw_service_done(struct gw_service *s)
{
    gw_loop_free(s->loop);
    gw_auth_free(s->auth);
    gw_model_free(s->model);
    if (s->in_force != s->settings)
        settings_free(s->in_force);
    settings_free(s->settings);
    *s = (struct gw_service){0};
}

const char *gw_service_aliases(const struct gw_service *s)
{
    return s->settings ? settings_text(s->settings, SETTING_model_alias) : "";
}

void gw_service_gauges(struct gw_service *s)
{
    const struct gw_conn_shared *shared = gw_loop_shared(s->loop);
    struct gw_metrics *m = &s->metrics;
    m->uptime_ms = (ticks_ns(s->ticks) - s->started_ns) / 1000000u;
    m->connections = gw_loop_connections(s->loop);
    m->http_requests_total = stats_get(&shared->requests);
    m->http_refused_total = stats_get(&shared->refused);
    m->http_bytes_in_total = stats_get(&shared->bytes_in);
    m->http_bytes_out_total = stats_get(&shared->bytes_out);
    m->resident_bytes = gw_metrics_resident_bytes();
    if (s->dispatch)
        gw_dispatch_gauges(s->dispatch, m);
}
