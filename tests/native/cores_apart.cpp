// Where a worker goes that shares its CPU or core with others: cores_apart ROOT OWN CPU.. prints the CPUs, all equally
// good. ROOT has the files of the machine; thread OWN is one of those that run on these CPUs.
// tests/session/test_usable_cpus.py compiles and runs it.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cpus.h"

int main(int argc, char ** argv) {
    if (argc < 4) {
        return 2;
    }
    std::vector<int> running_on;
    for (int i = 3; i < argc; ++i) {
        running_on.push_back(std::atoi(argv[i]));
    }
    const int own = std::atoi(argv[2]);
    for (const int cpu : tb::apart_from(running_on, own, running_on[static_cast<size_t>(own)], argv[1])) {
        std::printf("%d ", cpu);
    }
    return 0;
}
