// AVX-VNNI, vpdpbusd on 256 bits, behind the names that kernels/gemm_vnni.h and kernels/gemm_k.h use. Internal linkage,
// see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_AVXVNNI_UNIT_H
#define TILEBEAM_NPU_KERNELS_AVXVNNI_UNIT_H

#include "kernels/avx2/lanes.h"
#include "kernels/gemm.h"

namespace tb::npu {
namespace {

struct unit : lanes {
    static constexpr int vectors = 1; // of weights at once: half of the registers

    // Unsigned `w` times signed `x`, four products a lane.
    static void dot(ints & sum, ints w, ints x) { sum = _mm256_dpbusd_avx_epi32(sum, w, x); }
};

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_AVXVNNI_UNIT_H
