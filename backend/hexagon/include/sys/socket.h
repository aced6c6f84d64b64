// Descriptors over a socket.
#ifndef TB_HEXAGON_SYS_SOCKET_H
#define TB_HEXAGON_SYS_SOCKET_H

#include <sys/types.h>

#define AF_UNIX 1
#define SOCK_SEQPACKET 5
#define SOCK_CLOEXEC 02000000
#define SOL_SOCKET 1
#define SCM_RIGHTS 1
#define SO_PEERCRED 17
#define MSG_DONTWAIT 0x40
#define MSG_NOSIGNAL 0x4000
#define MSG_CMSG_CLOEXEC 0x40000000

#ifdef __cplusplus
extern "C" {
#endif

typedef unsigned socklen_t;
struct iovec {
    void * iov_base;
    size_t iov_len;
};
struct msghdr {
    void * msg_name;
    socklen_t msg_namelen;
    struct iovec * msg_iov;
    size_t msg_iovlen;
    void * msg_control;
    size_t msg_controllen;
    int msg_flags;
};
struct cmsghdr {
    size_t cmsg_len;
    int cmsg_level, cmsg_type;
};

#define CMSG_ALIGN(n) (((n) + sizeof(size_t) - 1) & ~(sizeof(size_t) - 1))
#define CMSG_LEN(n) (CMSG_ALIGN(sizeof(struct cmsghdr)) + (n))
#define CMSG_SPACE(n) (CMSG_ALIGN(sizeof(struct cmsghdr)) + CMSG_ALIGN(n))
#define CMSG_DATA(c) ((unsigned char *)((c) + 1))
#define CMSG_FIRSTHDR(m)                                                                                               \
    ((m)->msg_controllen >= sizeof(struct cmsghdr) ? (struct cmsghdr *)(m)->msg_control : (struct cmsghdr *)0)
#define CMSG_NXTHDR(m, c) tb_cmsg_next(m, c)

struct ucred {
    int pid;
    unsigned uid, gid;
};

struct cmsghdr * tb_cmsg_next(struct msghdr * m, struct cmsghdr * c);
// The CPU side's; not there to be linked.
int socketpair(int domain, int type, int protocol, int sockets[2]);
ssize_t sendmsg(int socket, const struct msghdr * m, int flags);

int getsockopt(int socket, int level, int option, void * to, socklen_t * size);
ssize_t recvmsg(int socket, struct msghdr * m, int flags);

#ifdef __cplusplus
}
#endif

#endif
