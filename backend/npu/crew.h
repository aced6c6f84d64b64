// How many of the NPU's threads take part in a run.
//
// Threads that meet at barriers advance only while all of them have a CPU. Where other programs want the CPUs too, each
// barrier may cost a turn of the system's scheduler, milliseconds, hundreds of times a graph; then fewer threads get
// more done, and one needs no barrier at all. So the number halves when a run lost much of its time to threads that
// were given no CPU, and doubles again after a while: soon if it was by chance, later and later if it happens again.
// What is computed does not depend on it (context.h).
#ifndef TILEBEAM_NPU_CREW_H
#define TILEBEAM_NPU_CREW_H

#include <algorithm>
#include <cstdint>

namespace tb::npu {

class crew {
  public:
    // At most so many. `fixed`: never fewer, whatever it costs.
    explicit crew(int most = 1, bool fixed = false) : limit(most), now_at(most), is_fixed(fixed) {}

    int size() const { return now_at; }

    // For the run that starts now (nanoseconds of a monotonic clock).
    int next(int64_t now) {
        if (now_at < limit && now - changed > hold) {
            now_at = std::min(2 * now_at, limit);
            changed = now;
        } else if (now_at == limit && now - changed > hold) {
            hold = least_hold;
        }
        return now_at;
    }

    // Has a run that takes `elapsed` so far lost too much? A third: with half of the threads it would take twice as
    // long at most.
    bool is_crowded(int64_t lost, int64_t elapsed) const {
        return !is_fixed && now_at > 1 && lost > slack && lost - slack > elapsed / 3;
    }

    void shrink(int64_t now) {
        hold = std::min(now - changed < hold ? 2 * hold : least_hold, most_hold);
        now_at = std::max(1, now_at / 2);
        changed = now;
    }

  private:
    static constexpr int64_t slack = 1000000; // a thread may lose its CPU once without any consequence
    static constexpr int64_t least_hold = 20000000, most_hold = 1000000000;
    int limit, now_at;
    bool is_fixed;
    int64_t changed = 0, hold = least_hold;
};

} // namespace tb::npu

#endif // TILEBEAM_NPU_CREW_H
