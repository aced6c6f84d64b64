// What an op's function calls while it runs: see context.h.
#include "context.h"

#include <algorithm>
#include <cstring>

#include "run_state.h"

namespace tb::npu {

float op_context::param_f(int i) const {
    float value;
    std::memcpy(&value, &op->params[i], sizeof value);
    return value;
}

void op_context::barrier() const { state->pool->barrier(thread, meeting); }

void op_context::fail(tb_status status, const char * why) const {
    int64_t none = run_state::no_failure;
    // The winner alone writes the reason; it is read after the run's last barrier.
    if (state->failed.compare_exchange_strong(none, phase, std::memory_order_acq_rel)) {
        state->op_index = index;
        state->status = status;
        std::strncpy(state->why, why, sizeof state->why - 1);
    }
}

range op_context::share(int64_t n, int64_t grain) const {
    const int64_t pieces = divide_up(n, grain);
    return {std::min(n, pieces * thread / n_threads * grain), std::min(n, pieces * (thread + 1) / n_threads * grain)};
}

range op_context::share_runs(const view & v) const {
    const int64_t per_row = runs_per_row(v);
    if (!by_rows) {
        return share(v.rows() * per_row);
    }
    const range rows = share(v.rows());
    return {rows.first * per_row, rows.last * per_row};
}

int64_t op_context::next_chunk() const {
    return state->chunks[phase % 2][counter].next.fetch_add(1, std::memory_order_relaxed);
}

} // namespace tb::npu
