// What the whole plugin shares: options, the running sessions, the last error, counters.
//
// One session per device, started when the first buffer or backend needs it and used by all models of the process.
// Buffers and backends hold their session, and it ends with the last of them; a session that died stays dead for them,
// and whoever allocates next gets a new one. Sessions know nothing of each other: when one dies, the others go on.
//
// All sessions of a machine share its CPUs, and each has a worker per CPU. They do not compete, because a model's
// layers follow each other.
#ifndef TILEBEAM_PLUGIN_SHARED_STATE_H
#define TILEBEAM_PLUGIN_SHARED_STATE_H

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "control.h"
#include "fork.h"
#include "session.h"
#include "types.h"

namespace tb::plugin {

struct counters {
    std::atomic<uint64_t> buffers{0}, buffer_bytes{0}, mapped_bytes{0}, bad_buffers{0}, tiled_tensors{0};
    std::atomic<uint64_t> graphs{0}, ops{0}, lowered{0}, failures{0}, errors{0}, compute_ns{0};
};

class state {
  public:
    // Never destroyed: ggml keeps the plugin loaded and may free buffers while the process exits.
    static state & get();

    counters count;

    // The device's running session, or a new one if there is none or it died. nullptr: the reason is in last_error().
    session_ptr acquire(int device);
    // The session that runs now, without starting one; may be dead; may be nullptr.
    session_ptr current(int device);
    uint64_t started(int device); // sessions so far

    // Address space of the device's running session, or of its next one; 0 = no limit.
    uint64_t limit_of(int device);

    tilebeam_options options();
    // Checks the values; on failure `why` says what is wrong and nothing changes.
    tb_status configure(const tilebeam_options & options, std::string & why);
    // llama.cpp's wish; obeyed unless options fix the number.
    void ask_threads(int n);
    int n_threads(int device); // 0 without a session
    // enum tilebeam_numerics, with what is added.
    int32_t numerics() const { return numerics_in_force.load(std::memory_order_relaxed); }

    // Remember and log a failure. The same sentence twice in a row is logged once.
    void fail(const std::string & why);
    std::string last_error();
    std::string take_error(); // the last one that this thread met since it asked last

    // Bytes as told to llama.cpp: physical memory, or what the session's limit leaves of it.
    void memory(int device, uint64_t * free, uint64_t * total);

  private:
    struct slot {
        std::weak_ptr<tb::session::session> running; // ends with the last buffer or backend that uses it
        int threads = 0;
        uint64_t started = 0;
    };

    state();
    tb::session::options session_options(int device) const;
    int wanted_threads() const; // 0 = one per performance core
    // Tells the running sessions that have another number of threads than wanted.
    tb::session::result give_threads();

    fork_lock starting{fork_lock::at_fork::renewed}; // one session starts at a time
    fork_lock lock;                                  // options, sessions, threads
    tilebeam_options opt{};
    int asked_threads = 0;
    std::array<slot, TILEBEAM_MAX_DEVICES> slots;
    std::atomic<int32_t> numerics_in_force{TILEBEAM_NUMERICS_INT8};

    fork_lock error_lock;
    std::string error;
};

// The directory that holds this plugin.
std::string plugin_directory();

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_SHARED_STATE_H
