// See channel.h.
#include "channel.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "build_id.h"
#include "tilebeam/layout.h"
#include "wait.h"

namespace tb::session {

tb_cpu_hello make_cpu_hello(uint64_t region_size) {
    tb_cpu_hello h{};
    h.magic = TB_PROTOCOL_MAGIC;
    h.protocol_version = TB_PROTOCOL_VERSION;
    h.layout_version = TB_LAYOUT_VERSION;
    h.abi_bytes = abi_bytes;
    std::memcpy(h.build_id, build_id, sizeof h.build_id);
    h.region_size = region_size;
    return h;
}

wake_reason wait_word(const uint32_t * word, uint32_t old, uint32_t * sleeping, const wait_plan & plan,
                      const std::function<bool()> & keep_waiting) {
    const int64_t start = now_ns();
    int64_t elapsed = 0;
    int64_t asked = 0;
    for (;;) {
        if (elapsed >= plan.sleep_until && elapsed < plan.spin_until) {
            for (int i = 0; i < 32; ++i) {
                if (load_word(word) != old) {
                    return wake_reason::seen_spinning;
                }
                cpu_pause();
            }
        } else {
            const int64_t left = plan.sleep_until - elapsed;
            store_word(sleeping, 1);
            if (load_word(word) == old) {
                futex_wait(word, old, left > 0 ? std::min(left, plan.slice) : plan.slice, futex_scope::shared);
            }
            store_word(sleeping, 0);
            if (load_word(word) != old) {
                return wake_reason::seen_sleeping;
            }
        }
        elapsed = now_ns() - start;
        if (elapsed - asked >= plan.slice) { // a long graph is spun for longer than that
            asked = elapsed;
            if (!keep_waiting()) {
                return wake_reason::stopped;
            }
        }
    }
}

void ring(uint32_t * word, uint32_t value, const uint32_t * sleeping) {
    store_word(word, value);
    if (load_word(sleeping) != 0) {
        futex_wake(word, futex_scope::shared);
    }
}

bool make_socket_pair(int sockets[2]) { return socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) == 0; }

bool send_descriptor(int socket, uint32_t seq, int fd) {
    iovec data{&seq, sizeof seq};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr msg{};
    msg.msg_iov = &data;
    msg.msg_iovlen = 1;
    msg.msg_control = control;
    msg.msg_controllen = sizeof control;
    cmsghdr * c = CMSG_FIRSTHDR(&msg);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(c), &fd, sizeof fd);
    ssize_t sent;
    do {
        sent = sendmsg(socket, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (sent < 0 && errno == EINTR);
    return sent == static_cast<ssize_t>(sizeof seq);
}

int receive_descriptor(int socket, uint32_t seq) {
    for (;;) {
        uint32_t tag = 0;
        iovec data{&tag, sizeof tag};
        // Room for more than one descriptor: all that arrive must be closed, or a peer could fill this side's table.
        alignas(cmsghdr) char control[CMSG_SPACE(16 * sizeof(int))];
        msghdr msg{};
        msg.msg_iov = &data;
        msg.msg_iovlen = 1;
        msg.msg_control = control;
        msg.msg_controllen = sizeof control;
        const ssize_t got = recvmsg(socket, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            return -1;
        }
        int fd = -1;
        for (cmsghdr * c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
            if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) {
                continue;
            }
            const size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            for (size_t i = 0; i < n; ++i) {
                int received;
                std::memcpy(&received, CMSG_DATA(c) + i * sizeof(int), sizeof received);
                if (fd < 0 && got == static_cast<ssize_t>(sizeof tag) && tag == seq) {
                    fd = received;
                } else {
                    close(received);
                }
            }
        }
        if (fd >= 0) {
            return fd;
        }
    }
}

bool peer_hung_up(int socket) {
    pollfd p{socket, 0, 0};
    return poll(&p, 1, 0) > 0 && (p.revents & (POLLHUP | POLLERR | POLLNVAL)) != 0;
}

} // namespace tb::session
