#include "governor_sensors.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <time.h>

#include "alloc.h"

enum {
    STOP_MS = 2000, /* that a driver gets to answer when the thread is to end */
    MOST_MS = 60000
};

struct governor_sensors {
    const struct governor_source *source;
    char bus_id[32];
    uint32_t period_ms;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    /* under `lock` */
    bool stop, ended, abandoned; /* abandoned before it ended: the thread frees all */
    bool fresh, failed;
    struct governor_readings readings;
    struct err why;
};

static void free_sensors(struct governor_sensors *s)
{
    pthread_cond_destroy(&s->wake);
    pthread_mutex_destroy(&s->lock);
    alloc_free(s);
}

static struct timespec after_ms(uint32_t ms)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += ms / 1000;
    t.tv_nsec += ms % 1000 * 1000000l;
    if (t.tv_nsec >= 1000000000l) {
        t.tv_sec++;
        t.tv_nsec -= 1000000000l;
    }
    return t;
}

/* Hands out the readings, and waits until the next are due. False: the thread is to end. */
static bool hand_out(struct governor_sensors *s, const struct governor_readings *r)
{
    pthread_mutex_lock(&s->lock);
    s->readings = *r;
    s->fresh = true;
    const struct timespec until = after_ms(s->period_ms);
    while (!s->stop && pthread_cond_timedwait(&s->wake, &s->lock, &until) == 0)
        ;
    const bool stop = s->stop;
    pthread_mutex_unlock(&s->lock);
    return !stop;
}

static void *sensors_main(void *argument)
{
    struct governor_sensors *s = argument;
    struct governor_readings r = {.vram_total = 0};
    void *sensors = NULL;
    struct err e = {.code = ERR_OK};
    pthread_setname_np(pthread_self(), "sensors");
    const enum err_code code = s->source->open(s->bus_id, &sensors, &e);
    if (code == ERR_OK) {
        do
            s->source->read(sensors, &r);
        while (hand_out(s, &r));
        s->source->close(sensors);
    }
    pthread_mutex_lock(&s->lock);
    s->failed = code != ERR_OK;
    s->why = e;
    s->ended = true;
    pthread_cond_broadcast(&s->wake);
    const bool abandoned = s->abandoned;
    pthread_mutex_unlock(&s->lock);
    if (abandoned)
        free_sensors(s);
    return NULL;
}

enum err_code governor_sensors_start(const struct governor_source *source, const char *bus_id,
                                     uint32_t period_ms, struct governor_sensors **ret,
                                     struct err *e)
{
    struct governor_sensors *s = alloc_zero(ALLOC_MISC, 1, sizeof *s);
    pthread_condattr_t monotonic;
    sigset_t all, before;
    if (s == NULL)
        return err_set(e, ERR_NOMEM, "no memory for sensors");
    s->source = source;
    s->period_ms = period_ms < MOST_MS ? period_ms : MOST_MS;
    snprintf(s->bus_id, sizeof s->bus_id, "%s", bus_id);
    pthread_mutex_init(&s->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&s->wake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the loop's */
    const int failed = pthread_create(&s->thread, NULL, sensors_main, s);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed != 0) {
        free_sensors(s);
        return err_set_os(e, ERR_IO, failed, "the sensors' thread");
    }
    *ret = s;
    return ERR_OK;
}

/* A driver that hangs must not keep the process from ending: its thread is left to itself. */
void governor_sensors_stop(struct governor_sensors *s)
{
    if (s == NULL)
        return;
    pthread_mutex_lock(&s->lock);
    s->stop = true;
    pthread_cond_broadcast(&s->wake);
    const struct timespec until = after_ms(STOP_MS);
    while (!s->ended && pthread_cond_timedwait(&s->wake, &s->lock, &until) == 0)
        ;
    const bool ended = s->ended;
    s->abandoned = !ended;
    if (!ended)
        pthread_detach(s->thread);
    pthread_mutex_unlock(&s->lock);
    if (!ended)
        return;
    pthread_join(s->thread, NULL);
    free_sensors(s);
}

bool governor_sensors_take(struct governor_sensors *s, struct governor_readings *ret)
{
    pthread_mutex_lock(&s->lock);
    const bool fresh = s->fresh;
    if (fresh)
        *ret = s->readings;
    s->fresh = false;
    pthread_mutex_unlock(&s->lock);
    return fresh;
}

bool governor_sensors_failed(struct governor_sensors *s, struct err *ret_why)
{
    pthread_mutex_lock(&s->lock);
    const bool failed = s->failed;
    if (failed)
        *ret_why = s->why;
    pthread_mutex_unlock(&s->lock);
    return failed;
}
