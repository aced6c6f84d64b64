// AVX-512 behind the names that kernels/gemm_vnni.h and kernels/gemm_k.h use. Internal linkage, see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_AVX512VNNI_UNIT_H
#define TILEBEAM_NPU_KERNELS_AVX512VNNI_UNIT_H

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels/avx2/lanes.h"
#include "kernels/gemm.h"

namespace tb::npu {
namespace {

struct unit {
    using ints = __m512i;
    using floats = __m512;
    static constexpr int width = 16;
    static constexpr int vectors = 2;                                       // of weights at once: half of the registers
    static constexpr int32_t code_offset = mxfp4_offset, byte_offset = 128; // see gemm_formats.h

    static ints load(const uint8_t * p) { return _mm512_loadu_si512(p); }
    static void store(uint8_t * p, ints x) { _mm512_storeu_si512(p, x); }
    static floats load_floats(const float * p) { return _mm512_loadu_ps(p); }
    static void store_floats(float * p, floats x) { _mm512_storeu_ps(p, x); }
    static floats load_halves(const uint8_t * p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    }
    static ints zeros() { return _mm512_setzero_si512(); }
    // Exponents of MXFP4's scales. A subnormal power is the larger of the two as an integer.
    static floats load_powers(const uint8_t * p) {
        const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
        const __m512i one = _mm512_set1_epi32(1);
        return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_slli_epi32(_mm512_sub_epi32(x, one), 23),
                                                    _mm512_slli_epi32(_mm512_add_epi32(x, one), 21)));
    }
    // UE4M3 scales of NVFP4, halves of them, as FP16 numbers times 128; the NaN counts as 0.
    static floats load_small(const uint8_t * p) {
        const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
        const __mmask16 numbers = _mm_cmpneq_epi8_mask(x, _mm_set1_epi8(0x7f));
        const __m256i halves = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_and_si128(x, _mm_set1_epi8(0x7f))), 7);
        return _mm512_mul_ps(_mm512_maskz_cvtph_ps(numbers, halves), _mm512_set1_ps(128));
    }
    static floats zero() { return _mm512_setzero_ps(); }
    static ints broadcast(int32_t x) { return _mm512_set1_epi32(x); }
    static floats broadcast(float x) { return _mm512_set1_ps(x); }
    static floats to_floats(ints x) { return _mm512_cvtepi32_ps(x); }
    static floats mul(floats a, floats b) { return _mm512_mul_ps(a, b); }
    static floats fma(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
    static floats fms(floats a, floats b, floats c) { return _mm512_fmsub_ps(a, b, c); }
    static ints masked(ints x, int bits) { return _mm512_and_si512(x, _mm512_set1_epi8(static_cast<char>(bits))); }
    static ints less_bytes(ints x, int by) { return _mm512_sub_epi8(x, _mm512_set1_epi8(static_cast<char>(by))); }
    static ints either(ints a, ints b) { return _mm512_or_si512(a, b); }
    static ints low_nibbles(ints x) { return masked(x, 15); }
    static ints high_nibbles(ints x) { return masked(_mm512_srli_epi16(x, 4), 15); }
    static ints flip_signs(ints x) { return _mm512_xor_si512(x, _mm512_set1_epi8(static_cast<char>(0x80))); }
    template <class... Byte> static ints table(Byte... bytes) {
        return _mm512_broadcast_i32x4(_mm_setr_epi8(static_cast<char>(bytes)...));
    }
    static ints look_up(ints table, ints index) { return _mm512_shuffle_epi8(table, index); }

    // To the left, or right if negative; bits of neighbouring bytes come along.
    static ints shifted(ints x, int by) {
        return by < 0 ? _mm512_srli_epi16(x, static_cast<unsigned>(-by))
                      : _mm512_slli_epi16(x, static_cast<unsigned>(by));
    }

    // Of bytes times `by`, modulo 256, the first digit to the base of 3 that follows the point: times 3, the carry.
    static ints top_digits(ints x, int by) {
        const ints three = _mm512_set1_epi16(3);
        const ints even = _mm512_mullo_epi16(x, _mm512_set1_epi16(static_cast<int16_t>(by << 8)));
        const ints odd = _mm512_mullo_epi16(_mm512_and_si512(x, _mm512_set1_epi16(-256)),
                                            _mm512_set1_epi16(static_cast<int16_t>(by)));
        return either(_mm512_mulhi_epu16(even, three), _mm512_slli_epi16(_mm512_mulhi_epu16(odd, three), 8));
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
    static ints add(ints a, ints b) { return _mm512_add_epi32(a, b); }
    static ints add_pairs(ints sum, ints a, ints b) { return _mm512_dpwssd_epi32(sum, a, b); }
    static ints add_product(ints sum, ints a, ints b) { return _mm512_add_epi32(sum, _mm512_mullo_epi32(a, b)); }
    // a - (b << by)
    template <int by> static ints less_shifted(ints a, ints b) { return _mm512_sub_epi32(a, _mm512_slli_epi32(b, by)); }

    // Unsigned `w` times signed `x`, four products a lane. GCC 12 keeps the sums of a large tile in registers only
    // where it cannot look into the instruction.
    static void dot(ints & sum, ints w, ints x) { asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x)); }
};

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_AVX512VNNI_UNIT_H
