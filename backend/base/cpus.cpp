// See cpus.h. Linux.
#include "cpus.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iterator>
#include <map>
#include <sched.h>
#include <set>
#include <unistd.h>

#include "control_groups.h"
#include "wait.h"

namespace tb {

namespace {

using cpu_list = std::vector<int>; // in order

constexpr int most_cpus = 65536;
constexpr uint64_t most_speed = 100000000; // kHz; what is more is no such number

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

// What the process may use, by the key of the list.
cpu_list listed_under(const std::string & root, const std::string & key) {
    for (const std::string & line : lines_of(root + "/proc/self/status")) {
        if (line.compare(0, key.size(), key) == 0) return parse_list(line.substr(key.size()));
    }
    return {};
}

// The affinity mask as a file tells it.
cpu_list affinity_under(const std::string & root) { return listed_under(root, "Cpus_allowed_list:"); }

// What files tell.
struct machine {
    double quota = 0;              // as in cpu_limits
    cpu_list cpuset;               // of the process's group; empty: unknown
    std::vector<int> cores;        // by CPU: the first CPU of its core, -1 if unknown
    cpu_list slow;                 // those of efficiency cores
    std::map<int, cpu_list> nodes; // of memory, that the process may use: their CPUs

    explicit machine(const std::string & root) {
        read_quota(root);
        const strings names = {"/cpuset.cpus.effective", "/cpuset.effective_cpus", "/cpuset.cpus"};
        for (const control_group & group : control_groups("cpuset", root)) {
            for (const std::string & name : names) {
                if (cpuset.empty()) cpuset = list_in(group.folder + name);
            }
        }
        read_cores(root + "/sys/devices/system/cpu");
        read_speeds(root);
        for (const int node : listed_under(root, "Mems_allowed_list:")) {
            nodes[node] = list_in(root + "/sys/devices/system/node/node" + std::to_string(node) + "/cpulist");
        }
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

    // Efficiency cores: what the system calls so (Intel's), and what is not half as fast as the fastest, by the
    // scheduler's measure (1024 is the fastest CPU; ARM's little cores have 160 to 450) or by the highest clock. Cores
    // between, which Zen 5c's and the middle ones of phones are, count as the fast ones do.
    void read_speeds(const std::string & root) {
        const std::string folder = root + "/sys/devices/system/cpu";
        slow = list_in(root + "/sys/devices/cpu_atom/cpus");
        for (const char * file : {"/cpu_capacity", "/cpufreq/cpuinfo_max_freq"}) {
            std::map<int, uint64_t> speeds;
            uint64_t fastest = 0;
            for (const int cpu : list_in(folder + "/present")) {
                uint64_t speed = 0;
                if (read_number(folder + "/cpu" + std::to_string(cpu) + file, speed) && speed != 0 &&
                    speed <= most_speed) {
                    speeds[cpu] = speed;
                    fastest = std::max(fastest, speed);
                }
            }
            for (const auto & [cpu, speed] : speeds) {
                if (speed < fastest / 2) slow.push_back(cpu);
            }
        }
        std::sort(slow.begin(), slow.end());
    }

    bool is_slow(int cpu) const { return std::binary_search(slow.begin(), slow.end(), cpu); }

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

cpu_limits limits_on(const machine & m, const cpu_list & allowed) {
    cpu_list cpus;
    std::set_intersection(allowed.begin(), allowed.end(), m.cpuset.begin(), m.cpuset.end(), std::back_inserter(cpus));
    if (cpus.empty()) {
        cpus = allowed;
    }
    std::set<int> cores;
    std::set<int> fast;
    for (const int cpu : cpus) {
        cores.insert(m.core_of(cpu));
        if (!m.is_slow(cpu)) fast.insert(m.core_of(cpu));
    }
    cpu_limits limits;
    limits.cpus = std::max(1, static_cast<int>(cpus.size()));
    limits.cores = std::max(1, static_cast<int>(cores.size()));
    limits.performance_cores = fast.empty() ? limits.cores : static_cast<int>(fast.size());
    limits.quota = m.quota;
    for (const auto & [node, of] : m.nodes) {
        const auto is_usable = [&](int cpu) { return std::binary_search(cpus.begin(), cpus.end(), cpu); };
        if (std::any_of(of.begin(), of.end(), is_usable)) limits.nodes.push_back(node);
    }
    return limits;
}

enum class sharing { none, slow_core, core, cpu };

// What thread `own`, on `cpu`, shares with the others; a core only with those before it, so that one of two stays. Who
// shares none may be on an efficiency core.
sharing shared_with(const machine & m, const int * running_on, int n, int own, int cpu) {
    sharing found = m.is_slow(cpu) ? sharing::slow_core : sharing::none;
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

// Leaves of the allowed CPUs those of cores that none of the threads uses, of performance cores if there are such; if
// there are none and one shares its CPU, those that none of them uses. False if nothing is left. Without memory:
// threads at work call it.
bool leave_free(const machine & m, const int * running_on, int n, sharing shared, cpu_set_t & allowed) {
    cpu_set_t cpus = allowed;
    cpu_set_t cores = allowed;
    for (int i = 0; i < n; ++i) {
        for (int cpu = 0; running_on[i] >= 0 && cpu < CPU_SETSIZE; ++cpu) {
            if (cpu == running_on[i]) CPU_CLR(cpu, &cpus);
            if (m.core_of(cpu) == m.core_of(running_on[i])) CPU_CLR(cpu, &cores);
        }
    }
    cpu_set_t fast = cores;
    for (const int cpu : m.slow) {
        if (cpu < CPU_SETSIZE) CPU_CLR(cpu, &fast);
    }
    if (CPU_COUNT(&fast) != 0 || shared == sharing::slow_core) {
        allowed = fast;
    } else {
        allowed = CPU_COUNT(&cores) != 0 || shared == sharing::core ? cores : cpus;
    }
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

int default_threads() { return limits_of_cpus().default_threads(); }

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
