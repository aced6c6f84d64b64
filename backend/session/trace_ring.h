// Both ends of a trace ring (tilebeam/trace.h): the NPU side's writer and the CPU side's reader.
#ifndef TILEBEAM_SESSION_TRACE_RING_H
#define TILEBEAM_SESSION_TRACE_RING_H

#include <cstdint>
#include <memory>
#include <vector>

#include "executor.h"
#include "shm.h"
#include "tilebeam/trace.h"

namespace tb::session {

// Events that a ring holds. The CPU side empties it after every reply, so this bounds one graph: ops times workers.
constexpr uint32_t ring_events = 1u << 17;
constexpr uint64_t ring_bytes = sizeof(tb_trace_ring) + uint64_t{ring_events} * sizeof(tb_trace_event);
static_assert(sizeof(tb_trace_event) == 40 && sizeof(tb_trace_ring) == 8 + TB_TRACE_KERNELS * TB_TRACE_KERNEL_BYTES,
              "the same on both sides, whatever CPU each is compiled for");

// The NPU side's. Keeps its own counter: what the CPU side scribbles into the ring is never read.
class ring_writer {
  public:
    ring_writer() = default;
    ring_writer(void * memory, uint64_t size); // at least one event must fit
    explicit operator bool() const { return ring != nullptr; }
    static bool fits(uint64_t size) { return size >= sizeof(tb_trace_ring) + sizeof(tb_trace_event); }

    void add_ops(uint32_t seq, const npu::graph & g, const npu::executor & executor);
    void add_message(uint32_t seq, uint32_t kind, int64_t begin, int64_t end);
    void add_notes(uint32_t seq, int64_t begin, int64_t end);
    void publish(); // what was added becomes visible

  private:
    void add(const tb_trace_event & e);
    uint16_t kernel(const char * name);

    tb_trace_ring * ring = nullptr;
    tb_trace_event * events = nullptr;
    uint32_t capacity = 0;
    uint32_t written = 0;
    std::vector<const char *> names; // of the kernels that have been written, in order
};

// The CPU side's. Believes nothing that it reads.
class ring_reader {
  public:
    explicit ring_reader(const void * memory);

    // Turn the events of request `seq` into records. They must lie within [begin, end] and name ops of the graph.
    // What does not is counted as damaged, what was overwritten as lost.
    void take(uint32_t session, uint32_t seq, const tb_op * ops, uint32_t n_ops, int64_t begin, int64_t end,
              std::vector<tb_trace_record> & out);
    uint64_t lost = 0;
    uint64_t damaged = 0;

  private:
    bool believable(const tb_trace_event & e, uint32_t seq, const tb_op * ops, uint32_t n_ops, int64_t begin,
                    int64_t end) const;

    const tb_trace_ring * ring;
    const tb_trace_event * events;
    uint32_t seen = 0;
};

// A session's, while tracing is on: the ring that its NPU side was given.
class traced_npu {
  public:
    traced_npu(std::unique_ptr<shared_memory> ring, uint32_t buffer_id, uint32_t session_number);

    // A graph was sent and answered: spans of the calling thread, and what the ring tells of the NPU side.
    struct stamps {
        int64_t began, doorbell, replied;
    };
    void record(uint32_t seq, uint32_t kind, const tb_op * ops, uint32_t n_ops, const stamps & at);

    const std::unique_ptr<shared_memory> memory;
    const uint32_t buffer;

  private:
    const uint32_t session;
    ring_reader reader;
};

// Rows that a matrix meets, tokens of attention: which kernel runs depends on it. 0 for other ops.
uint32_t rows_of(const tb_op & op);

} // namespace tb::session

#endif // TILEBEAM_SESSION_TRACE_RING_H
