// GEMM with types of 256 k on vpdpbusd of 512 bits.
#include "kernels/gemm_k.h"

#include "kernels/avx512vnni/unit.h"

namespace tb::npu {

namespace {

struct k_unit : unit {
    static constexpr bool signed_weights = false;
    static constexpr bool starts = true;
    static void dot(ints & sum, ints w, ints x) { sum = _mm512_dpbusd_epi32(sum, w, x); }
    template <class Format>
    static void block(const uint8_t * panel, const uint8_t * scales, const k_record & r, int rows,
                      int32_t (*sums)[gemm_panel]) {
        k_block_of_dots<k_unit, Format>(panel, scales, r, rows, sums);
    }
};

} // namespace

void fill_gemm_avx512vnni_k(gemm_kernels & k) { fill_k_kernels<k_unit>(k, TILEBEAM_K_NAMES("32x32_avx512vnni")); }

} // namespace tb::npu
