// Float GEMM and conversion of tiles on AVX-512: the shared kernels over 16 lanes.
#include "kernels/avx512vnni/simd.h"

#include "kernels/gemm_convert_simd.h"
#include "kernels/gemm_float_simd.h"

namespace tb::npu {

namespace {

struct unit : simd {
    using bytes = __m512i;
    static bytes load_bytes(const uint8_t * p) { return _mm512_loadu_si512(p); }
    static bytes low_nibbles(bytes v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
    static bytes high_nibbles(bytes v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }
    static bytes table(const int8_t (&v)[16]) {
        return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(v)));
    }
    static bytes look_up(bytes table, bytes index) { return _mm512_shuffle_epi8(table, index); }
    // Byte `position` of each 32-bit lane, sign extended.
    template <int position> static vec signed_byte(bytes v) {
        return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 24 - 8 * position), 24));
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
    k.dequantize = dequantize<unit>;
    k.round_fp16 = round_fp16<unit>;
}

} // namespace tb::npu
