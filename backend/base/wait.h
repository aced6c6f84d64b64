// The primitives that every wait is made of: pause, monotonic time, futex. The NPU's threads use them privately, the
// channel uses them across processes.
#ifndef TILEBEAM_BASE_WAIT_H
#define TILEBEAM_BASE_WAIT_H

#include <climits>
#include <cstdint>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace tb {

inline void cpu_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory"); // "yield" is a no-op on most cores and gives the sibling nothing
#elif defined(__hexagon__)
    asm volatile("pause(#8)" ::: "memory");
#endif
}

inline int64_t now_ns() {
    timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return static_cast<int64_t>(ts.tv_sec) * 1000000000 + ts.tv_nsec;
}

enum class futex_scope { process_private, shared };

// Sleep while *word == expected, at most timeout_ns (< 0: no limit). Returns early now and then: callers loop.
inline void futex_wait(const uint32_t * word, uint32_t expected, int64_t timeout_ns, futex_scope scope) {
    timespec ts{};
    ts.tv_sec = static_cast<time_t>(timeout_ns / 1000000000);
    ts.tv_nsec = static_cast<long>(timeout_ns % 1000000000);
    const int op = scope == futex_scope::shared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE;
    syscall(SYS_futex, word, op, expected, timeout_ns < 0 ? nullptr : &ts, nullptr, 0);
}

inline void futex_wake(const uint32_t * word, futex_scope scope) {
    const int op = scope == futex_scope::shared ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE;
    syscall(SYS_futex, word, op, INT_MAX, nullptr, nullptr, 0);
}

// How long to spin, learned from whether spinning helped lately. It does not if the other thread shares this CPU (it
// then cannot run while this one spins) or has a lot to do; a full-length try now and then finds out when that changes.
class spin_budget {
  public:
    explicit spin_budget(int64_t most_ns = 0) : most(most_ns), now(most_ns) {}
    int64_t next() { return ++waits % 64 == 0 ? most : now; }
    int64_t longest() const { return most; }
    // Of a wait whose end was seen, asleep or not: the next one is taken to be of the same kind.
    void report_length(int64_t waited) { now = waited < most ? most : 0; }
    void report(bool helped) { now = helped ? most : now / 2; }

  private:
    int64_t most;
    int64_t now;
    uint32_t waits = 0;
};

} // namespace tb

#endif // TILEBEAM_BASE_WAIT_H
