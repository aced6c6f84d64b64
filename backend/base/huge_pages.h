// Shared mappings that huge pages can back: weights stream through the TLB once per token, and with 4 KiB pages that
// costs an eighth of the bandwidth. Where the system has none, everything works as without.
#ifndef TILEBEAM_BASE_HUGE_PAGES_H
#define TILEBEAM_BASE_HUGE_PAGES_H

#include <cstddef>
#include <cstdint>
#include <sys/mman.h>
#include <unistd.h>

#include "numa.h"

namespace tb {

constexpr size_t huge_page = size_t{2} << 20;

// mmap(MAP_SHARED) of a file. Address and offset have the same remainder by the size of a huge page, which is what lets
// one be mapped whole.
inline void * map_shared(int fd, uint64_t offset, size_t size, int protection) {
#if UINTPTR_MAX > UINT32_MAX // room for it
    if (size >= huge_page && size <= SIZE_MAX - huge_page) {
        void * reserved =
            mmap(nullptr, size + huge_page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (reserved != MAP_FAILED) {
            uint8_t * start = static_cast<uint8_t *>(reserved);
            const size_t skip = (offset - reinterpret_cast<uintptr_t>(start)) % huge_page;
            void * base = mmap(start + skip, size, protection, MAP_SHARED | MAP_FIXED, fd, static_cast<off_t>(offset));
            if (base == MAP_FAILED) {
                munmap(reserved, size + huge_page);
                return MAP_FAILED;
            }
            const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
            const size_t end = (skip + size + page - 1) / page * page;
            if (skip > 0) munmap(start, skip);
            if (end < size + huge_page) munmap(start + end, size + huge_page - end);
            return base;
        }
    }
#endif
    return mmap(nullptr, size, protection, MAP_SHARED, fd, static_cast<off_t>(offset));
}

// Back shared memory that will be filled soon with huge pages now, whatever the system does by itself (most leave that
// off); what is there already stays. Refused by kernels before 6.1 and where memory is short: false then.
inline bool use_huge_pages(void * base, size_t size) {
#if defined(__linux__) && UINTPTR_MAX > UINT32_MAX
#    ifdef MADV_COLLAPSE
    constexpr int collapse = MADV_COLLAPSE;
#    else
    constexpr int collapse = 25;
#    endif
    uint8_t * start = static_cast<uint8_t *>(base);
    size_t at = (huge_page - reinterpret_cast<uintptr_t>(base) % huge_page) % huge_page;
    // A huge page is put on the node of the page that is there before, and pages go around the nodes by their number in
    // the file: the first one of every huge page would often be on the same node.
    const size_t nodes = nodes_to_spread().size(), page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const auto first_on_next = [&](size_t i) {
        return nodes < 2 ? 0 : i * (nodes + 1 - huge_page / page % nodes) % nodes;
    };
    const size_t number = reinterpret_cast<uintptr_t>(base) / huge_page; // of those in memory, whoever asks for them
    for (; at + huge_page <= size; at += huge_page) {
        // A range without any page is refused.
        static_cast<void>(static_cast<volatile uint8_t *>(start)[at + first_on_next(number + at / huge_page) * page]);
        if (madvise(start + at, huge_page, collapse) != 0) return false;
    }
    return true;
#else
    static_cast<void>(base), static_cast<void>(size);
    return false;
#endif
}

} // namespace tb

#endif // TILEBEAM_BASE_HUGE_PAGES_H
