// AVX2, FMA and F16C behind the names that kernels/attention_simd.h and kernels/vec_simd.h use. Internal linkage, see
// vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_AVX2_SIMD_H
#define TILEBEAM_NPU_KERNELS_AVX2_SIMD_H

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace tb::npu {
namespace {

struct simd {
    using vec = __m256;
    static constexpr int width = 8;
    static constexpr int registers = 16;
    // register tiles of attention: rows x vectors
    static constexpr int tile_rows = 6;
    static constexpr int tile_vecs = 2;

    static vec zero() { return _mm256_setzero_ps(); }
    static vec set1(float x) { return _mm256_set1_ps(x); }
    static vec load(const float * p) { return _mm256_loadu_ps(p); }
    static void store(float * p, vec x) { _mm256_storeu_ps(p, x); }
    static vec load_n(const float * p, int n) { return _mm256_maskload_ps(p, first(n)); }
    static void store_n(float * p, vec x, int n) { _mm256_maskstore_ps(p, first(n), x); }
    static vec load(const uint16_t * p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    }
    static vec load_n(const uint16_t * p, int n) {
        uint16_t t[8] = {};
        std::memcpy(t, p, static_cast<size_t>(n) * sizeof(uint16_t));
        return load(t);
    }
    static vec load(const int8_t * p) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
    }
    // all lanes of an FP16 number
    static vec set1(const uint16_t * p) { return _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(*p))); }
    static void store(uint16_t * p, vec x) { _mm_storeu_si128(reinterpret_cast<__m128i *>(p), half(x)); }
    static void store_n(uint16_t * p, vec x, int n) {
        uint16_t t[8];
        store(t, x);
        std::memcpy(p, t, static_cast<size_t>(n) * sizeof(uint16_t));
    }

    static vec add(vec a, vec b) { return _mm256_add_ps(a, b); }
    static vec sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
    static vec mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
    static vec div(vec a, vec b) { return _mm256_div_ps(a, b); }
    static vec fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
    static vec min(vec a, vec b) { return _mm256_min_ps(a, b); }
    static vec max(vec a, vec b) { return _mm256_max_ps(a, b); }
    static float sum(vec x) {
        __m128 t = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        t = _mm_add_ps(t, _mm_movehl_ps(t, t));
        return _mm_cvtss_f32(_mm_add_ss(t, _mm_movehdup_ps(t)));
    }
    static float top(vec x) {
        __m128 t = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        t = _mm_max_ps(t, _mm_movehl_ps(t, t));
        return _mm_cvtss_f32(_mm_max_ss(t, _mm_movehdup_ps(t)));
    }
    static vec round(vec x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    // x * 2^n, n integral, |n| <= 252: in two steps, so that results may be subnormal
    static vec ldexp(vec x, vec n) {
        const __m256i whole = _mm256_cvtps_epi32(n);
        const __m256i half_n = _mm256_srai_epi32(whole, 1);
        return mul(mul(x, power(half_n)), power(_mm256_sub_epi32(whole, half_n)));
    }
    static vec round_to_half(vec x) { return _mm256_cvtph_ps(half(x)); }
    // x where bit i of `bits` is set, else y
    static vec select(uint32_t bits, vec x, vec y) {
        const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), bit);
        return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, bit)));
    }

    using wide = __m256d;
    static wide set1(double x) { return _mm256_set1_pd(x); }
    static wide load(const double * p) { return _mm256_loadu_pd(p); }
    static void store(double * p, wide x) { _mm256_storeu_pd(p, x); }
    static wide fma(wide a, wide b, wide c) { return _mm256_fmadd_pd(a, b, c); }

    // out[i] = sum of the lanes of x[i]
    static vec sums(const vec (&x)[8]) {
        const vec a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
        const vec b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
        return add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    }

    static void transpose(vec (&x)[8]) {
        vec t[8];
        for (int i = 0; i < 8; i += 4) {
            const vec a = _mm256_unpacklo_ps(x[i], x[i + 1]);
            const vec b = _mm256_unpackhi_ps(x[i], x[i + 1]);
            const vec c = _mm256_unpacklo_ps(x[i + 2], x[i + 3]);
            const vec d = _mm256_unpackhi_ps(x[i + 2], x[i + 3]);
            t[i] = _mm256_shuffle_ps(a, c, 0x44);
            t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
            t[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
            t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
        }
        for (int i = 0; i < 4; i++) {
            x[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
            x[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
        }
    }

  private:
    static __m128i half(vec x) { return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }
    static vec power(__m256i n) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
    }
    static __m256i first(int n) {
        return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    }
};

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_AVX2_SIMD_H
