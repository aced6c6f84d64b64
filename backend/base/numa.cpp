// See numa.h. Linux; by system calls, since libnuma would be one more library for two of them.
#include "numa.h"

#include <climits>
#include <sys/syscall.h>
#include <unistd.h>

#include "cpus.h"

namespace tb {

namespace {

// linux/mempolicy.h, which not every system has.
constexpr int policy_default = 0, policy_interleave = 3;
constexpr size_t most_nodes = 1024;
constexpr size_t word_bits = sizeof(unsigned long) * CHAR_BIT;

} // namespace

std::vector<int> nodes_to_spread(const std::string & root) {
    std::vector<int> nodes = limits_of_cpus(root).nodes;
    int policy = policy_default;
    if (nodes.size() < 2 || syscall(SYS_get_mempolicy, &policy, nullptr, 0ul, nullptr, 0ul) != 0 ||
        policy != policy_default) {
        return {};
    }
    return nodes;
}

bool spread_pages(void * base, size_t size, const std::vector<int> & nodes) {
    unsigned long mask[most_nodes / word_bits] = {};
    for (const int node : nodes) {
        if (static_cast<size_t>(node) >= most_nodes) return false;
        mask[static_cast<size_t>(node) / word_bits] |= 1ul << static_cast<size_t>(node) % word_bits;
    }
    // The kernel counts one bit less than it is told.
    return syscall(SYS_mbind, base, size, policy_interleave, mask, most_nodes + 1, 0u) == 0;
}

} // namespace tb
