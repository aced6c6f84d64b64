// What all sets' kernels of attention_any_order (kernels/attention.h) share. Internal linkage, see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_ATTENTION_ANY_ORDER_H
#define TILEBEAM_NPU_KERNELS_ATTENTION_ANY_ORDER_H

#include <cstdint>
#include <cstring>

namespace tb::npu {
namespace {

// The sum of numbers from 0 to 1, fewer than 2^23, in units of 2^-40: as integers, which have no order.
inline double sum_in_any_order(int64_t n, const float * x) {
    constexpr double unit = 0x1p-40, base = 0x1.8p12; // whose last bit is the unit
    int64_t sum = 0;
    for (int64_t i = 0; i < n; i++) {
        const double from_base = base + static_cast<double>(x[i]);
        int64_t bits, none;
        std::memcpy(&bits, &from_base, sizeof(bits));
        std::memcpy(&none, &base, sizeof(none));
        sum += bits - none;
    }
    return static_cast<double>(sum) * unit;
}

// A number but 0 with the last of its bits set.
inline double odd(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    bits |= x != 0.0;
    std::memcpy(&x, &bits, sizeof(x));
    return x;
}

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_ATTENTION_ANY_ORDER_H
