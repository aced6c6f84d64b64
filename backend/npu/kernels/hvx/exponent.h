// exp2 of 64 FP16 numbers by one vgather from the 64 KiB table (the paper, section 5.2.1).
#ifndef TILEBEAM_NPU_KERNELS_HVX_EXPONENT_H
#define TILEBEAM_NPU_KERNELS_HVX_EXPONENT_H

#include "kernels/hvx/hvx.h"

namespace tb::npu::hvx {

// A table that vgather can read: on a device it and the destinations of the gathers must be in VTCM.
constexpr uint32_t exp2_table_bytes = 65536;

// Non-positive inputs (the sign is not looked at) to `out`, 128-byte aligned. Shifting left by one drops the sign and
// makes a byte offset of what is left.
inline void exp2_gather(const uint16_t * table, HVX_Vector x, void * out) {
    Q6_vgather_ARMVh(static_cast<HVX_Vector *>(out), reinterpret_cast<intptr_t>(table),
                     static_cast<int32_t>(exp2_table_bytes - 1), Q6_Vh_vasl_VhR(x, 1));
}

// The same for n vectors: the inner loop of the softmax on its own.
void exp2_vectors(const uint16_t * table, const uint16_t * x, uint32_t n, uint16_t * out);

} // namespace tb::npu::hvx

#endif // TILEBEAM_NPU_KERNELS_HVX_EXPONENT_H
