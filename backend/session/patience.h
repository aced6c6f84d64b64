// How long a wait for the other side may still last.
//
// Only time in which this side could run counts: a program that is stopped and goes on later has waited for nobody, and
// neither has its NPU worked. So no more passes between two looks than a busy machine may well take for them.
#ifndef TILEBEAM_SESSION_PATIENCE_H
#define TILEBEAM_SESSION_PATIENCE_H

#include <algorithm>
#include <cstdint>

#include "wait.h"

namespace tb::session {

// A waiting CPU side looks so often whether the NPU is still there. Nanoseconds.
constexpr int64_t between_looks = 20000000;

class patience {
  public:
    explicit patience(int64_t limit_ns) : limit(limit_ns), left(limit_ns), looked(now_ns()) {}
    void renew() { left = limit; }
    // Is there some left?
    bool look() {
        const int64_t now = now_ns();
        left -= std::min(now - looked, 5 * between_looks);
        looked = now;
        return left > 0;
    }

  private:
    int64_t limit;
    int64_t left;
    int64_t looked;
};

} // namespace tb::session

#endif // TILEBEAM_SESSION_PATIENCE_H
