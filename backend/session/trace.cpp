// See trace.h.
#include "trace.h"

#include <algorithm>
#include <sys/syscall.h>
#include <unistd.h>

namespace tb::session {

trace & trace::get() {
    static trace * const the = new trace;
    return *the;
}

void trace::start(uint64_t most_records) {
    std::lock_guard<fork_lock> hold(lock);
    records.clear();
    most = most_records;
    n_lost = 0;
    n_damaged = 0;
    active.store(true, std::memory_order_relaxed);
}

void trace::stop() { active.store(false, std::memory_order_relaxed); }

void trace::span(tb_span kind, int64_t begin, int64_t end, uint32_t session, uint32_t seq, uint32_t code,
                 uint32_t n_ops) {
    if (!on()) {
        return;
    }
    tb_trace_record r{};
    r.begin_ns = static_cast<uint64_t>(begin);
    r.end_ns = static_cast<uint64_t>(end);
    r.span = kind;
    r.session = session;
    r.lane = static_cast<uint32_t>(syscall(SYS_gettid));
    r.seq = seq;
    r.code = code;
    r.index = n_ops;
    add({r});
}

void trace::add(const std::vector<tb_trace_record> & more) {
    std::lock_guard<fork_lock> hold(lock);
    const size_t room = most > records.size() ? static_cast<size_t>(most) - records.size() : 0;
    const size_t n = std::min(room, more.size());
    records.insert(records.end(), more.begin(), more.begin() + static_cast<ptrdiff_t>(n));
    n_lost += more.size() - n;
}

void trace::note_losses(uint64_t lost, uint64_t damaged) {
    std::lock_guard<fork_lock> hold(lock);
    n_lost += lost;
    n_damaged += damaged;
}

uint64_t trace::take(tb_trace_record * out, uint64_t n) {
    std::lock_guard<fork_lock> hold(lock);
    const size_t taken = static_cast<size_t>(std::min<uint64_t>(n, records.size()));
    std::copy_n(records.begin(), taken, out);
    records.erase(records.begin(), records.begin() + static_cast<ptrdiff_t>(taken));
    return taken;
}

void trace::losses(uint64_t * lost, uint64_t * damaged) {
    std::lock_guard<fork_lock> hold(lock);
    *lost = n_lost;
    *damaged = n_damaged;
}

} // namespace tb::session
