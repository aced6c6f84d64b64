// The HVX intrinsics that the kernels use, on the host: stands in for clang's header of this name, so that kernels
// compile unchanged with g++ and their arithmetic can be checked where the real instructions cannot run.
//
// Instructions of v66 follow the architecture manual, and tests/test_hvx.py compares each with qemu-hexagon. Those of
// v68 (qfloat) have nothing to be compared with. qf16 and qf32 are emulated as FP16 and float, every operation rounded
// to nearest even: what V79 specifies; before V79 a result may differ in its last bit.
#ifndef TILEBEAM_TESTS_HVX_EMULATED_PROTOS_H
#define TILEBEAM_TESTS_HVX_EMULATED_PROTOS_H

#include <cstdint>
#include <cstring>

#include "half.h"
#include "hexagon_types.h"

namespace hvx_emulated {

constexpr int bytes = 128;

template <class T> struct lanes {
    static constexpr int count = bytes / static_cast<int>(sizeof(T));
    T at[count];
    lanes() : at{} {}
    explicit lanes(HVX_Vector v) { std::memcpy(at, &v, bytes); }
    operator HVX_Vector() const {
        HVX_Vector v;
        std::memcpy(&v, at, bytes);
        return v;
    }
};

inline HVX_VectorPair pair(HVX_Vector low, HVX_Vector high) {
    HVX_VectorPair p;
    std::memcpy(&p, &low, bytes);
    std::memcpy(reinterpret_cast<char *>(&p) + bytes, &high, bytes);
    return p;
}

inline HVX_Vector part(HVX_VectorPair p, int i) {
    HVX_Vector v;
    std::memcpy(&v, reinterpret_cast<const char *>(&p) + i * bytes, bytes);
    return v;
}

// r[i] = f(i)
template <class T, class F> HVX_Vector make(F && f) {
    lanes<T> r;
    for (int i = 0; i < r.count; i++)
        r.at[i] = static_cast<T>(f(i));
    return r;
}

template <class T, class F> HVX_Vector map(HVX_Vector u, F && f) {
    const lanes<T> a(u);
    return make<T>([&](int i) { return f(a.at[i]); });
}

template <class T, class F> HVX_Vector map(HVX_Vector u, HVX_Vector v, F && f) {
    const lanes<T> a(u), b(v);
    return make<T>([&](int i) { return f(a.at[i], b.at[i]); });
}

// Shifts by a register take five or four bits of the amount; by a vector, a signed number of one bit more.
inline int32_t signed_amount(uint32_t amount, int width) {
    const int sign = 1 << width;
    return (static_cast<int>(amount & static_cast<uint32_t>(2 * sign - 1)) ^ sign) - sign;
}

// vasl and vlsr by a vector: the other way where the amount is negative; to the right vasl keeps the sign.
inline uint32_t shift_left(uint32_t x, uint32_t amount) {
    const int32_t left = signed_amount(amount, 5);
    const int64_t wide = static_cast<int32_t>(x);
    return static_cast<uint32_t>(left >= 0 ? static_cast<uint64_t>(x) << left : static_cast<uint64_t>(wide >> -left));
}

inline uint32_t shift_right(uint32_t x, uint32_t amount) {
    const int32_t right = signed_amount(amount, 5);
    const uint64_t wide = x;
    return static_cast<uint32_t>(right >= 0 ? wide >> right : wide << -right);
}

template <class T, class F> HVX_VectorPred compare(HVX_Vector u, HVX_Vector v, F && f) {
    return map<T>(u, v, [&](T a, T b) { return f(a, b) ? -1 : 0; });
}

// vlut16: the half of word (index % 32), the odd one if bit 1 of `which` is set.
inline HVX_VectorPair look_up16(HVX_Vector u, HVX_Vector v, int which, bool match) {
    const lanes<uint8_t> index(u);
    const lanes<uint16_t> table(v);
    const auto one = [&](int i) -> uint16_t {
        const int wanted = which & 15, odd = which >> 1 & 1;
        int at = index.at[i];
        if (match && at >> 4 != wanted) return 0;
        if (!match) at = (at & 15) | wanted << 4;
        return table.at[at % 32 * 2 + odd];
    };
    return pair(make<uint16_t>([&](int i) { return one(2 * i); }),
                make<uint16_t>([&](int i) { return one(2 * i + 1); }));
}

inline float half(uint16_t h) { return tb_half_to_float(h); }
inline float real(uint32_t w) { return tb_bits_float(w); }

} // namespace hvx_emulated

// ---- whole vectors

inline HVX_Vector Q6_V_lo_W(HVX_VectorPair p) { return hvx_emulated::part(p, 0); }
inline HVX_Vector Q6_V_hi_W(HVX_VectorPair p) { return hvx_emulated::part(p, 1); }
inline HVX_VectorPair Q6_W_vcombine_VV(HVX_Vector high, HVX_Vector low) { return hvx_emulated::pair(low, high); }
inline HVX_Vector Q6_V_vand_VV(HVX_Vector u, HVX_Vector v) { return u & v; }
inline HVX_Vector Q6_V_vor_VV(HVX_Vector u, HVX_Vector v) { return u | v; }
inline HVX_Vector Q6_V_vxor_VV(HVX_Vector u, HVX_Vector v) { return u ^ v; }
inline HVX_Vector Q6_V_vsplat_R(int32_t r) {
    return hvx_emulated::make<int32_t>([=](int) { return r; });
}
inline HVX_Vector Q6_Vh_vsplat_R(int32_t r) {
    return hvx_emulated::make<int16_t>([=](int) { return r; });
}
inline HVX_Vector Q6_V_vmux_QVV(HVX_VectorPred q, HVX_Vector u, HVX_Vector v) { return (q & u) | (~q & v); }
inline HVX_Vector Q6_V_vdelta_VV(HVX_Vector u, HVX_Vector v) {
    hvx_emulated::lanes<uint8_t> now(u);
    const hvx_emulated::lanes<uint8_t> control(v);
    for (int distance = 64; distance > 0; distance /= 2) {
        const hvx_emulated::lanes<uint8_t> before(now);
        for (int i = 0; i < 128; i++)
            now.at[i] = before.at[(control.at[i] & distance) != 0 ? i ^ distance : i];
    }
    return now;
}
inline HVX_Vector Q6_V_vror_VR(HVX_Vector u, int32_t r) {
    const hvx_emulated::lanes<uint8_t> a(u);
    return hvx_emulated::make<uint8_t>([&](int i) { return a.at[(i + r) & 127]; });
}
inline HVX_VectorPred Q6_Q_vsetq_R(int32_t r) {
    return hvx_emulated::make<int8_t>([=](int i) { return i < (r & 127) ? -1 : 0; });
}
inline HVX_VectorPred Q6_Q_and_QQ(HVX_VectorPred s, HVX_VectorPred t) { return s & t; }
inline HVX_VectorPred Q6_Q_and_QQn(HVX_VectorPred s, HVX_VectorPred t) { return s & ~t; }

// ---- words

#define TB_WORDS(name, type, expression)                                                                               \
    inline HVX_Vector name(HVX_Vector u, HVX_Vector v) {                                                               \
        return hvx_emulated::map<type>(u, v, [](type a, type b) { return expression; });                               \
    }
TB_WORDS(Q6_Vw_vadd_VwVw, uint32_t, a + b)
TB_WORDS(Q6_Vw_vsub_VwVw, uint32_t, a - b)
TB_WORDS(Q6_Vw_vmin_VwVw, int32_t, a < b ? a : b)
TB_WORDS(Q6_Vw_vmax_VwVw, int32_t, a > b ? a : b)
TB_WORDS(Q6_Vw_vasl_VwVw, uint32_t, hvx_emulated::shift_left(a, b))
TB_WORDS(Q6_Vw_vlsr_VwVw, uint32_t, hvx_emulated::shift_right(a, b))
TB_WORDS(Q6_Vh_vadd_VhVh, uint16_t, a + b)
TB_WORDS(Q6_Vh_vsub_VhVh, uint16_t, a - b)
TB_WORDS(Q6_Vh_vmax_VhVh, int16_t, a > b ? a : b)
TB_WORDS(Q6_Vb_vsub_VbVb, uint8_t, a - b)
#undef TB_WORDS

inline HVX_Vector Q6_Vw_condacc_QVwVw(HVX_VectorPred q, HVX_Vector x, HVX_Vector u) {
    return Q6_V_vmux_QVV(q, Q6_Vw_vadd_VwVw(x, u), x);
}
inline HVX_Vector Q6_Vw_vasl_VwR(HVX_Vector u, int32_t r) {
    return hvx_emulated::map<uint32_t>(u, [=](uint32_t a) { return a << (r & 31); });
}
inline HVX_Vector Q6_Vuw_vlsr_VuwR(HVX_Vector u, int32_t r) {
    return hvx_emulated::map<uint32_t>(u, [=](uint32_t a) { return a >> (r & 31); });
}
inline HVX_Vector Q6_Vuw_vcl0_Vuw(HVX_Vector u) {
    return hvx_emulated::map<uint32_t>(u, [](uint32_t a) { return a == 0 ? 32 : __builtin_clz(a); });
}
inline HVX_VectorPred Q6_Q_vcmp_gt_VwVw(HVX_Vector u, HVX_Vector v) {
    return hvx_emulated::compare<int32_t>(u, v, [](int32_t a, int32_t b) { return a > b; });
}
inline HVX_VectorPred Q6_Q_vcmp_eq_VwVw(HVX_Vector u, HVX_Vector v) {
    return hvx_emulated::compare<int32_t>(u, v, [](int32_t a, int32_t b) { return a == b; });
}

// ---- halves

inline HVX_VectorPred Q6_Q_vcmp_gt_VhVh(HVX_Vector u, HVX_Vector v) {
    return hvx_emulated::compare<int16_t>(u, v, [](int16_t a, int16_t b) { return a > b; });
}
inline HVX_VectorPred Q6_Q_vcmp_eq_VhVh(HVX_Vector u, HVX_Vector v) {
    return hvx_emulated::compare<int16_t>(u, v, [](int16_t a, int16_t b) { return a == b; });
}
inline HVX_Vector Q6_Vh_vabs_Vh(HVX_Vector u) {
    return hvx_emulated::map<int16_t>(u, [](int16_t a) { return a < 0 ? -a : a; });
}
inline HVX_Vector Q6_Vh_vasl_VhR(HVX_Vector u, int32_t r) {
    return hvx_emulated::map<uint16_t>(u, [=](uint16_t a) { return a << (r & 15); });
}
inline HVX_Vector Q6_Vh_vasr_VhR(HVX_Vector u, int32_t r) {
    return hvx_emulated::map<int16_t>(u, [=](int16_t a) { return a >> (r & 15); });
}
inline HVX_Vector Q6_Vuh_vlsr_VuhR(HVX_Vector u, int32_t r) {
    return hvx_emulated::map<uint16_t>(u, [=](uint16_t a) { return a >> (r & 15); });
}

// ---- moving

// Halves of even words' places: v's even halves at even places, u's at odd ones.
inline HVX_Vector Q6_Vh_vshuffe_VhVh(HVX_Vector u, HVX_Vector v) {
    const hvx_emulated::lanes<uint16_t> a(u), b(v);
    return hvx_emulated::make<uint16_t>([&](int i) { return i & 1 ? a.at[i - 1] : b.at[i]; });
}
inline HVX_Vector Q6_Vh_vpacke_VwVw(HVX_Vector u, HVX_Vector v) {
    const hvx_emulated::lanes<uint16_t> a(u), b(v);
    return hvx_emulated::make<uint16_t>([&](int i) { return i < 32 ? b.at[2 * i] : a.at[2 * i - 64]; });
}
// Only -2: v's and u's halves alternate.
inline HVX_VectorPair Q6_W_vshuff_VVR(HVX_Vector u, HVX_Vector v, int32_t) {
    const hvx_emulated::lanes<uint16_t> a(u), b(v);
    const auto half = [&](int first) {
        return hvx_emulated::make<uint16_t>([&](int i) { return i & 1 ? a.at[first + i / 2] : b.at[first + i / 2]; });
    };
    return hvx_emulated::pair(half(0), half(32));
}
inline HVX_VectorPair Q6_Wuw_vunpack_Vuh(HVX_Vector u) {
    const hvx_emulated::lanes<uint16_t> a(u);
    return hvx_emulated::pair(hvx_emulated::make<uint32_t>([&](int i) { return a.at[i]; }),
                              hvx_emulated::make<uint32_t>([&](int i) { return a.at[32 + i]; }));
}
inline HVX_VectorPair Q6_Wuh_vunpack_Vub(HVX_Vector u) {
    const hvx_emulated::lanes<uint8_t> a(u);
    return hvx_emulated::pair(hvx_emulated::make<uint16_t>([&](int i) { return a.at[i]; }),
                              hvx_emulated::make<uint16_t>([&](int i) { return a.at[64 + i]; }));
}
inline HVX_VectorPair Q6_Wuw_vzxt_Vuh(HVX_Vector u) {
    const hvx_emulated::lanes<uint16_t> a(u);
    return hvx_emulated::pair(hvx_emulated::make<uint32_t>([&](int i) { return a.at[2 * i]; }),
                              hvx_emulated::make<uint32_t>([&](int i) { return a.at[2 * i + 1]; }));
}
inline HVX_VectorPair Q6_Wuh_vzxt_Vub(HVX_Vector u) {
    const hvx_emulated::lanes<uint8_t> a(u);
    return hvx_emulated::pair(hvx_emulated::make<uint16_t>([&](int i) { return a.at[2 * i]; }),
                              hvx_emulated::make<uint16_t>([&](int i) { return a.at[2 * i + 1]; }));
}
inline HVX_VectorPair Q6_Wh_vsxt_Vb(HVX_Vector u) {
    const hvx_emulated::lanes<int8_t> a(u);
    return hvx_emulated::pair(hvx_emulated::make<int16_t>([&](int i) { return a.at[2 * i]; }),
                              hvx_emulated::make<int16_t>([&](int i) { return a.at[2 * i + 1]; }));
}

// ---- tables, gather, scatter

inline HVX_VectorPair Q6_Wh_vlut16_VbVhR(HVX_Vector u, HVX_Vector v, int32_t r) {
    return hvx_emulated::look_up16(u, v, r, true);
}
inline HVX_VectorPair Q6_Wh_vlut16or_WhVbVhR(HVX_VectorPair x, HVX_Vector u, HVX_Vector v, int32_t r) {
    return x | hvx_emulated::look_up16(u, v, r, true);
}
inline HVX_VectorPair Q6_Wh_vlut16_VbVhR_nomatch(HVX_Vector u, HVX_Vector v, int32_t r) {
    return hvx_emulated::look_up16(u, v, r, false);
}
inline HVX_Vector Q6_Vb_vlut32_VbVbR_nomatch(HVX_Vector u, HVX_Vector v, int32_t r) {
    const hvx_emulated::lanes<uint8_t> index(u), table(v);
    return hvx_emulated::make<uint8_t>([&](int i) {
        const int at = (index.at[i] & 31) | (r & 7) << 5;
        return table.at[at % 64 * 2 + (r >> 1 & 1)];
    });
}
inline void Q6_vgather_ARMVh(HVX_Vector * out, intptr_t base, int32_t last, HVX_Vector offsets) {
    const hvx_emulated::lanes<uint16_t> at(offsets);
    for (int i = 0; i < 64; i++) {
        const char * from = reinterpret_cast<const char *>(base) + at.at[i];
        if (at.at[i] <= last) std::memcpy(reinterpret_cast<char *>(out) + 2 * i, from, 2);
    }
}
inline void Q6_vscatter_QRMVhV(HVX_VectorPred q, intptr_t base, int32_t last, HVX_Vector offsets, HVX_Vector values) {
    const hvx_emulated::lanes<uint16_t> at(offsets), x(values), wanted(q);
    for (int i = 0; i < 64; i++) {
        char * to = reinterpret_cast<char *>(base) + at.at[i];
        if (at.at[i] <= last && wanted.at[i] != 0) std::memcpy(to, &x.at[i], 2);
    }
}
inline void Q6_vscatter_RMVhV(intptr_t base, int32_t last, HVX_Vector offsets, HVX_Vector values) {
    Q6_vscatter_QRMVhV(Q6_V_vsplat_R(-1), base, last, offsets, values);
}

// ---- multiplication

inline HVX_VectorPair Q6_Wuw_vmpy_VuhVuh(HVX_Vector u, HVX_Vector v) {
    const hvx_emulated::lanes<uint16_t> a(u), b(v);
    const auto product = [&](int i) { return static_cast<uint32_t>(a.at[i]) * b.at[i]; };
    return hvx_emulated::pair(hvx_emulated::make<uint32_t>([&](int i) { return product(2 * i); }),
                              hvx_emulated::make<uint32_t>([&](int i) { return product(2 * i + 1); }));
}
// Words times the odd halves of v.
inline HVX_Vector Q6_Vw_vmpyio_VwVh(HVX_Vector u, HVX_Vector v) {
    const hvx_emulated::lanes<int32_t> a(u);
    const hvx_emulated::lanes<int16_t> b(v);
    return hvx_emulated::make<uint32_t>([&](int i) { return static_cast<int64_t>(a.at[i]) * b.at[2 * i + 1]; });
}
inline HVX_Vector Q6_Vw_vdmpy_VhVh_sat(HVX_Vector u, HVX_Vector v) {
    const hvx_emulated::lanes<int16_t> a(u), b(v);
    return hvx_emulated::make<int32_t>([&](int i) {
        const int64_t sum = int64_t{a.at[2 * i]} * b.at[2 * i] + int64_t{a.at[2 * i + 1]} * b.at[2 * i + 1];
        return sum > INT32_MAX ? INT32_MAX : sum;
    });
}
inline HVX_VectorPair Q6_Wuh_vmpy_VubRub(HVX_Vector u, int32_t r) {
    const hvx_emulated::lanes<uint8_t> a(u);
    uint8_t b[4];
    std::memcpy(b, &r, 4);
    const auto product = [&](int i) { return a.at[i] * b[i % 4]; };
    return hvx_emulated::pair(hvx_emulated::make<uint16_t>([&](int i) { return product(2 * i); }),
                              hvx_emulated::make<uint16_t>([&](int i) { return product(2 * i + 1); }));
}
inline HVX_Vector Q6_Vw_vrmpyacc_VwVubRb(HVX_Vector x, HVX_Vector u, int32_t r) {
    const hvx_emulated::lanes<int32_t> sum(x);
    const hvx_emulated::lanes<uint8_t> a(u);
    int8_t b[4];
    std::memcpy(b, &r, 4);
    return hvx_emulated::make<int32_t>([&](int i) {
        return sum.at[i] + a.at[4 * i] * b[0] + a.at[4 * i + 1] * b[1] + a.at[4 * i + 2] * b[2] +
               a.at[4 * i + 3] * b[3];
    });
}

// ---- v68: qfloat

#define TB_QFLOAT16(name, expression)                                                                                  \
    inline HVX_Vector name(HVX_Vector u, HVX_Vector v) {                                                               \
        return hvx_emulated::map<uint16_t>(u, v, [](uint16_t x, uint16_t y) {                                          \
            const float a = hvx_emulated::half(x), b = hvx_emulated::half(y);                                          \
            return tb_float_to_half(expression);                                                                       \
        });                                                                                                            \
    }
TB_QFLOAT16(Q6_Vqf16_vmpy_VhfVhf, a * b)
TB_QFLOAT16(Q6_Vqf16_vmpy_Vqf16Vhf, a * b)
TB_QFLOAT16(Q6_Vqf16_vmpy_Vqf16Vqf16, a * b)
TB_QFLOAT16(Q6_Vqf16_vadd_VhfVhf, a + b)
TB_QFLOAT16(Q6_Vqf16_vadd_Vqf16Vhf, a + b)
TB_QFLOAT16(Q6_Vqf16_vsub_VhfVhf, a - b)
TB_QFLOAT16(Q6_Vqf16_vsub_Vqf16Vhf, a - b)
#undef TB_QFLOAT16

#define TB_QFLOAT32(name, expression)                                                                                  \
    inline HVX_Vector name(HVX_Vector u, HVX_Vector v) {                                                               \
        return hvx_emulated::map<uint32_t>(u, v, [](uint32_t x, uint32_t y) {                                          \
            const float a = hvx_emulated::real(x), b = hvx_emulated::real(y);                                          \
            return tb_float_bits(expression);                                                                          \
        });                                                                                                            \
    }
TB_QFLOAT32(Q6_Vqf32_vmpy_VsfVsf, a * b)
TB_QFLOAT32(Q6_Vqf32_vmpy_Vqf32Vqf32, a * b)
TB_QFLOAT32(Q6_Vqf32_vadd_VsfVsf, a + b)
TB_QFLOAT32(Q6_Vqf32_vadd_Vqf32Vqf32, a + b)
TB_QFLOAT32(Q6_Vqf32_vadd_Vqf32Vsf, a + b)
TB_QFLOAT32(Q6_Vqf32_vsub_VsfVsf, a - b)
#undef TB_QFLOAT32

// Words of the even halves, then of the odd ones, and back.
inline HVX_VectorPair Q6_Wqf32_vmpy_VhfVhf(HVX_Vector u, HVX_Vector v) {
    const hvx_emulated::lanes<uint16_t> a(u), b(v);
    const auto product = [&](int i) {
        return tb_float_bits(hvx_emulated::half(a.at[i]) * hvx_emulated::half(b.at[i]));
    };
    return hvx_emulated::pair(hvx_emulated::make<uint32_t>([&](int i) { return product(2 * i); }),
                              hvx_emulated::make<uint32_t>([&](int i) { return product(2 * i + 1); }));
}
inline HVX_Vector Q6_Vhf_equals_Wqf32(HVX_VectorPair p) {
    const hvx_emulated::lanes<uint32_t> even(Q6_V_lo_W(p)), odd(Q6_V_hi_W(p));
    return hvx_emulated::make<uint16_t>(
        [&](int i) { return tb_float_to_half(hvx_emulated::real(i & 1 ? odd.at[i / 2] : even.at[i / 2])); });
}
inline HVX_Vector Q6_Vhf_equals_Vqf16(HVX_Vector u) { return u; }
inline HVX_Vector Q6_Vsf_equals_Vqf32(HVX_Vector u) { return u; }

#endif // TILEBEAM_TESTS_HVX_EMULATED_PROTOS_H
