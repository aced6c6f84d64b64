// System calls of Linux on Hexagon: number in r6, arguments in r0 to r5, result or -errno in r0. The numbers are those
// of the generic 32-bit table.
#ifndef TB_HEXAGON_RUNTIME_SYSCALL_H
#define TB_HEXAGON_RUNTIME_SYSCALL_H

enum {
    NR_close = 57,
    NR_read = 63,
    NR_write = 64,
    NR_ppoll = 73,
    NR_fstat64 = 80,
    NR_exit = 93,
    NR_exit_group = 94,
    NR_futex = 98,
    NR_clock_gettime = 113,
    NR_sched_getaffinity = 123,
    NR_sched_yield = 124,
    NR_getpid = 172,
    NR_getppid = 173,
    NR_geteuid = 175,
    NR_getsockopt = 209,
    NR_recvmsg = 212,
    NR_munmap = 215,
    NR_clone = 220,
    NR_mmap2 = 222,
    NR_madvise = 233,
};

static inline long tb_syscall(long number, long a, long b, long c, long d, long e, long f) {
    register long r0 __asm__("r0") = a;
    register long r1 __asm__("r1") = b;
    register long r2 __asm__("r2") = c;
    register long r3 __asm__("r3") = d;
    register long r4 __asm__("r4") = e;
    register long r5 __asm__("r5") = f;
    register long r6 __asm__("r6") = number;
    __asm__ volatile("trap0(#1)" : "+r"(r0) : "r"(r1), "r"(r2), "r"(r3), "r"(r4), "r"(r5), "r"(r6) : "memory");
    return r0;
}

// -errno becomes -1 and errno.
long tb_result(long r);

#endif
