// The CPUs that threads run on: what of the thread pool's knowledge comes from the operating system.
#ifndef TILEBEAM_BASE_CPUS_H
#define TILEBEAM_BASE_CPUS_H

#include <cstdint>
#include <pthread.h>

namespace tb {

// CPUs this process may use: its affinity mask, capped by a cgroup CPU quota. At least 1.
int usable_cpus();

// The CPU of the calling thread, -1 if unknown.
int current_cpu();

// Go to a CPU that is not one of the `n` taken ones, without being bound to it from then on. False if there is none.
bool leave_for_free_cpu(const int * taken, int n);

// A thread's clock of CPU time, readable by others for as long as it lives; no_cpu_clock if there is none.
using cpu_clock = int64_t;
constexpr cpu_clock no_cpu_clock = INT64_MIN;
cpu_clock cpu_clock_of(pthread_t thread);
cpu_clock own_cpu_clock();

// Nanoseconds. Of no_cpu_clock what a thread that always runs would have used: time itself.
int64_t cpu_time_ns(cpu_clock clock);

} // namespace tb

#endif // TILEBEAM_BASE_CPUS_H
