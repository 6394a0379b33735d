#include "flip_proxy.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum {
    MAX_PAIRS = 32,
    /* Small, so that a read is about a frame. */
    READ_BYTES = 256
};

struct pair {
    int near, far; /* -1: free */
};

struct flip_proxy {
    struct sockaddr_un at, to;
    int listener, wake;
    pthread_t thread;
    struct pair pairs[MAX_PAIRS];
    uint64_t random, flips;
    unsigned percent;
};

static void must(bool ok, const char *what)
{
    if (ok)
        return;
    perror(what);
    abort();
}

static uint32_t draw(struct flip_proxy *p, uint32_t below)
{
    p->random = p->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((p->random >> 33) % below);
}

static void pair_close(struct pair *pair)
{
    if (pair->near >= 0)
        close(pair->near);
    if (pair->far >= 0)
        close(pair->far);
    *pair = (struct pair){-1, -1};
}

static void pair_open(struct flip_proxy *p)
{
    int near = accept4(p->listener, NULL, NULL, SOCK_CLOEXEC);
    if (near < 0)
        return;
    int far = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    must(far >= 0, "socket");
    struct pair *free_one = NULL;
    for (unsigned i = 0; i < MAX_PAIRS && !free_one; i++)
        if (p->pairs[i].near < 0)
            free_one = &p->pairs[i];
    if (!free_one || connect(far, (struct sockaddr *)&p->to, sizeof p->to) != 0) {
        close(near);
        close(far);
        return;
    }
    *free_one = (struct pair){near, far};
}

/* One read from `from`, all of it to `to`. False: the end. */
static bool carry(struct flip_proxy *p, int from, int to, bool flips)
{
    uint8_t bytes[READ_BYTES];
    ssize_t n = recv(from, bytes, sizeof bytes, 0);
    if (n <= 0)
        return n < 0 && errno == EINTR;
    if (flips && draw(p, 100) < p->percent) {
        bytes[draw(p, (uint32_t)n)] ^= (uint8_t)(1u << draw(p, 8));
        p->flips++;
    }
    for (ssize_t at = 0; at < n;) {
        ssize_t sent = send(to, bytes + at, (size_t)(n - at), MSG_NOSIGNAL);
        if (sent <= 0)
            return false;
        at += sent;
    }
    return true;
}

static void *proxy_main(void *argument)
{
    struct flip_proxy *p = argument;
    struct pollfd polls[2 + 2 * MAX_PAIRS];
    for (;;) {
        polls[0] = (struct pollfd){.fd = p->wake, .events = POLLIN};
        polls[1] = (struct pollfd){.fd = p->listener, .events = POLLIN};
        for (unsigned i = 0; i < MAX_PAIRS; i++) {
            polls[2 + 2 * i] = (struct pollfd){.fd = p->pairs[i].near, .events = POLLIN};
            polls[3 + 2 * i] = (struct pollfd){.fd = p->pairs[i].far, .events = POLLIN};
        }
        poll(polls, 2 + 2 * MAX_PAIRS, -1);
        if (polls[0].revents != 0)
            return NULL;
        for (unsigned i = 0; i < MAX_PAIRS; i++) {
            struct pair *pair = &p->pairs[i];
            if (polls[2 + 2 * i].revents != 0 && !carry(p, pair->near, pair->far, false))
                pair_close(pair);
            else if (polls[3 + 2 * i].revents != 0 && !carry(p, pair->far, pair->near, true))
                pair_close(pair);
        }
        if (polls[1].revents != 0)
            pair_open(p);
    }
}

struct flip_proxy *flip_proxy_start(const char *path, const char *to, uint64_t seed,
                                    unsigned percent)
{
    struct flip_proxy *p = calloc(1, sizeof *p);
    must(p != NULL, "memory");
    p->at.sun_family = p->to.sun_family = AF_UNIX;
    snprintf(p->at.sun_path, sizeof p->at.sun_path, "%s", path);
    snprintf(p->to.sun_path, sizeof p->to.sun_path, "%s", to);
    p->random = seed * 2654435761u + 1;
    p->percent = percent;
    for (unsigned i = 0; i < MAX_PAIRS; i++)
        p->pairs[i] = (struct pair){-1, -1};
    unlink(path);
    p->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    p->wake = eventfd(0, EFD_CLOEXEC);
    must(p->listener >= 0 && p->wake >= 0, "socket");
    must(bind(p->listener, (struct sockaddr *)&p->at, sizeof p->at) == 0, path);
    must(listen(p->listener, 16) == 0, "listen");
    must(pthread_create(&p->thread, NULL, proxy_main, p) == 0, "thread");
    return p;
}

uint64_t flip_proxy_stop(struct flip_proxy *p)
{
    uint64_t one = 1;
    if (p == NULL)
        return 0;
    must(write(p->wake, &one, sizeof one) == sizeof one, "eventfd");
    pthread_join(p->thread, NULL);
    for (unsigned i = 0; i < MAX_PAIRS; i++)
        pair_close(&p->pairs[i]);
    close(p->listener);
    close(p->wake);
    unlink(p->at.sun_path);
    uint64_t flips = p->flips;
    free(p);
    return flips;
}
