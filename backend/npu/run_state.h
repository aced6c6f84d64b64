// What the threads of one run share.
#ifndef TILEBEAM_NPU_RUN_STATE_H
#define TILEBEAM_NPU_RUN_STATE_H

#include <atomic>
#include <cstdint>

#include "thread_pool.h"
#include "tilebeam/protocol.h"

namespace tb::npu {

// Ops of one phase that hand out chunks have a counter each. Two phases take turns with two sets: one is set back while
// the other is in use.
constexpr int most_counters = 16;

struct run_state {
    static constexpr int64_t no_failure = INT64_MAX;

    thread_pool * pool = nullptr;
    // The phase in which the first op failed. Threads stop after the barrier that ends it, so all stop at the same one.
    std::atomic<int64_t> failed{no_failure};
    uint32_t op_index = 0;
    tb_status status = TB_OK;
    char why[sizeof(tb_reply::why)] = {};
    // From the end of this phase on there are only so many threads. Written once, by thread 0 before the barrier there.
    std::atomic<int64_t> fewer_from{no_failure};
    int fewer = 0;
    chunk_counter chunks[2][most_counters];
};

} // namespace tb::npu

#endif // TILEBEAM_NPU_RUN_STATE_H
