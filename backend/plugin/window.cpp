// Mapping ranges of buffers into sessions. See window.h.
#include "window.h"

#include <unistd.h>

#include <exception>

namespace tb::plugin {

namespace {

uint64_t page_size() {
    static const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    return page;
}
uint64_t page_floor(uint64_t n) { return n / page_size() * page_size(); }
uint64_t page_ceil(uint64_t n) { return page_floor(n + page_size() - 1); }

} // namespace

window::window(session_ptr s, uint64_t f, uint64_t l) : session(std::move(s)), first(f), last(l) {}

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
            why = device_name(device) + " has " + std::to_string(session->mapped()) + " of its " +
                  std::to_string(limit) + " bytes of address space in use and cannot map " +
                  std::to_string(page_ceil(w->lead + last - first)) +
                  " more: use more devices, a larger memory limit, or a smaller context or batch";
        }
        return nullptr;
    }
    w->is_mapped = true;
    return w;
}

window::~window() {
    if (!is_mapped) return;
    try {
        session->unmap(id);
    } catch (const std::exception &) {
        // No memory for a message: what is mapped stays so until the session ends, and takes address space meanwhile.
    }
}

} // namespace tb::plugin
