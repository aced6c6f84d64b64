// System calls as the sources know them from POSIX.
#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <stdarg.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "syscall.h"

static _Thread_local int last_error;

int * tb_errno(void) { return &last_error; }

long tb_result(long r) {
    if (r < 0 && r > -4096) {
        last_error = (int)-r;
        return -1;
    }
    return r;
}

static long call1(long n, long a) { return tb_result(tb_syscall(n, a, 0, 0, 0, 0, 0)); }
static long call3(long n, long a, long b, long c) { return tb_result(tb_syscall(n, a, b, c, 0, 0, 0)); }

ssize_t read(int fd, void * to, size_t n) { return call3(NR_read, fd, (long)to, (long)n); }
ssize_t write(int fd, const void * from, size_t n) { return call3(NR_write, fd, (long)from, (long)n); }
int close(int fd) { return (int)call1(NR_close, fd); }
pid_t getpid(void) { return (pid_t)call1(NR_getpid, 0); }
pid_t getppid(void) { return (pid_t)call1(NR_getppid, 0); }
unsigned geteuid(void) { return (unsigned)call1(NR_geteuid, 0); }
int sched_yield(void) { return (int)call1(NR_sched_yield, 0); }
int fstat(int fd, struct stat * to) { return (int)call3(NR_fstat64, fd, (long)to, 0); }

void _exit(int code) {
    for (;;)
        tb_syscall(NR_exit_group, code, 0, 0, 0, 0, 0);
}

long syscall(long number, ...) {
    va_list args;
    va_start(args, number);
    long a[6];
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(args, long);
    va_end(args);
    return tb_result(tb_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]));
}

// Pages: the CPU side works with those of its kernel, 4 KiB, and so does the protocol. The emulator's are 64 KiB, and
// a mapping must start on one: it starts early, and the address returned is that of the byte asked for.
enum { host_page = 4096, guest_page = 65536 };

long sysconf(int name) {
    if (name == _SC_PAGESIZE) return host_page;
    errno = EINVAL;
    return -1;
}

void * mmap(void * at, size_t size, int protection, int flags, int fd, off_t offset) {
    const size_t early = (size_t)(offset % guest_page);
    if (offset < 0 || offset % host_page != 0 || size == 0) {
        errno = EINVAL;
        return MAP_FAILED;
    }
    // qemu-hexagon 7.2 counts offsets in bytes of 32 bits and would map another place of the file.
    if (offset > (off_t)UINT32_MAX - (off_t)size) {
        errno = EOVERFLOW;
        return MAP_FAILED;
    }
    if (size > SIZE_MAX - 2 * guest_page) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    const long r = tb_result(tb_syscall(NR_mmap2, (long)at, (long)(size + early), protection, flags, fd,
                                        (long)((offset - (off_t)early) / host_page)));
    return r == -1 ? MAP_FAILED : (char *)r + early;
}

int munmap(void * at, size_t size) {
    const uintptr_t first = (uintptr_t)at & ~(uintptr_t)(guest_page - 1);
    return (int)call3(NR_munmap, (long)first, (long)((uintptr_t)at + size - first), 0);
}

int madvise(void * at, size_t size, int advice) { return (int)call3(NR_madvise, (long)at, (long)size, advice); }

int clock_gettime(clockid_t clock, struct timespec * to) { return (int)call3(NR_clock_gettime, clock, (long)to, 0); }

int poll(struct pollfd * fds, nfds_t n, int timeout_ms) {
    struct timespec limit = {timeout_ms / 1000, (timeout_ms % 1000) * 1000000L};
    return (int)tb_result(tb_syscall(NR_ppoll, (long)fds, (long)n, timeout_ms < 0 ? 0 : (long)&limit, 0, 0, 0));
}

ssize_t recvmsg(int socket, struct msghdr * m, int flags) { return call3(NR_recvmsg, socket, (long)m, flags); }

int getsockopt(int socket, int level, int option, void * to, socklen_t * size) {
    return (int)tb_result(tb_syscall(NR_getsockopt, socket, level, option, (long)to, (long)size, 0));
}

struct cmsghdr * tb_cmsg_next(struct msghdr * m, struct cmsghdr * c) {
    const char * end = (const char *)m->msg_control + m->msg_controllen;
    if (c->cmsg_len < sizeof *c || c->cmsg_len > (size_t)(end - (const char *)c)) return NULL;
    char * next = (char *)c + CMSG_ALIGN(c->cmsg_len);
    return next + sizeof *c <= end ? (struct cmsghdr *)(void *)next : NULL;
}
