// Memory that this process can have: the machine's, or what a control group (a container's, a service's) leaves of it.
#ifndef TILEBEAM_BASE_USABLE_MEMORY_H
#define TILEBEAM_BASE_USABLE_MEMORY_H

#include <cstdint>
#include <string>

namespace tb {

// Bytes.
struct memory_size {
    uint64_t total = 0;
    uint64_t available = 0; // without swapping, as the kernel estimates; files in the page cache can be had back
    uint64_t with_swap = 0; // before the kernel ends processes
};

// The smallest of the machine's and those of the process's control groups, versions 1 and 2, and of all groups above
// them. `root`: where proc/ and sys/ are, for tests.
memory_size usable_memory(const std::string & root = "");

} // namespace tb

#endif // TILEBEAM_BASE_USABLE_MEMORY_H
