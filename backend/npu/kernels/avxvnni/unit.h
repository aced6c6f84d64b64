// AVX-VNNI, vpdpbusd on 256 bits, behind the names that kernels/gemm_vnni.h uses. Internal linkage, see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_AVXVNNI_UNIT_H
#define TILEBEAM_NPU_KERNELS_AVXVNNI_UNIT_H

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels/gemm.h"
#include "kernels/gemm_shape.h"

namespace tb::npu {
namespace {

struct unit {
    using ints = __m256i;
    using floats = __m256;
    static constexpr int width = 8;
    // Of 16 registers 8 hold weights, one a dot product, one a scale and one what is multiplied: 4 or 5 float sums.
    static constexpr int direct_rows = 5;
    static constexpr int vectors_of_direct(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

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

    // Unsigned `w` times four signed bytes at `x`, the same for all lanes; four products a lane.
    static void dot_memory(ints & sum, ints w, const uint8_t * x) {
        int32_t v;
        std::memcpy(&v, x, 4);
        sum = _mm256_dpbusd_avx_epi32(sum, w, _mm256_set1_epi32(v));
    }

    template <size_t bytes> static void prefetch(const uint8_t * tile) {
        constexpr size_t ahead = 6;
#pragma GCC unroll 18
        for (size_t i = 0; i < bytes / 64; i++)
            _mm_prefetch(reinterpret_cast<const char *>(tile + ahead * bytes + 64 * i), _MM_HINT_T0);
    }
};

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_AVXVNNI_UNIT_H
