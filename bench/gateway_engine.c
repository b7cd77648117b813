/* An engine that answers at once: what a proxy in front of it adds is all the time that there is.

   gateway_engine SOCKET

   The header x-script of a request says what to answer: CHUNKS INTERVAL_US CHUNK_BYTES READ_BYTES_PER_S.
   CHUNKS 0 is a short document with a length. Otherwise a stream of events, the first at once, each with the time of
   its writing in nanoseconds of CLOCK_MONOTONIC; an interval of 0 writes as fast as the reader takes them. A body is
   read whole first, READ_BYTES_PER_S of it in a second, or as it comes where that is 0.
   GET /counts tells what became of the requests. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MOST_FDS = 1 << 14, HEAD_BYTES = 1 << 15, READ_BYTES = 1 << 16 };

typedef struct conn {
    int fd, timer;       /* timer: a timerfd, -1 while none is needed */
    char *head;          /* of the request */
    size_t head_bytes;
    int working;         /* a request has come whole and is being answered */
    int reading;         /* its body is being read */
    long long body_left; /* bytes to come */
    long chunks, interval_us, chunk_bytes, read_rate;
    char *out;           /* written next */
    size_t out_bytes, out_at;
    int keep;
} conn;

static conn *conns[MOST_FDS];  /* by fd, of the connection and of its timer */
static int epoll_fd;
static long long served, abandoned, working;

static long long now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static void watch(conn *c, uint32_t events) {
    struct epoll_event e = {.events = events | EPOLLRDHUP, .data.fd = c->fd};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &e)) die("epoll_ctl");
}

static void set_timer(conn *c, long us) {
    struct itimerspec t = {.it_value = {us / 1000000, us % 1000000 * 1000},
                           .it_interval = {us / 1000000, us % 1000000 * 1000}};
    if (c->timer < 0) {
        c->timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
        if (c->timer < 0 || c->timer >= MOST_FDS) die("timerfd_create");
        conns[c->timer] = c;
        struct epoll_event e = {.events = EPOLLIN, .data.fd = c->timer};
        if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->timer, &e)) die("epoll_ctl");
    }
    if (timerfd_settime(c->timer, 0, &t, NULL)) die("timerfd_settime");
}

static void end(conn *c) {
    if (c->working || c->reading) {
        abandoned++;
        working--;
    }
    if (c->timer >= 0) {
        conns[c->timer] = NULL;
        close(c->timer);
    }
    conns[c->fd] = NULL;
    close(c->fd);
    free(c->head);
    free(c->out);
    free(c);
}

static void put(conn *c, const char *format, ...) {
    va_list args;
    va_start(args, format);
    char *text;
    int size = vasprintf(&text, format, args);
    va_end(args);
    if (size < 0) die("vasprintf");
    char *all = realloc(c->out, c->out_bytes + size);
    if (!all) die("realloc");
    memcpy(all + c->out_bytes, text, size);
    c->out = all;
    c->out_bytes += size;
    free(text);
}

static void put_chunk(conn *c) {
    char stamp[64];
    int head = snprintf(stamp, sizeof stamp, "data: {\"t\": \"%020lld\", \"x\": \"", now_ns());
    int pad = (int)c->chunk_bytes - head - 4;
    if (pad < 0) pad = 0;
    static char x[1 << 17];
    if (!x[0]) memset(x, 'x', sizeof x);
    if (pad > (int)sizeof x) pad = sizeof x;
    put(c, "%x\r\n%s%.*s\"}\n\n\r\n", head + pad + 4, stamp, pad, x);
    if (--c->chunks == 0) put(c, "0\r\n\r\n");
}

/* -1: the connection has ended. */
static int flush(conn *c) {
    for (;;) {
        while (c->out_at < c->out_bytes) {
            ssize_t n = send(c->fd, c->out + c->out_at, c->out_bytes - c->out_at, MSG_NOSIGNAL);
            if (n < 0 && errno == EAGAIN) {
                watch(c, EPOLLOUT | EPOLLIN);
                return 0;
            }
            if (n < 0) {
                end(c);
                return -1;
            }
            c->out_at += n;
        }
        c->out_at = c->out_bytes = 0;
        if (c->chunks > 0 && c->interval_us == 0 && c->working) put_chunk(c);
        else break;
    }
    if (c->working && c->chunks == 0) {
        c->working = 0;
        working--;
        served++;
        if (c->timer >= 0) set_timer(c, 0);
        if (!c->keep) {
            end(c);
            return -1;
        }
    }
    watch(c, EPOLLIN);
    return 0;
}

static int answer(conn *c) {
    c->reading = 0;
    c->working = 1;
    if (c->chunks > 0) {
        put(c, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n");
        put_chunk(c);
        if (c->interval_us && c->chunks) set_timer(c, c->interval_us);
    } else {
        put(c, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n{\"object\": \"x\"}");
    }
    return flush(c);
}

static const char *field(const char *head, const char *name) {
    const char *at = strcasestr(head, name);
    return at ? at + strlen(name) : NULL;
}

static int head_came(conn *c) {
    const char *script = field(c->head, "\nx-script:"), *length = field(c->head, "\ncontent-length:");
    const char *ended = field(c->head, "\nconnection:");
    c->keep = !(ended && strcasestr(ended, "close"));
    c->chunks = c->interval_us = c->chunk_bytes = c->read_rate = 0;
    if (script) sscanf(script, "%ld %ld %ld %ld", &c->chunks, &c->interval_us, &c->chunk_bytes, &c->read_rate);
    if (strncmp(c->head, "GET /counts", 11) == 0) {
        char text[200];
        int n = snprintf(text, sizeof text, "{\"served\": %lld, \"abandoned\": %lld, \"working\": %lld}", served,
                         abandoned, working);
        put(c, "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", n, text);
        c->keep = 0;
        if (flush(c) == 0) end(c);
        return -1;
    }
    working++;
    c->reading = 1;
    char *body = strstr(c->head, "\r\n\r\n") + 4;
    c->body_left = (length ? atoll(length) : 0) - (c->head_bytes - (body - c->head));
    c->head_bytes = 0;
    if (c->body_left <= 0) return answer(c);
    if (c->read_rate) {
        watch(c, 0);
        set_timer(c, 10000);
    }
    return 0;
}

static int readable(conn *c, size_t most) {
    static char sink[READ_BYTES];
    if (c->reading) {
        while (most > 0) {
            ssize_t n = recv(c->fd, sink, most < sizeof sink ? most : sizeof sink, 0);
            if (n < 0 && errno == EAGAIN) return 0;
            if (n <= 0) {
                end(c);
                return -1;
            }
            most -= n;
            if ((c->body_left -= n) <= 0) {
                if (c->timer >= 0) set_timer(c, 0);
                return answer(c);
            }
        }
        return 0;
    }
    if (!c->head && !(c->head = malloc(HEAD_BYTES))) die("malloc");
    ssize_t n = recv(c->fd, c->head + c->head_bytes, HEAD_BYTES - 1 - c->head_bytes, 0);
    if (n < 0 && errno == EAGAIN) return 0;
    if (n <= 0) {
        end(c);
        return -1;
    }
    c->head_bytes += n;
    c->head[c->head_bytes] = 0;
    if (!strstr(c->head, "\r\n\r\n")) return 0;
    return head_came(c);
}

static int ticked(conn *c) {
    uint64_t times;
    if (read(c->timer, &times, sizeof times) != sizeof times) return 0;
    if (c->reading) return readable(c, c->read_rate / 100);
    if (c->working && c->chunks > 0) {
        put_chunk(c);
        return flush(c);
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc != 2) return 2;
    signal(SIGPIPE, SIG_IGN);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    struct sockaddr_un place = {.sun_family = AF_UNIX};
    strncpy(place.sun_path, argv[1], sizeof place.sun_path - 1);
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&place, sizeof place) || listen(listener, 4096)) die("listen");
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event e = {.events = EPOLLIN, .data.fd = listener};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &e);
    puts("ready");
    fflush(stdout);
    static struct epoll_event events[256];
    for (;;) {
        int count = epoll_wait(epoll_fd, events, 256, -1), knocks = 0;
        for (int i = 0; i < count; i++) {
            int fd = events[i].data.fd;
            if (fd == listener) {
                knocks = 1;
                continue;
            }
            conn *c = conns[fd];
            if (!c) continue;  /* ended by an earlier event of this round */
            if (fd == c->timer) {
                ticked(c);
                continue;
            }
            if ((events[i].events & (EPOLLHUP | EPOLLERR)) ||
                ((events[i].events & EPOLLRDHUP) && (c->working || (c->reading && c->read_rate)))) {
                end(c);
                continue;
            }
            if ((events[i].events & EPOLLOUT) && flush(c)) continue;
            if (events[i].events & (EPOLLIN | EPOLLRDHUP)) {
                if (c->reading && c->read_rate) continue;  /* by the timer */
                if (c->working) {  /* nobody sends a second request before the answer to the first */
                    char more;
                    if (recv(fd, &more, 1, MSG_PEEK) == 0) end(c);
                    continue;
                }
                readable(c, SIZE_MAX);
            }
        }
        /* Last, for a new connection may get the number of one that has ended in this round. */
        int peer;
        while (knocks && (peer = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
            if (peer >= MOST_FDS) die("too many connections");
            conn *c = conns[peer] = calloc(1, sizeof *c);
            if (!c) die("calloc");
            c->fd = peer;
            c->timer = -1;
            struct epoll_event in = {.events = EPOLLIN | EPOLLRDHUP, .data.fd = peer};
            if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, peer, &in)) die("epoll_ctl");
        }
    }
}
