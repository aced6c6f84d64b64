// 64 quants times 64 FP16 scales, to FP16: the only arithmetic of dequantization.
//
// With HVX floating point a quant is an FP16 number and the product is one qf16 multiplication and its conversion.
// Without, it is a 16-bit integer of at most 8 bits, and the product is made in integers with IEEE rounding: the
// scale's mantissa times |q| has at most 19 bits, is shifted right once to 11 bits or to the subnormal grid, and the
// exponent is put in front.
#ifndef TILEBEAM_NPU_KERNELS_HVX_MULTIPLY_H
#define TILEBEAM_NPU_KERNELS_HVX_MULTIPLY_H

#include "kernels/hvx/hvx.h"

namespace tb::npu::hvx {

#if TILEBEAM_HVX_FLOAT

// The FP16 bits of a quant, -127..127.
constexpr uint16_t quant_bits(int q) {
    int magnitude = q < 0 ? -q : q;
    if (magnitude == 0) return 0;
    int exponent = 25; // of a number with its leading bit at 2^10
    while (magnitude < 1024) {
        magnitude *= 2;
        exponent--;
    }
    return static_cast<uint16_t>((q < 0 ? 0x8000 : 0) | exponent << 10 | (magnitude - 1024));
}

class scales {
  public:
    explicit scales(HVX_Vector s) : scale(s) {}
    HVX_Vector times(HVX_Vector q) const { return Q6_Vhf_equals_Vqf16(Q6_Vqf16_vmpy_VhfVhf(q, scale)); }
    // The same for a factor in qf16.
    HVX_Vector times_qf16(HVX_Vector q) const { return Q6_Vhf_equals_Vqf16(Q6_Vqf16_vmpy_Vqf16Vhf(q, scale)); }

  private:
    HVX_Vector scale;
};

#else

constexpr uint16_t quant_bits(int q) { return static_cast<uint16_t>(q); }

class scales {
  public:
    explicit scales(HVX_Vector s) : scale(s) {
        const HVX_Vector field = Q6_V_vand_VV(Q6_Vuh_vlsr_VuhR(s, 10), halves(31));
        const HVX_Vector fraction = Q6_V_vand_VV(s, halves(0x3ff));
        const HVX_VectorPred subnormal = Q6_Q_vcmp_eq_VhVh(field, halves(0));
        mantissa = Q6_V_vmux_QVV(subnormal, fraction, Q6_V_vor_VV(fraction, halves(0x400)));
        exponent = Q6_Wuw_vzxt_Vuh(Q6_V_vmux_QVV(subnormal, halves(1), field));
        infinite = Q6_V_vmux_QVV(Q6_Q_vcmp_eq_VhVh(field, halves(31)), halves(0xffff), halves(0));
        nan = Q6_V_vmux_QVV(Q6_Q_vcmp_eq_VhVh(fraction, halves(0)), halves(0x7c00), halves(0x7e00));
    }

    HVX_Vector times(HVX_Vector q) const {
        const HVX_VectorPair product = Q6_Wuw_vmpy_VuhVuh(Q6_Vh_vabs_Vh(q), mantissa);
        HVX_Vector bits =
            interleave(pack(Q6_V_lo_W(product), Q6_V_lo_W(exponent)), pack(Q6_V_hi_W(product), Q6_V_hi_W(exponent)));
        const HVX_VectorPred zero = Q6_Q_vcmp_eq_VhVh(q, halves(0));
        bits = Q6_V_vmux_QVV(zero, halves(0), bits); // packing gave it an exponent
        // infinity, or NaN for NaN and for 0 * infinity
        const HVX_Vector special = Q6_V_vmux_QVV(zero, halves(0x7e00), nan);
        bits = Q6_V_vmux_QVV(Q6_Q_vcmp_eq_VhVh(infinite, halves(0)), bits, special);
        return Q6_V_vor_VV(bits, Q6_V_vand_VV(Q6_V_vxor_VV(q, scale), halves(0x8000)));
    }

  private:
    // product * 2^(exponent - 25) as FP16 without its sign. Product below 2^19, exponent 1..31.
    static HVX_Vector pack(HVX_Vector product, HVX_Vector exponent) {
        // 32 - leading zeros - 11 bits too many, but no exponent below 1, where numbers are subnormal
        const HVX_Vector zeros = Q6_Vw_vmin_VwVw(Q6_Vuw_vcl0_Vuw(product), words(31));
        const HVX_Vector field =
            Q6_Vw_vmax_VwVw(Q6_Vw_vsub_VwVw(Q6_Vw_vadd_VwVw(exponent, words(21)), zeros), words(1));
        // 11 more bits to the left, so that the shift is to the right always
        const HVX_Vector shift = Q6_Vw_vadd_VwVw(Q6_Vw_vsub_VwVw(field, exponent), words(11));
        const HVX_Vector rounded = shift_to_even(Q6_Vw_vasl_VwR(product, 11), shift);
        const HVX_Vector bits =
            Q6_Vw_vadd_VwVw(rounded, Q6_Vw_vasl_VwR(Q6_Vw_vsub_VwVw(field, words(1)), 10)); // a carry rounds up
        return Q6_Vw_vmin_VwVw(bits, words(0x7c00));
    }

    HVX_Vector scale, mantissa, infinite, nan;
    HVX_VectorPair exponent;
};

#endif

} // namespace tb::npu::hvx

#endif // TILEBEAM_NPU_KERNELS_HVX_MULTIPLY_H
