// From a list of checked ops to what the threads do: fused steps, preparations that several ops share, and barriers
// only where one is needed.
//
// Steps of one phase run without a barrier between them. An op goes into the earliest phase that its operands allow, so
// the products of Q, K and V are one phase wherever they stand in the list. Within a phase a step follows another that
// it depends on only if the same thread does the same part of both: small ops in a row on one thread, and ops that
// divide the same rows the same way (`cut`, context.h).
//
// What depends on what is read off the bytes: an op waits for all that write what it reads or writes, or read what it
// writes. Two buffers may be the same memory mapped twice; `region` tells where their bytes really are.
//
// Fusion needs no word from the CPU side. Two ops become one step only if the second one's result takes the very place
// of the first one's (as ggml's allocator does where nobody else reads the first), and nothing stands between them, so
// whatever is read afterwards is what would be read without fusion, bit for bit.
#ifndef TILEBEAM_NPU_SCHEDULE_H
#define TILEBEAM_NPU_SCHEDULE_H

#include <cstdint>
#include <vector>

#include "context.h"
#include "kernels/kernels.h"

namespace tb::npu {

// A mapped buffer, and where its bytes are whoever maps them: `space` names a file (0: this process's addresses),
// `at` the first byte in it.
struct region {
    uint8_t * base = nullptr;
    uint64_t charged = 0; // bytes that count against the memory limit
    uint64_t space = 0;
    uint64_t at = 0;
};

constexpr int32_t all_threads = -1;

struct step {
    void (*run)(const op_context & ctx) = nullptr;
    view dst;
    view src[TB_MAX_SRC];
    uint32_t index = 0;           // of the op; of fused ones the first, of a preparation one that wants it
    uint32_t phase = 0;           // of a run with one thread: its own number
    int32_t thread = all_threads; // or the one that runs it
    bool is_op = true;            // false: a preparation
    bool by_count = false;        // op_entry.by_count
    uint8_t fused = 0;            // ops after `index` that it does, too
    bool by_rows = false;
    bool meet = false;      // barrier after it
    uint16_t solo = 0;      // with `meet`: steps after this one that are all of the next phase, and one thread's
    uint8_t counter = 0;    // of its chunks
    uint8_t n_counters = 0; // with `meet`: of the phase
    uint64_t scratch = 0;   // offsets
    uint64_t prepared = 0;
};

struct schedule {
    std::vector<step> steps; // in the order in which each thread walks them
    uint64_t scratch_bytes = 0;
    uint64_t prepared_bytes = 0;
    int threads = 1; // with something to do
};

// Views point into `ops`. Without `fuse`: one step per op in the order of the list, a barrier after each, nothing
// shared.
schedule make_schedule(const std::vector<tb_op> & ops, const std::vector<region> & regions,
                       const kernel_table & kernels, int n_threads, bool fuse);

} // namespace tb::npu

#endif // TILEBEAM_NPU_SCHEDULE_H
