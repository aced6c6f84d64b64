// What all HVX kernels share: vectors of 128 bytes, loads and stores, FP16 <-> float in integer instructions.
//
// The kernels compile for two generations from one source. HVX v66 (run under qemu-hexagon) has no floating point:
// what v68 and later do with a qfloat instruction is done there by integer instructions that give IEEE bits.
// TILEBEAM_HVX_FLOAT says which; 0 for a later generation gives the integer ones there. Host tests compile the same
// sources over an emulation of the intrinsics (tests/hexagon/emulated), which stands in for the two headers below.
//
// Tiles are 64-byte aligned only, MXFP4's 32-byte, hence the unaligned loads.
#ifndef TILEBEAM_NPU_KERNELS_HVX_H
#define TILEBEAM_NPU_KERNELS_HVX_H

#include <cstddef>
#include <cstdint>

#include <hexagon_types.h>
#include <hvx_hexagon_protos.h>

#ifndef TILEBEAM_HVX_FLOAT
#    define TILEBEAM_HVX_FLOAT (__HVX_ARCH__ >= 68)
#endif

namespace tb::npu::hvx {

// A constant vector.
struct alignas(128) byte_table {
    uint8_t at[128];
};

inline HVX_Vector load(const void * p) { return *static_cast<const HVX_UVector *>(p); }
inline void store(void * p, HVX_Vector v) { *static_cast<HVX_UVector *>(p) = v; }
inline HVX_Vector load_aligned(const void * p) { return *static_cast<const HVX_Vector *>(p); }
inline void store_aligned(void * p, HVX_Vector v) { *static_cast<HVX_Vector *>(p) = v; }

inline HVX_Vector words(uint32_t x) { return Q6_V_vsplat_R(static_cast<int32_t>(x)); }
inline HVX_Vector halves(uint32_t x) { return Q6_Vh_vsplat_R(static_cast<int32_t>(x)); }

// 32 FP16 numbers, one in the low half of each word, to float bits. Exact; NaN stays NaN.
inline HVX_Vector half_to_float(HVX_Vector h) {
    const HVX_Vector magnitude = Q6_V_vand_VV(h, words(0x7fff));
    const HVX_Vector rebias = words(112u << 23);
    HVX_Vector bits = Q6_Vw_vadd_VwVw(Q6_Vw_vasl_VwR(magnitude, 13), rebias);
    bits = Q6_Vw_condacc_QVwVw(Q6_Q_vcmp_gt_VwVw(magnitude, words(0x7bff)), bits, rebias);
    // subnormal: magnitude * 2^-24, normalized; zero stays zero
    const HVX_Vector zeros = Q6_Vuw_vcl0_Vuw(magnitude);
    const HVX_Vector fraction = Q6_Vw_vasl_VwVw(magnitude, Q6_Vw_vsub_VwVw(zeros, words(8)));
    const HVX_Vector small = Q6_Vw_vadd_VwVw(fraction, Q6_Vw_vasl_VwR(Q6_Vw_vsub_VwVw(words(133), zeros), 23));
    const HVX_VectorPred none = Q6_Q_vcmp_eq_VwVw(magnitude, words(0));
    const HVX_VectorPred normal = Q6_Q_vcmp_gt_VwVw(magnitude, words(0x3ff));
    bits = Q6_V_vmux_QVV(normal, bits, Q6_V_vmux_QVV(none, words(0), small));
    return Q6_V_vor_VV(bits, Q6_Vw_vasl_VwR(Q6_V_vand_VV(h, words(0x8000)), 16));
}

// x / 2^shift for non-negative x and shift 1..31 per lane, to nearest, ties to even. x + 2^(shift-1) must fit 32 bits.
inline HVX_Vector shift_to_even(HVX_Vector x, HVX_Vector shift) {
    const HVX_Vector one = words(1);
    const HVX_Vector odd = Q6_V_vand_VV(Q6_Vw_vlsr_VwVw(x, shift), one);
    const HVX_Vector half = Q6_Vw_vasl_VwVw(one, Q6_Vw_vsub_VwVw(shift, one));
    const HVX_Vector bias = Q6_Vw_vadd_VwVw(Q6_Vw_vsub_VwVw(half, one), odd);
    return Q6_Vw_vlsr_VwVw(Q6_Vw_vadd_VwVw(x, bias), shift);
}

// 32 floats to FP16 bits in the low half of each word: to nearest even, infinity where it overflows, NaN stays NaN.
inline HVX_Vector float_to_half(HVX_Vector f) {
    const HVX_Vector magnitude = Q6_V_vand_VV(f, words(0x7fffffff));
    const HVX_Vector odd = Q6_V_vand_VV(Q6_Vuw_vlsr_VuwR(magnitude, 13), words(1));
    const HVX_Vector rebias = words(0xfffu - (112u << 23));
    HVX_Vector bits = Q6_Vuw_vlsr_VuwR(Q6_Vw_vadd_VwVw(Q6_Vw_vadd_VwVw(magnitude, rebias), odd), 13);
    // below 2^-14: the multiple of 2^-24 that is nearest
    const HVX_Vector shift = Q6_Vw_vmin_VwVw(Q6_Vw_vsub_VwVw(words(126), Q6_Vuw_vlsr_VuwR(magnitude, 23)), words(31));
    const HVX_Vector mantissa = Q6_V_vor_VV(Q6_V_vand_VV(magnitude, words(0x7fffff)), words(0x800000));
    const HVX_VectorPred normal = Q6_Q_vcmp_gt_VwVw(magnitude, words(0x387fffff));
    bits = Q6_V_vmux_QVV(normal, bits, shift_to_even(mantissa, shift));
    const HVX_VectorPred large = Q6_Q_vcmp_gt_VwVw(magnitude, words(0x477fffff));
    bits = Q6_V_vmux_QVV(large, words(0x7c00), bits);
    const HVX_Vector payload = Q6_V_vand_VV(Q6_Vuw_vlsr_VuwR(magnitude, 13), words(0x3ff));
    const HVX_VectorPred nan = Q6_Q_vcmp_gt_VwVw(magnitude, words(0x7f800000));
    bits = Q6_V_vmux_QVV(nan, Q6_V_vor_VV(words(0x7e00), payload), bits);
    return Q6_V_vor_VV(bits, Q6_V_vand_VV(Q6_Vuw_vlsr_VuwR(f, 16), words(0x8000)));
}

// 64 FP16 numbers of two vectors of words, interleaved: even[0], odd[0], even[1], ...
inline HVX_Vector interleave(HVX_Vector even, HVX_Vector odd) { return Q6_Vh_vshuffe_VhVh(odd, even); }

// 64 halves to words: the even ones in the first vector, the odd ones in the second.
inline HVX_VectorPair deinterleave(HVX_Vector h) { return Q6_Wuw_vzxt_Vuh(h); }

} // namespace tb::npu::hvx

#endif // TILEBEAM_NPU_KERNELS_HVX_H
