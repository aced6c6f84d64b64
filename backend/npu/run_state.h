// What the threads of one run share; op_context.pool points here.
#ifndef TILEBEAM_NPU_RUN_STATE_H
#define TILEBEAM_NPU_RUN_STATE_H

#include <atomic>
#include <cstdint>

#include "thread_pool.h"
#include "tilebeam/ops.h"
#include "tilebeam/protocol.h"

namespace tb::npu {

struct run_state {
    static constexpr int64_t no_failure = INT64_MAX;

    thread_pool * pool = nullptr;
    const tb_op * ops = nullptr;
    int64_t solo_chunks = 0; // the chunk counter of ops that thread 0 runs alone
    // Index of the first op that failed. Threads stop after the barrier that ends it, so all stop at the same op.
    std::atomic<int64_t> failed{no_failure};
    tb_status status = TB_OK;
    char why[sizeof(tb_reply::why)] = {};
};

} // namespace tb::npu

#endif // TILEBEAM_NPU_RUN_STATE_H
