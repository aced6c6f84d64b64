// base/cpus.h for Hexagon under qemu: as many threads as the emulator's process may use CPUs. Where they run is the
// host scheduler's affair.
#include "cpus.h"

#include <cstdint>
#include <unistd.h>

#include "runtime/syscall.h"
#include "wait.h"

namespace tb {

int usable_cpus() {
    static uint32_t mask[32]; // 1024 CPUs
    const long bytes = tb_syscall(NR_sched_getaffinity, 0, sizeof mask, reinterpret_cast<long>(mask), 0, 0, 0);
    int n = 0;
    for (long i = 0; i < bytes / static_cast<long>(sizeof mask[0]); ++i) {
        n += __builtin_popcount(mask[i]);
    }
    return n > 0 ? n : 1;
}

int default_threads() { return usable_cpus(); }

int current_cpu() { return -1; }

bool move_apart(const int *, int, int) { return false; }

cpu_clock cpu_clock_of(pthread_t) { return no_cpu_clock; }

cpu_clock own_cpu_clock() { return no_cpu_clock; }

int64_t cpu_time_ns(cpu_clock) { return now_ns(); }

} // namespace tb
