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
    // How many there are. `fixed`: never fewer, whatever it costs.
    void set_most(int most, bool fixed) {
        limit = most;
        is_fixed = fixed;
    }

    int size() const { return is_fixed ? limit : std::min(cap, limit); }

    // For the run that starts now (nanoseconds of a monotonic clock).
    int next(int64_t now) {
        if (now - changed > hold) {
            if (cap < limit) {
                cap *= 2;
                changed = now;
            } else {
                hold = least_hold;
            }
        }
        return size();
    }

    // Has a run of `hands` threads that takes `elapsed` so far lost too much? A third: with half of the threads it
    // would take twice as long at most.
    bool is_crowded(int hands, int64_t lost, int64_t elapsed) const {
        return !is_fixed && hands > 1 && lost > slack && lost - slack > elapsed / 3;
    }

    // .. of so many threads.
    void shrink(int hands, int64_t now) {
        hold = std::min(now - changed < hold ? 2 * hold : least_hold, most_hold);
        cap = std::max(1, hands / 2);
        changed = now;
    }

  private:
    static constexpr int64_t slack = 1000000; // a thread may lose its CPU once without any consequence
    static constexpr int64_t least_hold = 20000000, most_hold = 1000000000;
    int limit = 1;
    int cap = 1 << 16; // what crowding leaves of it
    bool is_fixed = false;
    int64_t changed = 0, hold = least_hold;
};

} // namespace tb::npu

#endif // TILEBEAM_NPU_CREW_H
