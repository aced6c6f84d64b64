// What the whole plugin shares: options, the running session, the last error, counters.
//
// One session per device, started when the first buffer or backend needs it and used by all models of the process.
// Buffers and backends hold their session, and it ends with the last of them; a session that died stays dead for them,
// and whoever allocates next gets a new one.
#ifndef TILEBEAM_PLUGIN_STATE_H
#define TILEBEAM_PLUGIN_STATE_H

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "control.h"
#include "session.h"

namespace tb::plugin {

using session_ptr = std::shared_ptr<tb::session::session>;

struct counters {
    std::atomic<uint64_t> buffers{0}, buffer_bytes{0}, mapped_bytes{0}, tiled_tensors{0};
    std::atomic<uint64_t> sessions{0}, graphs{0}, ops{0}, lowered{0}, failures{0}, compute_ns{0};
};

class state {
  public:
    // Never destroyed: ggml keeps the plugin loaded and may free buffers while the process exits.
    static state & get();

    counters count;

    // The running session, or a new one if there is none or it died. nullptr: the reason is in last_error().
    session_ptr acquire();
    // The session that runs now, without starting one; may be dead; may be nullptr.
    session_ptr current();

    tilebeam_options options();
    // Checks the values; on failure `why` says what is wrong and nothing changes.
    tb_status configure(const tilebeam_options & options, std::string & why);
    // llama.cpp's wish; obeyed unless options fix the number.
    void ask_threads(int n);
    int n_threads();
    bool fp16() const { return fp16_numerics.load(std::memory_order_relaxed); }

    // Remember and log a failure. The same sentence twice in a row is logged once.
    void fail(const std::string & why);
    std::string last_error();

    // Bytes as told to llama.cpp: physical memory, less what the memory limit leaves out.
    void memory(uint64_t * free, uint64_t * total);

  private:
    state();
    tb::session::options session_options() const;
    int wanted_threads() const; // 0 = one per usable CPU

    std::mutex lock; // options, session, threads
    tilebeam_options opt{};
    int asked_threads = 0;
    int running_threads = 0;
    std::weak_ptr<tb::session::session> running; // ends with the last buffer or backend that uses it
    std::atomic<bool> fp16_numerics{false};

    std::mutex error_lock;
    std::string error;
};

// The directory that holds this plugin.
std::string plugin_directory();

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_STATE_H
