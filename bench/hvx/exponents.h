// exp2 of non-positive FP16 numbers by polynomial: what the table look-up (kernels/hvx/exponent.h) is compared with.
// Needs HVX floating point. The usual way: n = x rounded, 2^(x - n) by a polynomial, n added to the exponent.
// Results below 2^-14 become 0. Coefficients: Chebyshev interpolation of 2^r on [-1/2, 1/2].
#ifndef TILEBEAM_BENCH_HVX_EXPONENTS_H
#define TILEBEAM_BENCH_HVX_EXPONENTS_H

#include <cstdint>

#include "kernels/hvx/hvx.h"

#if TILEBEAM_HVX_FLOAT

namespace tb::bench {

using namespace tb::npu::hvx;

// In FP16 throughout, degree 4: 64 numbers at a time.
__attribute__((noinline)) inline void exp2_fp16_polynomial(const uint16_t * x, uint32_t n, uint16_t * __restrict out) {
    const HVX_Vector magic = halves(0x6600); // 1.5 * 2^10: adding it rounds to integers
    const HVX_Vector c4 = halves(0x20f3), c3 = halves(0x2b28), c2 = halves(0x33b0), c1 = halves(0x398c);
    const HVX_Vector one = halves(0x3c00), lowest = halves(0xcb00); // -14
    for (; n != 0; n--, x += 64, out += 64) {
        const HVX_Vector v = load_aligned(x);
        const HVX_Vector rounded = Q6_Vhf_equals_Vqf16(Q6_Vqf16_vadd_VhfVhf(v, magic));
        const HVX_Vector whole = Q6_Vhf_equals_Vqf16(Q6_Vqf16_vsub_VhfVhf(rounded, magic));
        const HVX_Vector r = Q6_Vhf_equals_Vqf16(Q6_Vqf16_vsub_VhfVhf(v, whole));
        HVX_Vector p = Q6_Vqf16_vadd_Vqf16Vhf(Q6_Vqf16_vmpy_VhfVhf(r, c4), c3);
        p = Q6_Vqf16_vadd_Vqf16Vhf(Q6_Vqf16_vmpy_Vqf16Vhf(p, r), c2);
        p = Q6_Vqf16_vadd_Vqf16Vhf(Q6_Vqf16_vmpy_Vqf16Vhf(p, r), c1);
        p = Q6_Vqf16_vadd_Vqf16Vhf(Q6_Vqf16_vmpy_Vqf16Vhf(p, r), one);
        const HVX_Vector scaled = Q6_Vh_vadd_VhVh(Q6_Vhf_equals_Vqf16(p), Q6_Vh_vasl_VhR(rounded, 10));
        // as integers, negative numbers below -14 are above it
        const HVX_VectorPred small = Q6_Q_vcmp_gt_VhVh(v, lowest);
        const HVX_VectorPred negative = Q6_Q_vcmp_gt_VhVh(halves(0), v);
        store_aligned(out, Q6_V_vmux_QVV(Q6_Q_and_QQ(small, negative), halves(0), scaled));
    }
}

// 2^x of 32 floats, degree 5.
inline HVX_Vector exp2_words(HVX_Vector x) {
    const HVX_Vector magic = words(0x4b400000); // 1.5 * 2^23
    const HVX_Vector rounded = Q6_Vsf_equals_Vqf32(Q6_Vqf32_vadd_VsfVsf(x, magic));
    const HVX_Vector whole = Q6_Vsf_equals_Vqf32(Q6_Vqf32_vsub_VsfVsf(rounded, magic));
    const HVX_Vector r = Q6_Vqf32_vsub_VsfVsf(x, whole);
    const HVX_Vector r_float = Q6_Vsf_equals_Vqf32(r);
    HVX_Vector p = Q6_Vqf32_vadd_Vqf32Vsf(Q6_Vqf32_vmpy_VsfVsf(r_float, words(0x3aaf8448)), words(0x3c1e8838));
    p = Q6_Vqf32_vadd_Vqf32Vsf(Q6_Vqf32_vmpy_Vqf32Vqf32(p, r), words(0x3d6357b6));
    p = Q6_Vqf32_vadd_Vqf32Vsf(Q6_Vqf32_vmpy_Vqf32Vqf32(p, r), words(0x3e75fc83));
    p = Q6_Vqf32_vadd_Vqf32Vsf(Q6_Vqf32_vmpy_Vqf32Vqf32(p, r), words(0x3f317218));
    p = Q6_Vqf32_vadd_Vqf32Vsf(Q6_Vqf32_vmpy_Vqf32Vqf32(p, r), words(0x3f800001));
    return Q6_Vw_vadd_VwVw(Q6_Vsf_equals_Vqf32(p), Q6_Vw_vasl_VwR(rounded, 23));
}

// In float, from and to FP16: 64 numbers at a time. Inputs below -14 count as -14, then become 0.
__attribute__((noinline)) inline void exp2_fp32_polynomial(const uint16_t * x, uint32_t n, uint16_t * __restrict out) {
    const HVX_Vector one = halves(0x3c00), lowest = halves(0xcb00);
    for (; n != 0; n--, x += 64, out += 64) {
        const HVX_Vector v = load_aligned(x);
        const HVX_VectorPred negative = Q6_Q_vcmp_gt_VhVh(halves(0), v);
        const HVX_VectorPred small = Q6_Q_and_QQ(Q6_Q_vcmp_gt_VhVh(v, lowest), negative);
        const HVX_VectorPair wide = Q6_Wqf32_vmpy_VhfVhf(Q6_V_vmux_QVV(small, lowest, v), one);
        // back from words to the order they came in: even halves in the first vector
        const HVX_Vector even = exp2_words(Q6_Vsf_equals_Vqf32(Q6_V_lo_W(wide)));
        const HVX_Vector odd = exp2_words(Q6_Vsf_equals_Vqf32(Q6_V_hi_W(wide)));
        const HVX_Vector zero = words(0);
        const HVX_VectorPair back = Q6_W_vcombine_VV(Q6_Vqf32_vadd_VsfVsf(odd, zero), Q6_Vqf32_vadd_VsfVsf(even, zero));
        store_aligned(out, Q6_V_vmux_QVV(small, halves(0), Q6_Vhf_equals_Wqf32(back)));
    }
}

} // namespace tb::bench

#endif

#endif // TILEBEAM_BENCH_HVX_EXPONENTS_H
