/* Clients of an address, each with one request at a time.

   gateway_load ADDRESS CLIENTS SECONDS CHUNKS INTERVAL_US CHUNK_BYTES KEEP PAUSE_US

   ADDRESS is unix:PATH or the number of a TCP port of 127.0.0.1. A client asks bench/gateway_engine.c for CHUNKS pieces
   INTERVAL_US apart (0: for a short document), waits up to PAUSE_US at random, and asks again until SECONDS are over (0:
   once). KEEP 1 uses a connection again. Clients begin at random moments of one answer's length.

   Prints lines: "first US", from the request (and before it the connection, where it is new) to the first piece;
   "piece US", of each further piece from the engine's clock in it to its arrival; in the end "complete N broken N". */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
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

enum { MOST_FDS = 1 << 14, BUFFER_BYTES = 1 << 17, CARRIED_BYTES = 64, STAMP_DIGITS = 20 };

typedef struct client {
    int fd, timer;
    long long asked_ns;
    long pieces;            /* that have come */
    char carried[CARRIED_BYTES * 2];
    int carried_bytes;      /* the end of what was read last: a stamp may lie across two reads */
    long long seen;         /* bytes of the answer */
    int over;
} client;

static client *by_fd[MOST_FDS];
static int epoll_fd, is_unix, keep, left;
static struct sockaddr_un unix_place = {.sun_family = AF_UNIX};
static struct sockaddr_in tcp_place = {.sin_family = AF_INET};
static long chunks, pause_us;
static char request[1 << 14];
static int request_bytes;
static long long ends_ns, complete, broken;

static long long now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void die(const char *what) {
    perror(what);
    exit(1);
}

static void wake_after(client *c, long us) {
    if (us < 1) us = 1;
    struct itimerspec t = {.it_value = {us / 1000000, us % 1000000 * 1000}};
    if (timerfd_settime(c->timer, 0, &t, NULL)) die("timerfd_settime");
}

static void hang_up(client *c) {
    if (c->fd < 0) return;
    by_fd[c->fd] = NULL;
    close(c->fd);
    c->fd = -1;
}

static void next(client *c) {
    if (now_ns() >= ends_ns) {
        hang_up(c);
        c->over = 1;
        left--;
    } else {
        wake_after(c, pause_us ? random() % pause_us : 1);
    }
}

static void failed(client *c) {
    broken++;
    hang_up(c);
    next(c);
}

static void ask(client *c) {
    c->asked_ns = now_ns();
    c->pieces = c->carried_bytes = c->seen = 0;
    if (c->fd < 0) {
        c->fd = socket(is_unix ? AF_UNIX : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (c->fd < 0 || c->fd >= MOST_FDS) die("socket");
        struct sockaddr *place = is_unix ? (struct sockaddr *)&unix_place : (struct sockaddr *)&tcp_place;
        if (connect(c->fd, place, is_unix ? sizeof unix_place : sizeof tcp_place)) {
            failed(c);
            return;
        }
        int one = 1;
        if (!is_unix) setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        by_fd[c->fd] = c;
        struct epoll_event e = {.events = EPOLLIN, .data.fd = c->fd};
        if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &e)) die("epoll_ctl");
    }
    if (send(c->fd, request, request_bytes, MSG_NOSIGNAL) != request_bytes) failed(c);
}

static void came(client *c) {
    static char buffer[CARRIED_BYTES * 2 + BUFFER_BYTES + 1];
    memcpy(buffer, c->carried, c->carried_bytes);
    ssize_t n = recv(c->fd, buffer + c->carried_bytes, BUFFER_BYTES, MSG_DONTWAIT);
    long long now = now_ns();
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
        failed(c);
        return;
    }
    if (c->seen == 0 && strncmp(buffer, "HTTP/1.1 200", 12) != 0) {
        failed(c);
        return;
    }
    c->seen += n;
    int size = c->carried_bytes + n, at = 0, done = 0;
    buffer[size] = 0;
    if (chunks == 0) {
        done = memmem(buffer, size, "{\"object\": \"x\"}", 15) != NULL;
        if (done) printf("first %.1f\n", (now - c->asked_ns) / 1e3);
    } else {
        char *found;
        while ((found = memmem(buffer + at, size - at, "\"t\": \"", 6)) && found + 6 + STAMP_DIGITS <= buffer + size) {
            long long written = strtoll(found + 6, NULL, 10);
            if (c->pieces++ == 0) printf("first %.1f\n", (now - c->asked_ns) / 1e3);
            else printf("piece %.1f\n", (now - written) / 1e3);
            at = found + 6 + STAMP_DIGITS - buffer;
        }
        done = c->pieces == chunks && size >= 7 && memcmp(buffer + size - 7, "\r\n0\r\n\r\n", 7) == 0;
    }
    c->carried_bytes = size - at < CARRIED_BYTES ? size - at : CARRIED_BYTES;
    memcpy(c->carried, buffer + size - c->carried_bytes, c->carried_bytes);
    if (done) {
        complete++;
        if (!keep) hang_up(c);
        next(c);
    }
}

int main(int argc, char **argv) {
    if (argc != 9) return 2;
    signal(SIGPIPE, SIG_IGN);
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    is_unix = strncmp(argv[1], "unix:", 5) == 0;
    if (is_unix) strncpy(unix_place.sun_path, argv[1] + 5, sizeof unix_place.sun_path - 1);
    tcp_place.sin_port = htons(is_unix ? 0 : atoi(argv[1]));
    tcp_place.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int count = atoi(argv[2]);
    double seconds = atof(argv[3]);
    chunks = atol(argv[4]);
    long interval_us = atol(argv[5]), chunk_bytes = atol(argv[6]);
    keep = atoi(argv[7]);
    pause_us = atol(argv[8]);

    /* What an SDK sends, with a prompt of two kilobytes. */
    char body[4096];
    int body_bytes = snprintf(body, sizeof body,
                              "{\"model\": \"small\", \"stream\": %s, \"messages\": [{\"role\": \"user\", \"content\": "
                              "\"%02048d\"}], \"temperature\": 0.7, \"max_tokens\": 512}",
                              chunks ? "true" : "false", 0);
    request_bytes = snprintf(
        request, sizeof request,
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n%s"
        "Accept: application/json\r\nAccept-Encoding: gzip, deflate\r\nUser-Agent: OpenAI/Python 1.0\r\n"
        "X-Stainless-Lang: python\r\nX-Stainless-OS: Linux\r\nX-Stainless-Retry-Count: 0\r\n"
        "Authorization: Bearer none\r\nContent-Type: application/json\r\n"
        "X-Script: %ld %ld %ld 0\r\nContent-Length: %d\r\n\r\n%s",
        keep ? "" : "Connection: close\r\n", chunks, interval_us, chunk_bytes, body_bytes, body);

    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    ends_ns = now_ns() + (long long)(seconds * 1e9);
    srandom(7);
    left = count;
    long spread_us = chunks * interval_us < 1000000 ? chunks * interval_us : 1000000;
    for (int i = 0; i < count; i++) {
        client *c = calloc(1, sizeof *c);
        if (!c) die("calloc");
        c->fd = -1;
        c->timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
        if (c->timer < 0 || c->timer >= MOST_FDS) die("timerfd_create");
        by_fd[c->timer] = c;
        struct epoll_event e = {.events = EPOLLIN, .data.fd = c->timer};
        if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->timer, &e)) die("epoll_ctl");
        wake_after(c, spread_us ? random() % spread_us : 1);
    }
    static struct epoll_event events[256];
    while (left > 0) {
        int got = epoll_wait(epoll_fd, events, 256, 60000);
        if (got == 0) break;  /* nothing for a minute: whoever waits still counts as broken */
        for (int i = 0; i < got; i++) {
            int fd = events[i].data.fd;
            client *c = by_fd[fd];
            if (!c || c->over) continue;
            if (fd == c->timer) {
                uint64_t times;
                if (read(fd, &times, sizeof times) == sizeof times) ask(c);
            } else {
                came(c);
            }
        }
    }
    printf("complete %lld broken %lld\n", complete, broken + left);
    return 0;
}
