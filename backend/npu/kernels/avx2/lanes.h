// AVX2 behind the names that kernels/gemm_vnni.h and kernels/gemm_k.h use, without dot products: avx2 and avxvnni have
// their own. Internal linkage, see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_AVX2_LANES_H
#define TILEBEAM_NPU_KERNELS_AVX2_LANES_H

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels/tiles.h"

namespace tb::npu {
namespace {

inline int32_t read_int(const uint8_t * p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return v;
}

inline float read_float(const uint8_t * p) {
    float v;
    std::memcpy(&v, p, 4);
    return v;
}

// The sum of 16 activations.
inline int32_t sum_of_16(const uint8_t * q) {
    const __m128i v = _mm_xor_si128(_mm_loadu_si128(reinterpret_cast<const __m128i *>(q)), _mm_set1_epi8(-128));
    const __m128i s = _mm_sad_epu8(v, _mm_setzero_si128());
    return _mm_cvtsi128_si32(s) + _mm_extract_epi16(s, 4) - 16 * 128;
}

// The sum of 8 integers.
inline int32_t sum_of(__m256i v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

struct lanes {
    using ints = __m256i;
    using floats = __m256;
    static constexpr int width = 8;
    static constexpr int32_t code_offset = mxfp4_offset, byte_offset = 128; // see gemm_formats.h

    static ints load(const uint8_t * p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }
    static void store(uint8_t * p, ints x) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), x); }
    static ints zeros() { return _mm256_setzero_si256(); }
    static ints broadcast(int32_t x) { return _mm256_set1_epi32(x); }
    static ints masked(ints x, int bits) { return _mm256_and_si256(x, _mm256_set1_epi8(static_cast<char>(bits))); }
    static ints less_bytes(ints x, int by) { return _mm256_sub_epi8(x, _mm256_set1_epi8(static_cast<char>(by))); }
    static ints either(ints a, ints b) { return _mm256_or_si256(a, b); }
    static ints low_nibbles(ints x) { return masked(x, 15); }
    static ints high_nibbles(ints x) { return masked(_mm256_srli_epi16(x, 4), 15); }
    static ints flip_signs(ints x) { return _mm256_xor_si256(x, _mm256_set1_epi8(static_cast<char>(0x80))); }
    template <class... Bytes> static ints table(Bytes... bytes) {
        return _mm256_broadcastsi128_si256(_mm_setr_epi8(static_cast<char>(bytes)...));
    }
    static ints look_up(ints table, ints index) { return _mm256_shuffle_epi8(table, index); }
    // To the left, or right if negative; bits of neighbouring bytes come along.
    static ints shifted(ints x, int by) { return by < 0 ? _mm256_srli_epi16(x, -by) : _mm256_slli_epi16(x, by); }

    // Of bytes times `by`, modulo 256, the first digit to the base of 3 that follows the point: times 3, the carry.
    static ints top_digits(ints x, int by) {
        const ints three = _mm256_set1_epi16(3);
        const ints even = _mm256_mullo_epi16(x, _mm256_set1_epi16(static_cast<int16_t>(by << 8)));
        const ints odd = _mm256_mullo_epi16(_mm256_and_si256(x, _mm256_set1_epi16(-256)),
                                            _mm256_set1_epi16(static_cast<int16_t>(by)));
        return either(_mm256_mulhi_epu16(even, three), _mm256_slli_epi16(_mm256_mulhi_epu16(odd, three), 8));
    }

    static ints load_sums(const int32_t * p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }
    static void store_sums(int32_t * p, ints x) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), x); }
    // A byte per column to 32 bits, and two rows of them, 32 bytes apart, to pairs of 16 bits.
    template <bool is_signed> static ints widened(const uint8_t * p) {
        const __m128i v = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
        return is_signed ? _mm256_cvtepi8_epi32(v) : _mm256_cvtepu8_epi32(v);
    }
    template <bool is_signed> static ints byte_pairs(const uint8_t * p) {
        const __m128i a = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
        const __m128i b = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p + 32));
        const __m128i both = _mm_unpacklo_epi8(a, b);
        return is_signed ? _mm256_cvtepi8_epi16(both) : _mm256_cvtepu8_epi16(both);
    }
    static ints add(ints a, ints b) { return _mm256_add_epi32(a, b); }
    static ints add_pairs(ints sum, ints a, ints b) { return add(sum, _mm256_madd_epi16(a, b)); }
    static ints add_product(ints sum, ints a, ints b) { return _mm256_add_epi32(sum, _mm256_mullo_epi32(a, b)); }
    // a - (b << by)
    template <int by> static ints less_shifted(ints a, ints b) { return _mm256_sub_epi32(a, _mm256_slli_epi32(b, by)); }

    static floats load_floats(const float * p) { return _mm256_loadu_ps(p); }
    static void store_floats(float * p, floats x) { _mm256_storeu_ps(p, x); }
    static floats load_halves(const uint8_t * p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    }
    static floats zero() { return _mm256_setzero_ps(); }
    // Exponents of MXFP4's scales. A subnormal power is the larger of the two as an integer.
    static floats load_powers(const uint8_t * p) {
        const __m256i x = widened<false>(p), one = _mm256_set1_epi32(1);
        return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_slli_epi32(_mm256_sub_epi32(x, one), 23),
                                                    _mm256_slli_epi32(_mm256_add_epi32(x, one), 21)));
    }
    // UE4M3 scales of NVFP4, halves of them, as FP16 numbers times 128; the NaN counts as 0.
    static floats load_small(const uint8_t * p) {
        const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)), most = _mm_set1_epi8(0x7f);
        const __m128i bits = _mm_andnot_si128(_mm_cmpeq_epi8(x, most), _mm_and_si128(x, most));
        return _mm256_mul_ps(_mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bits), 7)), _mm256_set1_ps(128));
    }
    static floats broadcast(float x) { return _mm256_set1_ps(x); }
    static floats to_floats(ints x) { return _mm256_cvtepi32_ps(x); }
    static floats mul(floats a, floats b) { return _mm256_mul_ps(a, b); }
    static floats fma(floats a, floats b, floats c) { return _mm256_fmadd_ps(a, b, c); }
    static floats fms(floats a, floats b, floats c) { return _mm256_fmsub_ps(a, b, c); }
};

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_AVX2_LANES_H
