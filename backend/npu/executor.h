// The NPU's executor: mapped buffers, a thread pool, and a run of checked ops. No ggml, no channel in here.
#ifndef TILEBEAM_NPU_EXECUTOR_H
#define TILEBEAM_NPU_EXECUTOR_H

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tilebeam/ops.h"
#include "tilebeam/protocol.h"

namespace tb::npu {

struct config {
    int n_threads = 0;        // 0: one per CPU this process may use
    std::string isa;          // "" = best of this CPU; else a name from kernel_isas(): portable, avx2, avx512vnni, neon
    uint64_t memory_limit = 0; // address space for mapped buffers, bytes; 0 = none
};

// Outcome of a run: status, and on failure which op and why (as tb_reply, less its channel fields).
struct outcome {
    tb_status status = TB_OK;
    uint32_t op_index = 0;
    std::string why;
};

class executor {
  public:
    explicit executor(const config & cfg);
    ~executor();
    executor(const executor &) = delete;
    executor & operator=(const executor &) = delete;

    // Give buffer `id` a memory region that stays valid until unmap.
    tb_status map(uint32_t id, void * base, uint64_t size, bool writable);
    tb_status unmap(uint32_t id);
    void set_threads(int n);

    // Check every op, then run all in order. The ops must not change under the call: the caller owns a private copy.
    outcome run(const tb_op * ops, uint32_t n_ops);

    const char * isa() const; // the kernel set in use
    int n_threads() const;

  private:
    struct impl;
    std::unique_ptr<impl> self;
};

// Kernel sets compiled in and runnable on this CPU, best first; the last is "portable".
std::vector<const char *> kernel_isas();

} // namespace tb::npu

#endif // TILEBEAM_NPU_EXECUTOR_H
