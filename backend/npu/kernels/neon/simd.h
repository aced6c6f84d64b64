// NEON behind the names that kernels/attention_simd.h and kernels/vec_simd.h use. Internal linkage, see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_NEON_SIMD_H
#define TILEBEAM_NPU_KERNELS_NEON_SIMD_H

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace tb::npu {
namespace {

struct simd {
    using vec = float32x4_t;
    static constexpr int width = 4;
    static constexpr int registers = 32;
    // register tiles of attention: rows x vectors
    static constexpr int tile_rows = 6;
    static constexpr int tile_vecs = 4;

    static vec zero() { return vdupq_n_f32(0.0f); }
    static vec set1(float x) { return vdupq_n_f32(x); }
    static vec load(const float * p) { return vld1q_f32(p); }
    static void store(float * p, vec x) { vst1q_f32(p, x); }
    static vec load_n(const float * p, int n) {
        float t[4] = {};
        std::memcpy(t, p, static_cast<size_t>(n) * sizeof(float));
        return load(t);
    }
    static void store_n(float * p, vec x, int n) {
        float t[4];
        store(t, x);
        std::memcpy(p, t, static_cast<size_t>(n) * sizeof(float));
    }
    static vec load(const uint16_t * p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
    static vec load_n(const uint16_t * p, int n) {
        uint16_t t[4] = {};
        std::memcpy(t, p, static_cast<size_t>(n) * sizeof(uint16_t));
        return load(t);
    }
    static vec load(const int8_t * p) {
        int32_t four;
        std::memcpy(&four, p, sizeof(four));
        const int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
        return vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
    }
    // all lanes of an FP16 number
    static vec set1(const uint16_t * p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_dup_u16(p))); }
    static void store(uint16_t * p, vec x) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
    static void store_n(uint16_t * p, vec x, int n) {
        uint16_t t[4];
        store(t, x);
        std::memcpy(p, t, static_cast<size_t>(n) * sizeof(uint16_t));
    }

    static vec add(vec a, vec b) { return vaddq_f32(a, b); }
    static vec sub(vec a, vec b) { return vsubq_f32(a, b); }
    static vec mul(vec a, vec b) { return vmulq_f32(a, b); }
    static vec div(vec a, vec b) { return vdivq_f32(a, b); }
    static vec fma(vec a, vec b, vec c) { return vfmaq_f32(c, a, b); }
    // b if either is NaN, as x86 has it
    static vec min(vec a, vec b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
    static vec max(vec a, vec b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
    static float sum(vec x) { return vaddvq_f32(x); }
    static float top(vec x) { return vmaxvq_f32(x); }
    static vec round(vec x) { return vrndnq_f32(x); }
    // x * 2^n, n integral, |n| <= 252: in two steps, so that results may be subnormal
    static vec ldexp(vec x, vec n) {
        const int32x4_t whole = vcvtnq_s32_f32(n);
        const int32x4_t half = vshrq_n_s32(whole, 1);
        return mul(mul(x, power(half)), power(vsubq_s32(whole, half)));
    }
    static vec round_to_half(vec x) { return vcvt_f32_f16(vcvt_f16_f32(x)); }
    // x where bit i of `bits` is set, else y
    static vec select(uint32_t bits, vec x, vec y) {
        const uint32_t bit[4] = {1, 2, 4, 8};
        return vbslq_f32(vtstq_u32(vdupq_n_u32(bits), vld1q_u32(bit)), x, y);
    }

    using wide = float64x2_t;
    static wide set1(double x) { return vdupq_n_f64(x); }
    static wide load(const double * p) { return vld1q_f64(p); }
    static void store(double * p, wide x) { vst1q_f64(p, x); }
    static wide fma(wide a, wide b, wide c) { return vfmaq_f64(c, a, b); }

    // out[i] = sum of the lanes of x[i]
    static vec sums(const vec (&x)[4]) { return vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3])); }

    static void transpose(vec (&x)[4]) {
        const float64x2_t a = vreinterpretq_f64_f32(vtrn1q_f32(x[0], x[1]));
        const float64x2_t b = vreinterpretq_f64_f32(vtrn2q_f32(x[0], x[1]));
        const float64x2_t c = vreinterpretq_f64_f32(vtrn1q_f32(x[2], x[3]));
        const float64x2_t d = vreinterpretq_f64_f32(vtrn2q_f32(x[2], x[3]));
        x[0] = vreinterpretq_f32_f64(vtrn1q_f64(a, c));
        x[1] = vreinterpretq_f32_f64(vtrn1q_f64(b, d));
        x[2] = vreinterpretq_f32_f64(vtrn2q_f64(a, c));
        x[3] = vreinterpretq_f32_f64(vtrn2q_f64(b, d));
    }

  private:
    static vec power(int32x4_t n) { return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23)); }
};

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_NEON_SIMD_H
