// The CPUs that threads run on: what of the thread pool's knowledge comes from the operating system.
#ifndef TILEBEAM_BASE_CPUS_H
#define TILEBEAM_BASE_CPUS_H

#include <cstdint>
#include <pthread.h>
#include <string>
#include <vector>

namespace tb {

// What the system grants this process of the machine's CPUs.
struct cpu_limits {
    int cpus = 1;              // of its affinity mask and its cpuset
    int cores = 1;             // that these belong to: the CPUs of one core share its arithmetic units
    int performance_cores = 1; // of them; all, if it may use efficiency cores only
    double quota = 0;          // CPUs' worth of time that its control groups leave it; 0: no limit
    std::vector<int> nodes;    // of memory (NUMA) that it may use and that these CPUs belong to; none: unknown

    // Threads that can run at the same time, and those that each have a performance core, which are started where
    // nobody says how many. A part of a CPU counts as one.
    int usable_cpus() const { return within_quota(cpus); }
    int default_threads() const { return within_quota(performance_cores); }

  private:
    int within_quota(int n) const;
};

// `root`: where proc/ and sys/ are, for tests. Of the real ones the files are read once: tilebeam-npud opens none later
// on. The affinity mask is asked for each time.
cpu_limits limits_of_cpus(const std::string & root = "");

// Of this process; at least 1.
int usable_cpus();
int default_threads();

// The CPU of the calling thread, -1 if unknown.
int current_cpu();

// The calling thread is number `own` of `n` that run on these CPUs (-1: unknown). If it shares its CPU with one of
// them, or its core with one before it, or is on an efficiency core, it goes to a core that none of them uses: a
// performance core, or, from a shared one, any; if there is none and it shares its CPU, to a CPU that none of them
// uses. It is not bound to it from then on. True if it went.
bool move_apart(const int * running_on, int n, int own);

// Where it goes from `cpu` on the machine under `root`, all of these equally good; none: it stays. For tests.
std::vector<int> apart_from(const std::vector<int> & running_on, int own, int cpu, const std::string & root);

// A thread's clock of CPU time, readable by others for as long as it lives; no_cpu_clock if there is none.
using cpu_clock = int64_t;
constexpr cpu_clock no_cpu_clock = INT64_MIN;
cpu_clock cpu_clock_of(pthread_t thread);
cpu_clock own_cpu_clock();

// Nanoseconds. Of no_cpu_clock what a thread that always runs would have used: time itself.
int64_t cpu_time_ns(cpu_clock clock);

} // namespace tb

#endif // TILEBEAM_BASE_CPUS_H
