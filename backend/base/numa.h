// Machines with several memory nodes (NUMA). Threads of all nodes read all weights, so these lie on all nodes, page by
// page: each node's memory then carries its part. Without this they lie where the thread ran that wrote them, and all
// CPUs wait for that node's memory.
#ifndef TILEBEAM_BASE_NUMA_H
#define TILEBEAM_BASE_NUMA_H

#include <cstddef>
#include <string>
#include <vector>

namespace tb {

// The nodes that pages are spread over: those that this process may use and has CPUs on (cpu_limits.nodes). None if
// there are fewer than two, or if the process was started with a memory policy (numactl), which then holds. `root`:
// where proc/ and sys/ are, for tests.
std::vector<int> nodes_to_spread(const std::string & root = "");

// Spreads the pages of a mapping, which nobody has touched yet, over these nodes; of shared memory whoever touches
// them. False if the system refuses; then they are where they would be without.
bool spread_pages(void * base, size_t size, const std::vector<int> & nodes);

} // namespace tb

#endif // TILEBEAM_BASE_NUMA_H
