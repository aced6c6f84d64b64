// See cpus.h. Linux.
#include "cpus.h"

#include <algorithm>
#include <climits>
#include <cstdio>
#include <ctime>
#include <sched.h>
#include <unistd.h>

#include "wait.h"

namespace tb {

namespace {

int affinity_cpus() {
    // The mask of a machine with more CPUs than cpu_set_t holds needs a larger set.
    for (int cpus = 1024; cpus <= 65536; cpus *= 4) {
        cpu_set_t * set = CPU_ALLOC(cpus);
        if (!set) {
            break;
        }
        const size_t bytes = CPU_ALLOC_SIZE(cpus);
        const bool ok = sched_getaffinity(0, bytes, set) == 0;
        const int count = ok ? CPU_COUNT_S(bytes, set) : 0;
        CPU_FREE(set);
        if (ok) {
            return count;
        }
    }
    return static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
}

// cgroup v2 "quota period" in microseconds, or "max": a container with 2 CPUs' worth of a large machine.
int quota_cpus() {
    FILE * f = std::fopen("/sys/fs/cgroup/cpu.max", "re");
    if (!f) {
        return INT_MAX;
    }
    long quota = 0;
    long period = 0;
    const int fields = std::fscanf(f, "%ld %ld", &quota, &period);
    std::fclose(f);
    if (fields != 2 || quota <= 0 || period <= 0) {
        return INT_MAX;
    }
    return static_cast<int>(std::min<long>((quota + period - 1) / period, INT_MAX));
}

} // namespace

// The quota is read once: tilebeam-npud opens no files later on.
int usable_cpus() {
    static const int quota = quota_cpus();
    return std::max(1, std::min(affinity_cpus(), quota));
}

int current_cpu() { return sched_getcpu(); }

bool leave_for_free_cpu(const int * taken, int n) {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) {
        return false;
    }
    cpu_set_t free = allowed;
    for (int i = 0; i < n; ++i) {
        if (taken[i] >= 0 && taken[i] < CPU_SETSIZE) {
            CPU_CLR(taken[i], &free);
        }
    }
    if (CPU_COUNT(&free) == 0 || sched_setaffinity(0, sizeof free, &free) != 0) {
        return false;
    }
    sched_setaffinity(0, sizeof allowed, &allowed);
    return true;
}

cpu_clock cpu_clock_of(pthread_t thread) {
    clockid_t clock;
    return pthread_getcpuclockid(thread, &clock) == 0 ? cpu_clock{clock} : no_cpu_clock;
}

cpu_clock own_cpu_clock() { return cpu_clock_of(pthread_self()); }

int64_t cpu_time_ns(cpu_clock clock) {
    timespec ts;
    if (clock == no_cpu_clock || clock_gettime(static_cast<clockid_t>(clock), &ts) != 0) {
        return now_ns();
    }
    return static_cast<int64_t>(ts.tv_sec) * 1000000000 + ts.tv_nsec;
}

} // namespace tb
