// See usable_memory.h. Linux.
#include "usable_memory.h"

#include <algorithm>
#include <unistd.h>

#include "control_groups.h"

namespace tb {

namespace {

// What the two versions of control groups call the same things.
struct names {
    const char * limit;
    const char * used;
    const char * swap_limit; // of version 1: of memory and swap together
    const char * swap_used;
    strings reclaimable; // lines of memory.stat
};
const names version_1 = {"memory.limit_in_bytes",
                         "memory.usage_in_bytes",
                         "memory.memsw.limit_in_bytes",
                         "memory.memsw.usage_in_bytes",
                         {"total_inactive_file", "total_active_file"}};
const names version_2 = {"memory.max",
                         "memory.current",
                         "memory.swap.max",
                         "memory.swap.current",
                         {"inactive_file", "active_file", "slab_reclaimable"}};

uint64_t left_of(uint64_t limit, uint64_t used) { return limit > used ? limit - used : 0; }

void apply_limit(const control_group & group, uint64_t swap_free, memory_size & memory) {
    const names & of = group.is_v2 ? version_2 : version_1;
    uint64_t limit = 0;
    uint64_t used = 0;
    if (!read_number(group.folder + "/" + of.limit, limit) || !read_number(group.folder + "/" + of.used, used)) {
        return;
    }
    const strings stat = lines_of(group.folder + "/memory.stat");
    uint64_t reclaimable = 0;
    for (const std::string & key : of.reclaimable) {
        reclaimable += number_of(stat, key);
    }
    const uint64_t left = left_of(limit, left_of(used, reclaimable));
    memory.total = std::min(memory.total, limit);
    memory.available = std::min(memory.available, left);
    uint64_t swap_limit = 0;
    uint64_t swap_used = 0;
    uint64_t swap = swap_free;
    if (read_number(group.folder + "/" + of.swap_limit, swap_limit) &&
        read_number(group.folder + "/" + of.swap_used, swap_used)) {
        const uint64_t both = left_of(swap_limit, left_of(swap_used, reclaimable));
        swap = std::min(swap, group.is_v2 ? left_of(swap_limit, swap_used) : left_of(both, left));
    }
    memory.with_swap = std::min(memory.with_swap, left + swap);
}

} // namespace

memory_size usable_memory(const std::string & root) {
    const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    const strings info = lines_of(root + "/proc/meminfo");
    memory_size memory{number_of(info, "MemTotal:") * 1024, number_of(info, "MemAvailable:") * 1024, 0};
    if (memory.total == 0) {
        memory.total = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * page;
    }
    if (memory.available == 0 || memory.available > memory.total) {
        memory.available = static_cast<uint64_t>(sysconf(_SC_AVPHYS_PAGES)) * page;
    }
    const uint64_t swap_free = number_of(info, "SwapFree:") * 1024;
    memory.with_swap = memory.available + swap_free;
    for (const control_group & group : control_groups("memory", root)) {
        apply_limit(group, swap_free, memory);
    }
    return memory;
}

} // namespace tb
