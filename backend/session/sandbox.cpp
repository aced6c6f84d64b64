// See sandbox.h. A list of what is allowed, so that what a future kernel adds is not.
#include "sandbox.h"

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

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

constexpr long allowed[] = {
    // waiting and time
    SYS_futex, SYS_sched_yield, SYS_clock_gettime, SYS_clock_nanosleep, SYS_nanosleep, SYS_restart_syscall, SYS_ppoll,
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
    SYS_clone, SYS_set_robust_list, SYS_sched_getaffinity, SYS_sched_setaffinity, SYS_gettid, SYS_prctl, SYS_getrandom,
#ifdef SYS_clone3
    SYS_clone3,
#endif
#ifdef SYS_getcpu
    SYS_getcpu,
#endif
#ifdef SYS_rseq
    SYS_rseq,
#endif
    // signals and the end
    SYS_rt_sigaction, SYS_rt_sigprocmask, SYS_rt_sigreturn, SYS_sigaltstack, SYS_getpid, SYS_getppid, SYS_tgkill,
    SYS_exit, SYS_exit_group, SYS_write};

} // namespace

bool enter_sandbox() {
    if (sanitized) {
        return false;
    }
    constexpr auto load = [](size_t offset) {
        return sock_filter BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<uint32_t>(offset));
    };
    constexpr auto answer = [](uint32_t what) { return sock_filter BPF_STMT(BPF_RET | BPF_K, what); };
    const sock_filter refuse = answer(SECCOMP_RET_ERRNO | EPERM);
    std::vector<sock_filter> f;
    f.push_back(load(offsetof(seccomp_data, arch)));
    f.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, this_arch, 1, 0));
    f.push_back(answer(SECCOMP_RET_KILL_PROCESS));
    f.push_back(load(offsetof(seccomp_data, nr)));
    // both as long as the third argument, the protection, has nothing executable
    f.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mmap, 1, 0));
    f.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mprotect, 0, 4));
    f.push_back(load(offsetof(seccomp_data, args) + 2 * sizeof(uint64_t))); // little endian: the low half
    f.push_back(BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, PROT_EXEC, 1, 0));
    f.push_back(answer(SECCOMP_RET_ALLOW));
    f.push_back(refuse);
    for (const long nr : allowed) {
        f.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<uint32_t>(nr), 0, 1));
        f.push_back(answer(SECCOMP_RET_ALLOW));
    }
    f.push_back(refuse);
    const sock_fprog program{static_cast<unsigned short>(f.size()), f.data()};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

} // namespace tb::session
