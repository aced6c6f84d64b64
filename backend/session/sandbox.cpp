// See sandbox.h. A list of what is allowed, so that what a future kernel adds is not.
#include "sandbox.h"

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <dirent.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

#include "tilebeam/protocol.h"

namespace tb::session {

namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool sanitized = true;
#elif defined(__has_feature)
#    if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
constexpr bool sanitized = true;
#    else
constexpr bool sanitized = false;
#    endif
#else
constexpr bool sanitized = false;
#endif

#if defined(__x86_64__)
constexpr uint32_t this_arch = AUDIT_ARCH_X86_64;
#else
constexpr uint32_t this_arch = AUDIT_ARCH_AARCH64;
#endif

// Allowed whatever the arguments.
constexpr uint32_t allowed[] = {// waiting and time
                                SYS_futex, SYS_sched_yield, SYS_clock_gettime, SYS_clock_nanosleep, SYS_nanosleep,
                                SYS_restart_syscall, SYS_ppoll,
#ifdef SYS_poll
                                SYS_poll,
#endif
                                // the socket that hands in descriptors, and what is done with them
                                SYS_recvmsg, SYS_fstat, SYS_close,
#ifdef SYS_newfstatat
                                SYS_newfstatat,
#endif
                                // memory
                                SYS_munmap, SYS_madvise, SYS_brk, SYS_mremap,
                                // threads
                                SYS_set_robust_list, SYS_sched_getaffinity, SYS_gettid, SYS_getrandom,
#ifdef SYS_getcpu
                                SYS_getcpu,
#endif
#ifdef SYS_rseq
                                SYS_rseq,
#endif
                                // signals and the end
                                SYS_rt_sigaction, SYS_rt_sigprocmask, SYS_rt_sigreturn, SYS_sigaltstack, SYS_getpid,
                                SYS_getppid, SYS_exit, SYS_exit_group};

// Allowed if an argument is right: (value & mask) == wanted. All of these are 32-bit values.
struct condition {
    uint32_t call;
    uint32_t argument;
    uint32_t mask;
    uint32_t wanted;
};

using filter = std::vector<sock_filter>;

void load(filter & f, size_t offset) { f.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<uint32_t>(offset))); }

void answer(filter & f, uint32_t what) { f.push_back(BPF_STMT(BPF_RET | BPF_K, what)); }

// Skip the next `n` instructions unless the loaded word is `value`.
void unless(filter & f, uint32_t value, uint8_t n) { f.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, n)); }

bool filter_calls() {
    const condition conditions[] = {
        {SYS_mmap, 2, PROT_EXEC, 0},
        {SYS_mprotect, 2, PROT_EXEC, 0},
        {SYS_clone, 0, CLONE_THREAD, CLONE_THREAD}, // no processes
        {SYS_prctl, 0, ~0u, PR_SET_NAME},
        {SYS_fcntl, 1, ~0u, F_GET_SEALS},
        {SYS_sched_setaffinity, 0, ~0u, 0},                    // its own threads, each for itself
        {SYS_tgkill, 0, ~0u, static_cast<uint32_t>(getpid())}, // abort() and raise()
        {SYS_write, 0, ~0u, STDERR_FILENO},                    // last words
        {SYS_writev, 0, ~0u, STDERR_FILENO},
    };
    filter f;
    load(f, offsetof(seccomp_data, arch));
    f.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, this_arch, 1, 0));
    answer(f, SECCOMP_RET_KILL_PROCESS);
    load(f, offsetof(seccomp_data, nr));
    for (const uint32_t call : allowed) {
        unless(f, call, 1);
        answer(f, SECCOMP_RET_ALLOW);
    }
#ifdef SYS_clone3
    // Its arguments lie in memory, where no filter can look: the C library then takes clone.
    unless(f, SYS_clone3, 1);
    answer(f, SECCOMP_RET_ERRNO | ENOSYS);
#endif
    for (const condition & c : conditions) {
        unless(f, c.call, 5);
        load(f, offsetof(seccomp_data, args) + c.argument * sizeof(uint64_t)); // little endian: the low half
        f.push_back(BPF_STMT(BPF_ALU | BPF_AND | BPF_K, c.mask));
        unless(f, c.wanted, 1);
        answer(f, SECCOMP_RET_ALLOW);
        answer(f, SECCOMP_RET_ERRNO | EPERM);
    }
    answer(f, SECCOMP_RET_ERRNO | EPERM);
    const sock_fprog program{static_cast<unsigned short>(f.size()), f.data()};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

} // namespace

uint32_t enter_sandbox() {
    uint32_t guards = 0;
    // Before the filter, which lets nobody take it back.
    if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0) {
        guards |= TB_GUARD_PRIVATE;
    }
    if (!sanitized && filter_calls()) {
        guards |= TB_GUARD_SYSCALLS;
    }
    return guards;
}

void close_above(int last) {
#ifdef SYS_close_range
    if (syscall(SYS_close_range, last + 1, ~0U, 0) == 0) {
        return;
    }
#endif
    DIR * dir = opendir("/proc/self/fd");
    if (!dir) {
        return;
    }
    std::vector<int> open;
    while (const dirent * e = readdir(dir)) {
        const int fd = std::atoi(e->d_name);
        if (fd > last && fd != dirfd(dir)) {
            open.push_back(fd);
        }
    }
    closedir(dir);
    for (const int fd : open) {
        close(fd);
    }
}

} // namespace tb::session
