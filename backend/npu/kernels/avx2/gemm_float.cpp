// Float GEMM on AVX2: the shared kernels over 8 lanes.
#include "kernels/avx2/simd.h"

#include "kernels/gemm_float_simd.h"

namespace tb::npu {

namespace {

struct unit : simd {
    static constexpr int registers = 16;
    static vec load_bf16(const uint8_t * p) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
};

constexpr int rows = panel_shape<unit>.rows;
static_assert(rows == 6 && panel_shape<unit>.vectors * unit::width == 16, "the kernel's name");

} // namespace

void fill_gemm_avx2_float(gemm_kernels & k) {
    k.f32 = {"gemm_f32_6x16_avx2", rows, float_panel<unit, rows>};
    k.dot[gemm_f32] = {"gemm_f32d_6x2_avx2", 24, dot<unit, element_f32<unit>>};
    k.dot[gemm_f16] = {"gemm_f16d_6x2_avx2", 32, dot<unit, element_f16<unit>>};
    k.dot[gemm_bf16] = {"gemm_bf16d_6x2_avx2", 32, dot<unit, element_bf16<unit>>};
    k.pack = pack<unit>;
}

} // namespace tb::npu
