// Where traces of this program are collected: spans of the CPU side as they end, those of all NPUs after each reply.
#ifndef TILEBEAM_SESSION_TRACE_H
#define TILEBEAM_SESSION_TRACE_H

#include <atomic>
#include <cstdint>
#include <vector>

#include "fork.h"
#include "tilebeam/trace.h"

namespace tb::session {

class trace {
  public:
    // Never destroyed: sessions may end while the program exits.
    static trace & get();

    // One relaxed load: all that a graph pays while tracing is off.
    bool on() const { return active.load(std::memory_order_relaxed); }

    void start(uint64_t most_records); // forgets what was collected before
    void stop();                       // what was collected stays

    // Spans of a thread of this program. Do nothing while tracing is off.
    void span(tb_span kind, int64_t begin, int64_t end, uint32_t session = 0, uint32_t seq = 0, uint32_t code = 0,
              uint32_t n_ops = 0);
    void add(const std::vector<tb_trace_record> & records);
    void note_losses(uint64_t lost, uint64_t damaged);

    uint64_t take(tb_trace_record * out, uint64_t most); // oldest first; they are gone then
    void losses(uint64_t * lost, uint64_t * damaged);    // records that are missing

  private:
    trace() = default;
    std::atomic<bool> active{false};
    fork_lock lock; // guards what follows
    std::vector<tb_trace_record> records;
    uint64_t most = 0;
    uint64_t n_lost = 0;
    uint64_t n_damaged = 0;
};

} // namespace tb::session

#endif // TILEBEAM_SESSION_TRACE_H
