// Float GEMM and conversion of tiles on AVX2: the shared kernels over 8 lanes.
#include "kernels/avx2/simd.h"

#include "kernels/gemm_convert_simd.h"
#include "kernels/gemm_float_simd.h"

namespace tb::npu {

namespace {

struct unit : simd {
    static vec load_bf16(const uint8_t * p) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }

    using bytes = __m256i;
    static bytes load_bytes(const uint8_t * p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }
    static void store_bytes(uint8_t * p, bytes v) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), v); }
    static bytes low_nibbles(bytes v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
    static bytes high_nibbles(bytes v) { return low_nibbles(_mm256_srli_epi16(v, 4)); }
    static bytes table(const int8_t (&v)[16]) {
        return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(v)));
    }
    static bytes look_up(bytes table, bytes index) { return _mm256_shuffle_epi8(table, index); }
    // Byte `position` of each 32-bit lane, sign extended.
    template <int position> static vec signed_byte(bytes v) {
        return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 24 - 8 * position), 24));
    }
    // A table of 16 values times a ratio, in fixed point.
    static bytes requantized(const int16_t (&v)[16], int16_t ratio) {
        const __m128i r = _mm_set1_epi16(ratio), *p = reinterpret_cast<const __m128i *>(v);
        return _mm256_broadcastsi128_si256(
            _mm_packs_epi16(_mm_mulhrs_epi16(_mm_loadu_si128(p), r), _mm_mulhrs_epi16(_mm_loadu_si128(p + 1), r)));
    }
    // Even bytes times one ratio, odd ones times the other: each becomes twice its value in 16 bits.
    static bytes requantized(bytes v, int16_t even, int16_t odd) {
        const bytes low = _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 7);
        const bytes high = _mm256_srai_epi16(_mm256_and_si256(v, _mm256_set1_epi16(-256)), 7);
        return even_odd(_mm256_mulhrs_epi16(low, _mm256_set1_epi16(even)),
                        _mm256_slli_epi16(_mm256_mulhrs_epi16(high, _mm256_set1_epi16(odd)), 8));
    }
    static bytes even_odd(bytes even, bytes odd) { return _mm256_blendv_epi8(even, odd, _mm256_set1_epi16(-256)); }
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
    k.prepare = prepare<unit>;
    k.dequantize = dequantize<unit>;
    k.round_fp16 = round_fp16<unit>;
}

} // namespace tb::npu
