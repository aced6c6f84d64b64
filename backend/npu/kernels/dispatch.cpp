// Which kernel sets this CPU can run: the only place that asks.
#include "kernels/kernels.h"

#include <cstring>
#include <iterator>

#if defined(__x86_64__)
#    include <cpuid.h>
#    include <sys/syscall.h>
#    include <unistd.h>
#elif defined(__aarch64__)
#    include <asm/hwcap.h>
#    include <sys/auxv.h>
#endif

namespace tb::npu {

namespace {

#if defined(__x86_64__)

// What CPUID says; zeros where it lacks the leaf.
struct cpuid {
    unsigned a = 0;
    unsigned b = 0;
    unsigned c = 0;
    unsigned d = 0;

    cpuid(unsigned leaf, unsigned subleaf) { __get_cpuid_count(leaf, subleaf, &a, &b, &c, &d); }
};

// __builtin_cpu_supports also asks the operating system (XGETBV) whether it saves the wide registers.
bool has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && (cpuid(1, 0).c & bit_F16C) != 0;
}

// Features of CPUID leaf 7, subleaf 1, whose names GCC 12 does not know here. The registers are those of AVX2 and
// AVX-512, so that the system saves them.
bool has_feature(unsigned bit) { return (cpuid(7, 1).a & 1u << bit) != 0; }

bool has_avxvnni() { return has_avx2() && has_feature(4); }

bool has_avx512vnni() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}

bool has_avx512bf16() { return has_avx512vnni() && has_feature(5); }

// Tiles are large, and Linux (5.16 and later) saves them only for processes that ask, once for all their threads. It
// refuses where a thread's alternate stack for signals is too small for them.
bool may_use_tiles() {
    constexpr long request_permission = 0x1023; // ARCH_REQ_XCOMP_PERM
    constexpr long tile_data = 18;              // XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

bool has_amx() {
    constexpr unsigned instructions = 1u << 24 | 1u << 25; // AMX-TILE, AMX-INT8
    if (!has_avx512bf16() || (cpuid(7, 0).d & instructions) != instructions) {
        return false;
    }
    constexpr unsigned state = 1u << 17 | 1u << 18; // configuration, tiles
    unsigned low = 0;
    unsigned high = 0;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0)); // there, as AVX-512 is
    return (low & state) == state && may_use_tiles();
}

#elif defined(__aarch64__)

bool has_neon() {
    const unsigned long caps = getauxval(AT_HWCAP);
    constexpr unsigned long wanted = HWCAP_ASIMD | HWCAP_ASIMDDP | HWCAP_ASIMDHP;
    return (caps & wanted) == wanted;
}

bool has_i8mm() {
    constexpr unsigned long wanted = 1ul << 13; // HWCAP2_I8MM, which older headers lack
    return has_neon() && (getauxval(AT_HWCAP2) & wanted) != 0;
}

#endif

bool always() { return true; }

struct kernel_set {
    const char * isa;
    bool (*is_here)();
    void (*fill)(kernel_table & t);
};

// All that are compiled in, best first. Room for their tables follows from this list.
constexpr kernel_set compiled[] = {
#if defined(__x86_64__)
    {"amx", has_amx, fill_amx},
    {"avx512bf16", has_avx512bf16, fill_avx512bf16},
    {"avx512vnni", has_avx512vnni, fill_avx512vnni},
    {"avxvnni", has_avxvnni, fill_avxvnni},
    {"avx2", has_avx2, fill_avx2},
#elif defined(__aarch64__)
    {"i8mm", has_i8mm, fill_i8mm},
    {"neon", has_neon, fill_neon},
#elif defined(__hexagon__)
    {"hvx", always, fill_hvx},
#endif
    {"portable", always, fill_portable},
};

struct kernel_sets {
    kernel_table filled[std::size(compiled)];
    const kernel_table * found[std::size(compiled)];
    kernel_list list;

    kernel_sets() : filled{}, found{}, list{found, 0} {
        for (const kernel_set & set : compiled) {
            if (!set.is_here()) {
                continue;
            }
            kernel_table & t = filled[list.n];
            fill_portable(t); // what a faster set does not replace
            if (set.fill != fill_portable) {
                set.fill(t);
            }
            t.isa = set.isa;
            found[list.n++] = &t;
        }
    }
};

} // namespace

const kernel_list & available_kernels() {
    static const kernel_sets sets;
    return sets.list;
}

const kernel_table * find_kernels(const char * isa) {
    const kernel_list & list = available_kernels();
    if (!isa || !*isa) {
        return list.tables[0];
    }
    for (int i = 0; i < list.n; ++i) {
        if (std::strcmp(list.tables[i]->isa, isa) == 0) {
            return list.tables[i];
        }
    }
    return nullptr;
}

} // namespace tb::npu
