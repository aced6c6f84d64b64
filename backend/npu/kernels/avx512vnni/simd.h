// AVX-512 behind the names that kernels/attention_simd.h and kernels/vec_simd.h use. Internal linkage, see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_AVX512VNNI_SIMD_H
#define TILEBEAM_NPU_KERNELS_AVX512VNNI_SIMD_H

#include <immintrin.h>

#include <cstdint>

namespace tb::npu {
namespace {

struct simd {
    using vec = __m512;
    static constexpr int width = 16;
    static constexpr int registers = 32;
    // register tiles of attention: rows x vectors
    static constexpr int tile_rows = 6;
    static constexpr int tile_vecs = 4;

    static vec zero() { return _mm512_setzero_ps(); }
    static vec set1(float x) { return _mm512_set1_ps(x); }
    static vec load(const float * p) { return _mm512_loadu_ps(p); }
    static void store(float * p, vec x) { _mm512_storeu_ps(p, x); }
    static __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1); }
    static vec load_n(const float * p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
    static void store_n(float * p, vec x, int n) { _mm512_mask_storeu_ps(p, first(n), x); }
    static vec load(const uint16_t * p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    }
    static vec load_n(const uint16_t * p, int n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }
    static vec load(const int8_t * p) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
    }
    static vec load_bf16(const uint8_t * p) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    // all lanes of an FP16 number
    static vec set1(const uint16_t * p) { return _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(*p))); }
    static void store(uint16_t * p, vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), half(x)); }
    static void store_n(uint16_t * p, vec x, int n) { _mm256_mask_storeu_epi16(p, first(n), half(x)); }

    static vec add(vec a, vec b) { return _mm512_add_ps(a, b); }
    static vec sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
    static vec mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
    static vec div(vec a, vec b) { return _mm512_div_ps(a, b); }
    static vec fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
    static vec min(vec a, vec b) { return _mm512_min_ps(a, b); }
    static vec max(vec a, vec b) { return _mm512_max_ps(a, b); }
    static float sum(vec x) { return _mm512_reduce_add_ps(x); }
    static float top(vec x) { return _mm512_reduce_max_ps(x); }
    static vec round(vec x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    // x * 2^n, n integral
    static vec ldexp(vec x, vec n) { return _mm512_scalef_ps(x, n); }
    static vec round_to_half(vec x) { return _mm512_cvtph_ps(half(x)); }
    // x where bit i of `bits` is set, else y
    static vec select(uint32_t bits, vec x, vec y) { return _mm512_mask_blend_ps(static_cast<__mmask16>(bits), y, x); }

    using wide = __m512d;
    static wide set1(double x) { return _mm512_set1_pd(x); }
    static wide load(const double * p) { return _mm512_loadu_pd(p); }
    static void store(double * p, wide x) { _mm512_storeu_pd(p, x); }
    static wide fma(wide a, wide b, wide c) { return _mm512_fmadd_pd(a, b, c); }

    // out[i] = sum of the lanes of x[i]
    static vec sums(const vec (&x)[16]) {
        vec quads[4];
        for (int i = 0; i < 4; i++) {
            const vec a = add(_mm512_unpacklo_ps(x[4 * i], x[4 * i + 1]), _mm512_unpackhi_ps(x[4 * i], x[4 * i + 1]));
            const vec b =
                add(_mm512_unpacklo_ps(x[4 * i + 2], x[4 * i + 3]), _mm512_unpackhi_ps(x[4 * i + 2], x[4 * i + 3]));
            quads[i] = add(unpacklo2(a, b), unpackhi2(a, b));
        }
        const vec low =
            add(_mm512_shuffle_f32x4(quads[0], quads[1], 0x88), _mm512_shuffle_f32x4(quads[0], quads[1], 0xdd));
        const vec high =
            add(_mm512_shuffle_f32x4(quads[2], quads[3], 0x88), _mm512_shuffle_f32x4(quads[2], quads[3], 0xdd));
        return add(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
    }

    static void transpose(vec (&x)[16]) {
        vec t[16];
        for (int i = 0; i < 16; i += 4) {
            const vec a = _mm512_unpacklo_ps(x[i], x[i + 1]);
            const vec b = _mm512_unpackhi_ps(x[i], x[i + 1]);
            const vec c = _mm512_unpacklo_ps(x[i + 2], x[i + 3]);
            const vec d = _mm512_unpackhi_ps(x[i + 2], x[i + 3]);
            t[i] = unpacklo2(a, c);
            t[i + 1] = unpackhi2(a, c);
            t[i + 2] = unpacklo2(b, d);
            t[i + 3] = unpackhi2(b, d);
        }
        for (int i = 0; i < 4; i++) {
            const vec a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88);
            const vec b = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88);
            const vec c = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd);
            const vec d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
            x[i] = _mm512_shuffle_f32x4(a, b, 0x88);
            x[i + 8] = _mm512_shuffle_f32x4(a, b, 0xdd);
            x[i + 4] = _mm512_shuffle_f32x4(c, d, 0x88);
            x[i + 12] = _mm512_shuffle_f32x4(c, d, 0xdd);
        }
    }

  private:
    static __m256i half(vec x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static vec unpacklo2(vec a, vec b) {
        return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    }
    static vec unpackhi2(vec a, vec b) {
        return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
    }
};

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_AVX512VNNI_SIMD_H
