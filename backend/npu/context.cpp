// What an op's function calls while it runs: see context.h. `pool` is the run's state.
#include "context.h"

#include <algorithm>
#include <cstring>

#include "run_state.h"

namespace tb::npu {

namespace {

run_state & state(const op_context & ctx) { return *static_cast<run_state *>(ctx.pool); }

} // namespace

float op_context::param_f(int i) const {
    float value;
    std::memcpy(&value, &op->params[i], sizeof value);
    return value;
}

void op_context::barrier() const {
    if (n_threads > 1) {
        state(*this).pool->barrier(thread);
    }
}

void op_context::fail(tb_status status, const char * why) const {
    run_state & s = state(*this);
    int64_t none = run_state::no_failure;
    // The winner alone writes the reason; it is read after the run's last barrier.
    if (s.failed.compare_exchange_strong(none, op - s.ops, std::memory_order_acq_rel)) {
        s.status = status;
        std::strncpy(s.why, why, sizeof s.why - 1);
    }
}

void op_context::share(int64_t n, int64_t grain, int64_t * first, int64_t * last) const {
    const int64_t pieces = (n + grain - 1) / grain;
    *first = std::min(n, pieces * thread / n_threads * grain);
    *last = std::min(n, pieces * (thread + 1) / n_threads * grain);
}

int64_t op_context::next_chunk() const {
    run_state & s = state(*this);
    return n_threads > 1 ? s.pool->next_chunk() : s.solo_chunks++;
}

void op_context::reset_chunks() const {
    run_state & s = state(*this);
    if (n_threads > 1) {
        s.pool->reset_chunks();
    } else {
        s.solo_chunks = 0;
    }
}

} // namespace tb::npu
