/* libislet: a client of the worker's Unix socket. Works in a plain blocking program
 * (proto_client_wait) and inside an event loop (proto_client_fd +
 * proto_client_on_readable/on_writable). One thread per client. No call blocks but
 * proto_client_wait; none raises SIGPIPE. */
#ifndef ISLET_PROTO_CLIENT_H
#define ISLET_PROTO_CLIENT_H

#include "proto_message.h"

struct proto_client;

enum proto_event_kind {
    PROTO_EVENT_WELCOME,
    PROTO_EVENT_TOKENS,
    PROTO_EVENT_PROGRESS,
    PROTO_EVENT_DONE,
    PROTO_EVENT_ERROR,
    PROTO_EVENT_STATUS,
    PROTO_EVENT_NOTICE,
    PROTO_EVENT_LOADED, /* load_expert's answer: the tier that it lies in now */
    PROTO_EVENT_DRAINED,
    PROTO_EVENT_UNLOADED, /* unload_expert's */
};

struct proto_event {
    enum proto_event_kind kind;
    uint64_t request_id; /* 0: the connection */
    union {
        struct proto_welcome welcome;
        struct proto_tokens tokens;
        struct proto_progress progress;
        struct proto_done done;
        struct proto_error error;
        struct proto_status status;
        struct proto_notice notice;
        struct proto_loaded loaded; /* of UNLOADED too */
    };
};

/* Connects to `path` and sends hello. The welcome arrives as an event. Gives *ret; free with
 * proto_client_close. ERR_IO: no such socket, nobody listens (says which), or the path is too long;
 * ERR_BUSY: the worker's queue of connections is full. */
enum err_code proto_client_connect(const char *path, const char *client_name,
                                   struct proto_client **ret, struct err *e)
    __attribute__((warn_unused_result));
/* Takes a connected stream socket instead (on success; after an error it is still the caller's). */
enum err_code proto_client_adopt(int fd, const char *client_name, struct proto_client **ret,
                                 struct err *e) __attribute__((warn_unused_result));
void proto_client_close(struct proto_client *c);

/* Requests. Bytes are queued and written as far as the socket takes them; *ret_id is the request's
 * id (from 1 up). ERR_ARGUMENT: a struct outside the limits of proto_message.h; ERR_LIMIT: longer
 * than the worker takes; ERR_BUSY: too many unsent bytes; the connection stays good after these.
 * ERR_IO: the worker is gone; what it sent before can still be read. */
enum err_code proto_client_run(struct proto_client *c, const struct proto_run *run,
                               uint64_t *ret_id, struct err *e) __attribute__((warn_unused_result));
enum err_code proto_client_cancel(struct proto_client *c, uint64_t id, struct err *e);
enum err_code proto_client_status(struct proto_client *c, struct err *e)
    __attribute__((warn_unused_result));
enum err_code proto_client_drain(struct proto_client *c, struct err *e)
    __attribute__((warn_unused_result));
/* One `loaded`, `unloaded` or `error` with *ret_id follows each. */
enum err_code proto_client_load_expert(struct proto_client *c, const struct proto_load_expert *m,
                                       uint64_t *ret_id, struct err *e)
    __attribute__((warn_unused_result));
enum err_code proto_client_unload_expert(struct proto_client *c,
                                         const struct proto_unload_expert *m, uint64_t *ret_id,
                                         struct err *e) __attribute__((warn_unused_result));

/* Blocking use: waits up to timeout_ms (negative: for ever) for the next event. 1: *ret is filled,
 * lent until the next call; 0: time-out; -1: the connection is lost (*e says why). */
int proto_client_wait(struct proto_client *c, int timeout_ms, struct proto_event *ret,
                      struct err *e);

/* Event-loop use: watch proto_client_fd for readable, and for writable while
 * proto_client_wants_write. After on_readable take all events by proto_client_next, also when it
 * failed: they arrived before. */
int proto_client_fd(const struct proto_client *c);
bool proto_client_wants_write(const struct proto_client *c);
enum err_code proto_client_on_readable(struct proto_client *c, struct err *e)
    __attribute__((warn_unused_result));
enum err_code proto_client_on_writable(struct proto_client *c, struct err *e)
    __attribute__((warn_unused_result));
/* 1: the next event that has arrived, lent until the next call; 0: none; -1: a frame was malformed
 * and the connection is of no more use. Frames of kinds that this version does not know are
 * skipped. */
int proto_client_next(struct proto_client *c, struct proto_event *ret, struct err *e);

#endif
