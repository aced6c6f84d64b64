// K-quant GEMM on vpdpbusd of 512 bits.
#include "kernels/gemm_k.h"

#include <immintrin.h>

namespace tb::npu {

void fill_gemm_avx512vnni_k(gemm_kernels & k);

namespace {

struct unit {
    using ints = __m512i;
    using floats = __m512;
    static constexpr int width = 16;

    static ints load(const uint8_t * p) { return _mm512_loadu_si512(p); }
    static void store(uint8_t * p, ints x) { _mm512_storeu_si512(p, x); }
    static ints zeros() { return _mm512_setzero_si512(); }
    static ints broadcast(int32_t x) { return _mm512_set1_epi32(x); }
    static ints masked(ints x, int bits) { return _mm512_and_si512(x, _mm512_set1_epi8(static_cast<char>(bits))); }
    static ints either(ints a, ints b) { return _mm512_or_si512(a, b); }
    static ints low_nibbles(ints x) { return masked(x, 15); }
    static ints high_nibbles(ints x) { return masked(_mm512_srli_epi16(x, 4), 15); }
    // To the left, or right if negative; bits of neighbouring bytes come along.
    static ints shifted(ints x, int by) {
        return by < 0 ? _mm512_srli_epi16(x, static_cast<unsigned>(-by))
                      : _mm512_slli_epi16(x, static_cast<unsigned>(by));
    }

    static ints load_sums(const int32_t * p) { return _mm512_loadu_si512(p); }
    static void store_sums(int32_t * p, ints x) { _mm512_storeu_si512(p, x); }
    // A byte per column to 32 bits, and two rows of them, 32 bytes apart, to pairs of 16 bits.
    template <bool is_signed> static ints widened(const uint8_t * p) {
        const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
        return is_signed ? _mm512_cvtepi8_epi32(v) : _mm512_cvtepu8_epi32(v);
    }
    template <bool is_signed> static ints byte_pairs(const uint8_t * p) {
        const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
        const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p + 32));
        const __m256i both = _mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b));
        return is_signed ? _mm512_cvtepi8_epi16(both) : _mm512_cvtepu8_epi16(both);
    }
    static ints multiply_pairs(ints a, ints b) { return _mm512_madd_epi16(a, b); }
    static ints add(ints a, ints b) { return _mm512_add_epi32(a, b); }
    static ints add_product(ints sum, ints a, ints b) { return _mm512_add_epi32(sum, _mm512_mullo_epi32(a, b)); }
    static ints less_32_times(ints a, ints b) { return _mm512_sub_epi32(a, _mm512_slli_epi32(b, 5)); }

    static floats load_floats(const float * p) { return _mm512_loadu_ps(p); }
    static void store_floats(float * p, floats x) { _mm512_storeu_ps(p, x); }
    static floats load_halves(const uint8_t * p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    }
    static floats broadcast(float x) { return _mm512_set1_ps(x); }
    static floats to_floats(ints x) { return _mm512_cvtepi32_ps(x); }
    static floats mul(floats a, floats b) { return _mm512_mul_ps(a, b); }
    static floats fma(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
    static floats fms(floats a, floats b, floats c) { return _mm512_fmsub_ps(a, b, c); }

    static void dot(ints & sum, ints w, ints x) { sum = _mm512_dpbusd_epi32(sum, w, x); }
    template <class Format>
    static void tile(const Format & tile, const uint8_t * scales, const uint8_t * q, int rows,
                     int32_t (*sums)[gemm_panel]) {
        k_tile_of_dots<unit>(tile, scales, q, rows, sums);
    }
};

} // namespace

void fill_gemm_avx512vnni_k(gemm_kernels & k) {
    fill_k_kernels<unit>(k, "gemm_q4k_32x16_avx512vnni", "gemm_q5k_32x16_avx512vnni", "gemm_q6k_32x16_avx512vnni");
}

} // namespace tb::npu
