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
    int n_threads = 0;         // 0: one per performance core that this process may use
    std::string isa;           // "" = best of this CPU; else a name from kernel_isas()
    uint64_t memory_limit = 0; // address space for mapped buffers, bytes; 0 = none
    bool fuse = true;          // false: op by op (schedule.h)
};

// Outcome of a run: status, and on failure which op and why (as tb_reply, less its channel fields).
struct outcome {
    tb_status status = TB_OK;
    uint32_t op_index = 0;
    std::string why;
};

// CLOCK_MONOTONIC, nanoseconds, and the phase of the schedule.
struct stamp {
    int64_t begin = 0;
    int64_t end = 0;
    uint32_t phase = 0;
};

// Where a mapped buffer's bytes are, so that two mappings of the same ones are known as such. Without a file: at their
// addresses.
struct origin {
    uint64_t device = 0, inode = 0; // of the file; both 0: none
    uint64_t offset = 0;
};

// A list of ops that is run more than once. What was checked and resolved for an op is kept until the op or the mapped
// buffers change, for each of a few numbers of threads. Belongs to one executor; holds its own copy of the ops.
class graph {
  public:
    graph();
    ~graph();
    graph(const graph &) = delete;
    graph & operator=(const graph &) = delete;

    void assign(const tb_op * ops, uint32_t n_ops);
    void replace(uint32_t index, const tb_op & op); // index < size()
    uint32_t size() const;
    const tb_op & op(uint32_t index) const;

    struct impl;
    std::unique_ptr<impl> self;
};

class executor {
  public:
    // An isa that is not runnable here means the best one; isa() tells.
    explicit executor(const config & cfg);
    ~executor();
    executor(const executor &) = delete;
    executor & operator=(const executor &) = delete;

    // Give buffer `id` a memory region that stays valid until unmap.
    tb_status map(uint32_t id, void * base, uint64_t size, bool writable, const origin & from = {});
    tb_status unmap(uint32_t id);
    // 0: one per performance core. Only this number has a part in what is computed; at work are as many threads, but no
    // more than there are CPUs, and fewer while other programs want those (crew.h). Programs that go back and forth
    // between two numbers pay nothing for it: threads stay when there are more of them than wanted.
    void set_threads(int n);
    // 0: as said. Else: that many are at work whatever it costs, as long as there are threads.
    void set_hands(int n);
    void set_fusion(bool on);
    void wake(); // a run comes soon: wake sleeping workers meanwhile
    // A word in which runs from now on tell how far they are: `base` + 1 when the first op has ended, and so on.
    void set_progress(uint32_t * word, uint32_t base);

    // Check every op, then run all as if in order: schedule.h says what is done at the same time. The ops must not
    // change under the call: the caller owns a private copy.
    outcome run(const tb_op * ops, uint32_t n_ops);
    outcome run(graph & g);

    const char * isa() const; // the kernel set in use
    int n_threads() const;
    uint64_t schedules() const; // made so far

    // Stamp the times at which each worker begins and ends its part of each op, from the next run on. An op that was
    // fused into the one before it takes no time, when that one ends.
    void set_stamps(bool on);
    // Those of the last run, one per op in order, then one per op of what was prepared for it (and for all that share
    // it); `begin` is 0 where this worker had no part. nullptr if there are none.
    const stamp * stamps(int worker) const;

    // The kernel that an op of this shape would run; nullptr if it has none of its own or is refused.
    const char * kernel_name(const tb_op & op) const;

  private:
    struct impl;
    std::unique_ptr<impl> self;
};

// Kernel sets compiled in and runnable on this CPU, best first; the last is "portable".
std::vector<const char *> kernel_isas();

} // namespace tb::npu

#endif // TILEBEAM_NPU_EXECUTOR_H
