// Pages of shared memory over memory nodes. "numa_pages NODE.." maps some and spreads them over these nodes, and prints
// which policy they have before and after, and where one lies. "numa_pages under ROOT" prints the nodes that they would
// be spread over on that machine, without a memory policy of the process and with one.
// tests/session/test_usable_cpus.py compiles and runs it.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

#include "numa.h"

namespace {

constexpr unsigned long of_address = 2, as_node = 1; // MPOL_F_ADDR, MPOL_F_NODE
const char * const policies[] = {"default", "preferred", "bind", "interleave", "local"};

int told(void * address, unsigned long flags) {
    int value = -1;
    return syscall(SYS_get_mempolicy, &value, nullptr, 0ul, address, flags) == 0 ? value : -1;
}

void print_nodes(const char * root) {
    for (const int node : tb::nodes_to_spread(root))
        std::printf("%d ", node);
    std::puts("");
}

} // namespace

int main(int argc, char ** argv) {
    if (argc == 3 && std::strcmp(argv[1], "under") == 0) {
        print_nodes(argv[2]);
        constexpr unsigned long interleave = 3, first_node = 1;
        if (syscall(SYS_set_mempolicy, interleave, &first_node, 64ul) != 0) return 2;
        std::printf("with a policy: ");
        std::fflush(stdout);
        print_nodes(argv[2]);
        return 0;
    }
    std::vector<int> nodes;
    for (int i = 1; i < argc; ++i) {
        nodes.push_back(std::atoi(argv[i]));
    }
    constexpr size_t size = size_t{1} << 20;
    const int file = memfd_create("pages", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, size) != 0) return 2;
    auto * base = static_cast<char *>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
    if (base == MAP_FAILED) return 2;
    const int before = told(base, of_address);
    std::printf("%s\n", before < 0 || before > 4 ? "refused" : policies[before]);
    if (!tb::spread_pages(base, size, nodes)) {
        std::puts("refused");
        return 0;
    }
    std::puts("spread");
    base[0] = 1;
    const int after = told(base, of_address);
    std::printf("%s, page on node %d\n", after < 0 || after > 4 ? "refused" : policies[after],
                told(base, of_address | as_node));
    return 0;
}
