// Mapping ranges of buffers into sessions. See window.h.
#include "window.h"

#include <unistd.h>

#include <exception>
#include <mutex>
#include <set>

#include "fork.h"

namespace tb::plugin {

namespace {

// All mapped windows. Never destroyed: see state::get().
fork_lock & windows_lock() {
    static auto * const m = new fork_lock;
    return *m;
}
std::set<const window *> & windows() {
    static auto * const all = new std::set<const window *>;
    return *all;
}

uint64_t page_size() {
    static const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    return page;
}
uint64_t page_floor(uint64_t n) { return n / page_size() * page_size(); }
uint64_t page_ceil(uint64_t n) { return page_floor(n + page_size() - 1); }

} // namespace

window::window(session_ptr s, uint64_t f, uint64_t l) : session(std::move(s)), first(f), last(l) {}

uint64_t window::pages_bytes() const { return page_ceil(lead + last - first); }

bool window::touches(const backing & file, uint64_t a, uint64_t b) const {
    return page_floor(file.offset + a) <= page_ceil(file.offset + last) &&
           page_ceil(file.offset + b) >= page_floor(file.offset + first);
}

std::unique_ptr<window> window::open(int device, const session_ptr & session, const backing & file, uint64_t first,
                                     uint64_t last, std::string & why) {
    std::unique_ptr<window> w(new window(session, first, last));
    w->lead = (file.offset + first) % page_size();
    const uint64_t begin = file.offset + first - w->lead;
    const tb::session::result r = session->map(file.fd, begin, w->lead + last - first, file.writable, &w->id);
    if (!r.ok()) {
        const uint64_t limit = session->opts().memory_limit;
        why = r.why;
        if (r.status == TB_E_NOMEM && limit != 0) {
            why = device_name(device) + " has " + std::to_string(mapped_in(session.get())) + " of its " +
                  std::to_string(limit) + " bytes of address space in use and cannot map " +
                  std::to_string(w->pages_bytes()) +
                  " more: use more devices, a larger memory limit, or a smaller context or batch";
        }
        return nullptr;
    }
    std::lock_guard<fork_lock> hold(windows_lock());
    windows().insert(w.get());
    return w;
}

window::~window() {
    {
        std::lock_guard<fork_lock> hold(windows_lock());
        if (windows().erase(this) == 0) return; // never mapped
    }
    try {
        session->unmap(id);
    } catch (const std::exception &) {
        // No memory for a message: what is mapped stays so until the session ends, and takes address space meanwhile.
    }
}

uint64_t mapped_in(const tb::session::session * session) {
    std::lock_guard<fork_lock> hold(windows_lock());
    uint64_t bytes = 0;
    for (const window * w : windows())
        if (w->session.get() == session) bytes += w->pages_bytes();
    return bytes;
}

} // namespace tb::plugin
