// A range of a buffer as its session sees it. A session's address space is limited, so a buffer need not be mapped
// whole.
#ifndef TILEBEAM_PLUGIN_WINDOW_H
#define TILEBEAM_PLUGIN_WINDOW_H

#include <cstdint>
#include <memory>
#include <string>

#include "types.h"

namespace tb::plugin {

// The file behind a buffer, and where the buffer begins in it.
struct backing {
    int fd = -1;
    uint64_t offset = 0;
    bool writable = false;
};

class window {
  public:
    // Map bytes [first, last) of the buffer. nullptr: `why` says what went wrong, and what to do if it was the limit.
    static std::unique_ptr<window> open(int device, const session_ptr & session, const backing & file, uint64_t first,
                                        uint64_t last, std::string & why);
    ~window(); // unmaps; a dead session has forgotten it already
    window(const window &) = delete;
    window & operator=(const window &) = delete;

    bool covers(uint64_t a, uint64_t b) const { return first <= a && b <= last; }
    // Do the pages of [a, b) touch or overlap this window's?
    bool touches(const backing & file, uint64_t a, uint64_t b) const;
    // Byte `at` of the buffer, from the start of what the NPU has mapped.
    uint64_t npu_offset(uint64_t at) const { return at - first + lead; }
    uint64_t pages_bytes() const; // address space it takes

    const session_ptr session;
    const uint64_t first, last;
    uint32_t id = 0; // of the NPU's mapping

  private:
    window(session_ptr session, uint64_t first, uint64_t last);
    uint64_t lead = 0; // mappings begin on a page
};

// Address space that live windows take in this session.
uint64_t mapped_in(const tb::session::session * session);

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_WINDOW_H
