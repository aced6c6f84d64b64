// Float GEMM on AVX-512: the shared kernels over 16 lanes.
#include "kernels/avx512vnni/simd.h"

#include "kernels/gemm_float_simd.h"

namespace tb::npu {

namespace {

struct unit : simd {
    static constexpr int registers = 32;
    static vec load_bf16(const uint8_t * p) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
};

constexpr int rows = panel_shape<unit>.rows;
static_assert(rows == 14 && panel_shape<unit>.vectors * unit::width == 32, "the kernel's name");

} // namespace

void fill_gemm_avx512vnni_float(gemm_kernels & k) {
    k.f32 = {"gemm_f32_14x32_avx512vnni", rows, float_panel<unit, rows>};
    k.dot[gemm_f32] = {"gemm_f32d_6x4_avx512vnni", 64, dot<unit, element_f32<unit>>};
    k.dot[gemm_f16] = {"gemm_f16d_6x4_avx512vnni", 96, dot<unit, element_f16<unit>>};
    k.dot[gemm_bf16] = {"gemm_bf16d_6x4_avx512vnni", 96, dot<unit, element_bf16<unit>>};
    k.pack = pack<unit>;
}

} // namespace tb::npu
