// AVX-VNNI, vpdpbusd on 256 bits, behind the names that kernels/gemm_vnni.h uses. Internal linkage, see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_AVXVNNI_UNIT_H
#define TILEBEAM_NPU_KERNELS_AVXVNNI_UNIT_H

#include <immintrin.h>

#include <cstdint>

#include "kernels/gemm.h"

namespace tb::npu {
namespace {

struct unit {
    using ints = __m256i;
    using floats = __m256;
    static constexpr int width = 8;
    static constexpr int vectors = 1; // of weights at once: half of the registers

    static ints load(const uint8_t * p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }
    static floats load_floats(const float * p) { return _mm256_loadu_ps(p); }
    static void store_floats(float * p, floats x) { _mm256_storeu_ps(p, x); }
    static floats load_halves(const uint8_t * p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    }
    static floats zero() { return _mm256_setzero_ps(); }
    static ints broadcast(int32_t x) { return _mm256_set1_epi32(x); }
    static floats broadcast(float x) { return _mm256_set1_ps(x); }
    static floats to_floats(ints x) { return _mm256_cvtepi32_ps(x); }
    static floats mul(floats a, floats b) { return _mm256_mul_ps(a, b); }
    static floats fma(floats a, floats b, floats c) { return _mm256_fmadd_ps(a, b, c); }
    static ints low_nibbles(ints x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
    static ints high_nibbles(ints x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
    static ints flip_signs(ints x) { return _mm256_xor_si256(x, _mm256_set1_epi8(static_cast<char>(0x80))); }
    template <class... Byte> static ints table(Byte... bytes) {
        return _mm256_broadcastsi128_si256(_mm_setr_epi8(static_cast<char>(bytes)...));
    }
    static ints look_up(ints table, ints index) { return _mm256_shuffle_epi8(table, index); }

    // Unsigned `w` times signed `x`, four products a lane.
    static void dot(ints & sum, ints w, ints x) { sum = _mm256_dpbusd_avx_epi32(sum, w, x); }
};

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_AVXVNNI_UNIT_H
