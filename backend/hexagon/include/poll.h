// Waiting for descriptors.
#ifndef TB_HEXAGON_POLL_H
#define TB_HEXAGON_POLL_H

#define POLLIN 1
#define POLLERR 8
#define POLLHUP 16
#define POLLNVAL 32

#ifdef __cplusplus
extern "C" {
#endif

struct pollfd {
    int fd;
    short events, revents;
};
typedef unsigned long nfds_t;

int poll(struct pollfd * fds, nfds_t n, int timeout_ms);

#ifdef __cplusplus
}
#endif

#endif
