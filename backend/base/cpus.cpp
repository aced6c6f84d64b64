// See cpus.h. Linux.
#include "cpus.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iterator>
#include <sched.h>
#include <unistd.h>

#include "control_groups.h"
#include "wait.h"

namespace tb {

namespace {

using cpu_list = std::vector<int>; // in order

constexpr int most_cpus = 65536;

// "0-3,8"; none of what is no such list.
cpu_list parse_list(const std::string & text) {
    cpu_list cpus;
    for (const std::string & part : split(text, ',')) {
        char * end = nullptr;
        const long first = std::strtol(part.c_str(), &end, 10);
        if (end == part.c_str()) {
            return {};
        }
        const long last = *end == '-' ? std::strtol(end + 1, nullptr, 10) : first;
        if (first < 0 || last < first || last >= most_cpus) {
            return {};
        }
        for (long cpu = first; cpu <= last; ++cpu) {
            cpus.push_back(static_cast<int>(cpu));
        }
    }
    std::sort(cpus.begin(), cpus.end());
    return cpus;
}

cpu_list list_in(const std::string & path) {
    const strings lines = lines_of(path);
    return lines.empty() ? cpu_list() : parse_list(lines[0]);
}

cpu_list affinity() {
    cpu_list cpus;
    // The mask of a machine with more CPUs than cpu_set_t holds needs a larger set.
    for (int n = 1024; n <= most_cpus && cpus.empty(); n *= 4) {
        cpu_set_t * set = CPU_ALLOC(n);
        const size_t bytes = CPU_ALLOC_SIZE(n);
        if (set && sched_getaffinity(0, bytes, set) == 0) {
            for (int cpu = 0; cpu < n; ++cpu) {
                if (CPU_ISSET_S(cpu, bytes, set)) cpus.push_back(cpu);
            }
        }
        CPU_FREE(set);
    }
    for (int cpu = 0; cpus.empty() && cpu < sysconf(_SC_NPROCESSORS_ONLN); ++cpu) {
        cpus.push_back(cpu);
    }
    return cpus;
}

// What files tell.
struct machine {
    double quota = 0;       // as in cpu_limits
    cpu_list cpuset;        // of the process's group; empty: unknown
    std::vector<int> cores; // by CPU: the first CPU of its core, -1 if unknown

    explicit machine(const std::string & root) {
        read_quota(root);
        const strings names = {"/cpuset.cpus.effective", "/cpuset.effective_cpus", "/cpuset.cpus"};
        for (const control_group & group : control_groups("cpuset", root)) {
            for (const std::string & name : names) {
                if (cpuset.empty()) cpuset = list_in(group.folder + name);
            }
        }
        read_cores(root + "/sys/devices/system/cpu");
    }

    // The tightest of all groups. Microseconds of CPU time in a period of so many.
    void read_quota(const std::string & root) {
        for (const control_group & group : control_groups("cpu", root)) {
            double time = 0;
            double period = 0;
            if (group.is_v2) {
                std::ifstream(group.folder + "/cpu.max") >> time >> period; // "max 100000": neither
            } else {
                std::ifstream(group.folder + "/cpu.cfs_quota_us") >> time; // -1: no limit
                std::ifstream(group.folder + "/cpu.cfs_period_us") >> period;
            }
            if (time > 0 && period > 0) {
                quota = quota > 0 ? std::min(quota, time / period) : time / period;
            }
        }
    }

    void read_cores(const std::string & folder) {
        for (const int cpu : list_in(folder + "/present")) {
            if (core_of(cpu) != cpu) {
                continue; // with one before it
            }
            const std::string topology = folder + "/cpu" + std::to_string(cpu) + "/topology/";
            cpu_list siblings = list_in(topology + "core_cpus_list");
            if (siblings.empty()) {
                siblings = list_in(topology + "thread_siblings_list"); // what Linux before 5.3 calls it
            }
            for (const int sibling : siblings) {
                if (cores.size() <= static_cast<size_t>(sibling)) cores.resize(static_cast<size_t>(sibling) + 1, -1);
                cores[static_cast<size_t>(sibling)] = cpu;
            }
        }
    }

    // A CPU of which nothing is known has a core of its own.
    int core_of(int cpu) const {
        const int core = static_cast<size_t>(cpu) < cores.size() ? cores[static_cast<size_t>(cpu)] : -1;
        return core < 0 ? cpu : core;
    }
};

const machine & this_machine() {
    static const machine m("");
    return m;
}

// The affinity mask as a file tells it.
cpu_list affinity_under(const std::string & root) {
    const std::string key = "Cpus_allowed_list:";
    for (const std::string & line : lines_of(root + "/proc/self/status")) {
        if (line.compare(0, key.size(), key) == 0) return parse_list(line.substr(key.size()));
    }
    return {};
}

cpu_limits limits_on(const machine & m, const cpu_list & allowed) {
    cpu_list cpus;
    std::set_intersection(allowed.begin(), allowed.end(), m.cpuset.begin(), m.cpuset.end(), std::back_inserter(cpus));
    if (cpus.empty()) {
        cpus = allowed;
    }
    cpu_list cores;
    for (const int cpu : cpus) {
        cores.push_back(m.core_of(cpu));
    }
    std::sort(cores.begin(), cores.end());
    const auto n_cores = std::unique(cores.begin(), cores.end()) - cores.begin();
    return {std::max(1, static_cast<int>(cpus.size())), std::max(1, static_cast<int>(n_cores)), m.quota};
}

enum class sharing { none, core, cpu };

// What thread `own`, on `cpu`, shares with the others; a core only with those before it, so that one of two stays.
sharing shared_with(const machine & m, const int * running_on, int n, int own, int cpu) {
    sharing found = sharing::none;
    for (int i = 0; i < n; ++i) {
        if (i == own || running_on[i] < 0) {
            continue;
        }
        if (running_on[i] == cpu) {
            return sharing::cpu;
        }
        if (i < own && m.core_of(running_on[i]) == m.core_of(cpu)) {
            found = sharing::core;
        }
    }
    return found;
}

// Leaves of the allowed CPUs those of cores that none of the threads uses; if there are none and one shares its CPU,
// those that none of them uses. False if nothing is left. Without memory: threads at work call it.
bool leave_free(const machine & m, const int * running_on, int n, sharing shared, cpu_set_t & allowed) {
    cpu_set_t cpus = allowed;
    cpu_set_t cores = allowed;
    for (int i = 0; i < n; ++i) {
        for (int cpu = 0; running_on[i] >= 0 && cpu < CPU_SETSIZE; ++cpu) {
            if (cpu == running_on[i]) CPU_CLR(cpu, &cpus);
            if (m.core_of(cpu) == m.core_of(running_on[i])) CPU_CLR(cpu, &cores);
        }
    }
    allowed = CPU_COUNT(&cores) != 0 || shared == sharing::core ? cores : cpus;
    return CPU_COUNT(&allowed) != 0;
}

} // namespace

int cpu_limits::within_quota(int n) const {
    return quota > 0 && quota < n ? std::max(1, static_cast<int>(std::ceil(quota))) : n;
}

cpu_limits limits_of_cpus(const std::string & root) {
    return root.empty() ? limits_on(this_machine(), affinity()) : limits_on(machine(root), affinity_under(root));
}

int usable_cpus() { return limits_of_cpus().usable_cpus(); }

int usable_cores() { return limits_of_cpus().usable_cores(); }

int current_cpu() { return sched_getcpu(); }

bool move_apart(const int * running_on, int n, int own) {
    const machine & m = this_machine();
    const int cpu = current_cpu();
    const sharing shared = cpu < 0 ? sharing::none : shared_with(m, running_on, n, own, cpu);
    cpu_set_t allowed;
    // Nearly always nothing is shared, which takes no system call to see.
    if (shared == sharing::none || sched_getaffinity(0, sizeof allowed, &allowed) != 0) {
        return false;
    }
    cpu_set_t free = allowed;
    if (!leave_free(m, running_on, n, shared, free) || sched_setaffinity(0, sizeof free, &free) != 0) {
        return false;
    }
    sched_setaffinity(0, sizeof allowed, &allowed);
    return true;
}

std::vector<int> apart_from(const std::vector<int> & running_on, int own, int cpu, const std::string & root) {
    const machine m(root);
    const int n = static_cast<int>(running_on.size());
    const sharing shared = shared_with(m, running_on.data(), n, own, cpu);
    cpu_set_t free;
    CPU_ZERO(&free);
    for (const int allowed : affinity_under(root)) {
        CPU_SET(allowed, &free);
    }
    cpu_list cpus;
    if (shared == sharing::none || !leave_free(m, running_on.data(), n, shared, free)) {
        return cpus;
    }
    for (int i = 0; i < CPU_SETSIZE; ++i) {
        if (CPU_ISSET(i, &free)) cpus.push_back(i);
    }
    return cpus;
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
