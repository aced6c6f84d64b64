// Single v66 intrinsics by number, so that tests/test_hvx.py can compare the emulated ones with qemu-hexagon.
#ifndef TILEBEAM_TESTS_HVX_INTRINSIC_CASES_H
#define TILEBEAM_TESTS_HVX_INTRINSIC_CASES_H

#include "kernels/hvx/hvx.h"

namespace hvx_cases {

// What an intrinsic gets: up to four vectors and a scalar; what it gives: one or two vectors.
struct operands {
    HVX_Vector u, v, x, y;
    int32_t r;
    HVX_VectorPair xy() const { return Q6_W_vcombine_VV(y, x); }
    // any bits as a predicate, halves or words of it all set or all clear
    HVX_VectorPred words() const { return Q6_Q_vcmp_gt_VwVw(x, y); }
    HVX_VectorPred halves() const { return Q6_Q_vcmp_gt_VhVh(x, y); }
};

inline HVX_VectorPair one(HVX_Vector v) { return Q6_W_vcombine_VV(v, v); }

inline HVX_Vector shown(HVX_VectorPred q) { return Q6_V_vmux_QVV(q, Q6_V_vsplat_R(-1), Q6_V_vsplat_R(0)); }

using function = HVX_VectorPair (*)(const operands & o);

inline constexpr function functions[] = {
    [](const operands & o) -> HVX_VectorPair { return o.xy(); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_V_vsplat_R(o.r)); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_Vh_vsplat_R(o.r)); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_V_vmux_QVV(o.halves(), o.u, o.v)); },
    [](const operands & o) -> HVX_VectorPair { return one(shown(Q6_Q_and_QQn(o.words(), o.halves()))); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_Vw_vadd_VwVw(o.u, o.v)); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_Vw_vsub_VwVw(o.u, o.v)); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_Vw_vmin_VwVw(o.u, o.v)); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_Vw_vmax_VwVw(o.u, o.v)); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_Vw_vasl_VwVw(o.u, o.v)); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_Vw_vlsr_VwVw(o.u, o.v)); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_Vw_condacc_QVwVw(o.words(), o.u, o.v)); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_Vw_vasl_VwR(o.u, o.r)); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_Vuw_vlsr_VuwR(o.u, o.r)); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_Vuw_vcl0_Vuw(o.u)); },
    [](const operands & o) -> HVX_VectorPair { return one(shown(Q6_Q_vcmp_gt_VwVw(o.u, o.v))); },
    [](const operands & o) -> HVX_VectorPair { return one(shown(Q6_Q_vcmp_eq_VwVw(o.u, o.v))); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_Vh_vadd_VhVh(o.u, o.v)); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_Vh_vsub_VhVh(o.u, o.v)); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_Vh_vmax_VhVh(o.u, o.v)); },
    [](const operands & o) -> HVX_VectorPair { return one(shown(Q6_Q_vcmp_gt_VhVh(o.u, o.v))); },
    [](const operands & o) -> HVX_VectorPair { return one(shown(Q6_Q_vcmp_eq_VhVh(o.u, o.v))); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_Vh_vabs_Vh(o.u)); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_Vh_vasl_VhR(o.u, o.r)); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_Vh_vasr_VhR(o.u, o.r)); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_Vuh_vlsr_VuhR(o.u, o.r)); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_Vh_vshuffe_VhVh(o.u, o.v)); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_Vh_vpacke_VwVw(o.u, o.v)); },
    [](const operands & o) -> HVX_VectorPair { return Q6_W_vshuff_VVR(o.u, o.v, -2); },
    [](const operands & o) -> HVX_VectorPair { return Q6_Wuw_vunpack_Vuh(o.u); },
    [](const operands & o) -> HVX_VectorPair { return Q6_Wuw_vzxt_Vuh(o.u); },
    [](const operands & o) -> HVX_VectorPair { return Q6_Wuh_vunpack_Vub(o.u); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_V_vdelta_VV(o.u, o.v)); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_V_vror_VR(o.u, o.r)); },
    [](const operands & o) -> HVX_VectorPair { return one(shown(Q6_Q_vsetq_R(o.r))); },
    [](const operands & o) -> HVX_VectorPair { return one(shown(Q6_Q_and_QQ(o.words(), o.halves()))); },
    [](const operands & o) -> HVX_VectorPair { return Q6_Wuh_vzxt_Vub(o.u); },
    [](const operands & o) -> HVX_VectorPair { return Q6_Wh_vsxt_Vb(o.u); },
    [](const operands & o) -> HVX_VectorPair { return Q6_Wh_vlut16_VbVhR(o.u, o.v, o.r); },
    [](const operands & o) -> HVX_VectorPair { return Q6_Wh_vlut16or_WhVbVhR(o.xy(), o.u, o.v, o.r); },
    [](const operands & o) -> HVX_VectorPair { return Q6_Wh_vlut16_VbVhR_nomatch(o.u, o.v, o.r); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_Vb_vlut32_VbVbR_nomatch(o.u, o.v, o.r)); },
    [](const operands & o) -> HVX_VectorPair { return Q6_Wuw_vmpy_VuhVuh(o.u, o.v); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_Vw_vrmpyacc_VwVubRb(o.x, o.u, o.r)); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_Vb_vsub_VbVb(o.u, o.v)); },
    [](const operands & o) -> HVX_VectorPair { return Q6_Wuh_vmpy_VubRub(o.u, o.r); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_Vw_vmpyio_VwVh(o.u, o.v)); },
    [](const operands & o) -> HVX_VectorPair { return one(Q6_Vw_vdmpy_VhVh_sat(o.u, o.v)); },
};

inline constexpr uint32_t count = sizeof(functions) / sizeof(functions[0]);

// in: four vectors; out: two. Number `count` says how many there are.
inline size_t run(uint32_t number, int32_t scalar, const uint8_t * in, uint8_t * out) {
    using namespace tb::npu::hvx;
    if (number >= count) {
        std::memcpy(out, &count, sizeof(count));
        return sizeof(count);
    }
    const operands o{load(in), load(in + 128), load(in + 256), load(in + 384), scalar};
    const HVX_VectorPair r = functions[number](o);
    store(out, Q6_V_lo_W(r));
    store(out + 128, Q6_V_hi_W(r));
    return 256;
}

} // namespace hvx_cases

#endif // TILEBEAM_TESTS_HVX_INTRINSIC_CASES_H
