// The CPUs that threads run on: what of the thread pool's knowledge comes from the operating system.
#ifndef TILEBEAM_NPU_CPUS_H
#define TILEBEAM_NPU_CPUS_H

#include <vector>

namespace tb::npu {

// CPUs this process may use: its affinity mask, capped by a cgroup CPU quota. At least 1.
int usable_cpus();

// The CPU of the calling thread, -1 if unknown.
int current_cpu();

// Go to a CPU that is not in `taken`, without being bound to it from then on. False if there is none.
bool leave_for_free_cpu(const std::vector<int> & taken);

} // namespace tb::npu

#endif // TILEBEAM_NPU_CPUS_H
