// GEMM with types of 256 k on vrmpy: 32 columns x 4 k of a tile per vector, activations from a scalar register.
//
// v66 has no HVX floating point: its float step, one in 256 k, is scalar, in the portable kernel's order.
#include "kernels/gemm_k.h"

#include "kernels/hvx/code_book.h"
#include "kernels/hvx/hvx.h"

namespace tb::npu {

namespace {

using namespace hvx;

#if TILEBEAM_HVX_FLOAT

struct float_lanes {
    using floats = HVX_Vector;
    static floats load_floats(const float * p) { return load(p); }
    static void store_floats(float * p, floats x) { store(p, x); }
    static floats from_bits(HVX_Vector v) { return v; }
    static floats broadcast(float x) {
        int32_t bits;
        std::memcpy(&bits, &x, sizeof(bits));
        return Q6_V_vsplat_R(bits);
    }
    // In halves of 16 bits: below 2^22 in magnitude, an integer plus the bits of 1.5 * 2^23 is a float.
    static floats to_floats(HVX_Vector x) {
        const HVX_Vector magic = words(0x4b400000), high_magic = words(0x4b408000); // the second: 2^15 more
        const HVX_Vector low = Q6_V_vand_VV(x, words(0xffff));
        const HVX_Vector high = Q6_Vuw_vlsr_VuwR(Q6_V_vxor_VV(x, words(0x80000000)), 16);
        const HVX_Vector l = Q6_Vqf32_vsub_VsfVsf(Q6_Vw_vadd_VwVw(low, magic), magic);
        const HVX_Vector h = Q6_Vqf32_vsub_VsfVsf(Q6_Vw_vadd_VwVw(high, magic), high_magic);
        const HVX_Vector scaled = Q6_Vqf32_vmpy_VsfVsf(Q6_Vsf_equals_Vqf32(h), words(0x47800000)); // 2^16
        return Q6_Vsf_equals_Vqf32(Q6_Vqf32_vadd_Vqf32Vqf32(scaled, l));
    }
    static floats mul(floats a, floats b) { return Q6_Vsf_equals_Vqf32(Q6_Vqf32_vmpy_VsfVsf(a, b)); }
    static floats fma(floats a, floats b, floats c) {
        return Q6_Vsf_equals_Vqf32(Q6_Vqf32_vadd_Vqf32Vsf(Q6_Vqf32_vmpy_VsfVsf(a, b), c));
    }
    static floats fms(floats a, floats b, floats c) { return fma(a, b, Q6_V_vxor_VV(c, words(0x80000000))); }
};

#else

struct float_lanes {
    struct floats {
        alignas(128) float at[gemm_panel];
    };
    template <class F> static floats each(F && f) {
        floats r;
        for (int i = 0; i < gemm_panel; i++)
            r.at[i] = f(i);
        return r;
    }
    static floats load_floats(const float * p) {
        return each([=](int i) { return p[i]; });
    }
    static void store_floats(float * p, const floats & x) { std::memcpy(p, x.at, sizeof(x.at)); }
    static floats from_bits(HVX_Vector v) {
        floats r;
        store_aligned(r.at, v);
        return r;
    }
    static floats broadcast(float x) {
        return each([=](int) { return x; });
    }
    static floats to_floats(HVX_Vector x) {
        alignas(128) int32_t v[gemm_panel];
        store_aligned(v, x);
        return each([&](int i) { return static_cast<float>(v[i]); });
    }
    static floats mul(const floats & a, const floats & b) {
        return each([&](int i) { return a.at[i] * b.at[i]; });
    }
    static floats fma(const floats & a, const floats & b, const floats & c) {
        return each([&](int i) { return c.at[i] + a.at[i] * b.at[i]; });
    }
    static floats fms(const floats & a, const floats & b, const floats & c) {
        return each([&](int i) { return a.at[i] * b.at[i] - c.at[i]; });
    }
};

#endif

struct k_unit : float_lanes {
    using ints = HVX_Vector;
    using float_lanes::broadcast;
    static constexpr int width = 32;
    static constexpr bool signed_weights = false;
    static constexpr bool starts = false;

    static ints load(const uint8_t * p) { return hvx::load(p); }
    static void store(uint8_t * p, ints x) { hvx::store(p, x); }
    static ints zeros() { return words(0); }
    static ints broadcast(int32_t x) { return Q6_V_vsplat_R(x); }
    static ints masked(ints x, int bits) { return Q6_V_vand_VV(x, words(0x01010101u * static_cast<uint32_t>(bits))); }
    static ints less_bytes(ints x, int by) {
        return Q6_Vb_vsub_VbVb(x, words(0x01010101u * static_cast<uint32_t>(by)));
    }
    static ints either(ints a, ints b) { return Q6_V_vor_VV(a, b); }
    static ints low_nibbles(ints x) { return masked(x, 15); }
    static ints high_nibbles(ints x) { return masked(Q6_Vuh_vlsr_VuhR(x, 4), 15); }
    // To the left, or right if negative; bits of neighbouring bytes come along.
    static ints shifted(ints x, int by) { return by < 0 ? Q6_Vuh_vlsr_VuhR(x, -by) : Q6_Vh_vasl_VhR(x, by); }

    // Of bytes times `by`, modulo 256, the first digit to the base of 3 that follows the point: times 3, the carry.
    static ints top_digits(ints x, int by) {
        const HVX_VectorPair products = Q6_Wuh_vmpy_VubRub(x, 0x01010101 * by);
        const auto carry = [](HVX_Vector v) {
            v = Q6_V_vand_VV(v, halves(0xff));
            return Q6_Vuh_vlsr_VuhR(Q6_Vh_vadd_VhVh(v, Q6_Vh_vasl_VhR(v, 1)), 8);
        };
        return either(carry(Q6_V_lo_W(products)), Q6_Vh_vasl_VhR(carry(Q6_V_hi_W(products)), 8));
    }

    static ints load_sums(const int32_t * p) { return hvx::load(p); }
    static void store_sums(int32_t * p, ints x) { hvx::store(p, x); }
    // Two rows of bytes, 32 apart, as words with one in each. Nothing past them is read, as in load_halves.
    static HVX_VectorPair two_rows(const uint8_t * p) {
        return Q6_Wuw_vunpack_Vuh(Q6_V_hi_W(Q6_Wuh_vunpack_Vub(hvx::load(p - k_before))));
    }
    // A byte per column to the upper half of its word: a factor for vmpyio.
    template <bool is_signed> static ints widened(const uint8_t * p) {
        const HVX_Vector upper = Q6_Vw_vasl_VwR(Q6_V_lo_W(two_rows(p)), is_signed ? 24 : 16);
        return is_signed ? Q6_Vh_vasr_VhR(upper, 8) : upper;
    }
    // Two rows of bytes, 32 apart, to pairs of 16 bits.
    template <bool is_signed> static ints byte_pairs(const uint8_t * p) {
        const HVX_VectorPair both = two_rows(p);
        const HVX_Vector v = Q6_V_vor_VV(Q6_V_lo_W(both), Q6_Vw_vasl_VwR(Q6_V_hi_W(both), 16));
        return is_signed ? Q6_Vh_vasr_VhR(Q6_Vh_vasl_VhR(v, 8), 8) : v;
    }
    static ints add_pairs(ints sum, ints a, ints b) { return add(sum, Q6_Vw_vdmpy_VhVh_sat(a, b)); }
    static ints add(ints a, ints b) { return Q6_Vw_vadd_VwVw(a, b); }
    static ints add_product(ints sum, ints a, ints b) { return add(sum, Q6_Vw_vmpyio_VwVh(a, b)); }
    // a - (b << by)
    template <int by> static ints less_shifted(ints a, ints b) { return Q6_Vw_vsub_VwVw(a, Q6_Vw_vasl_VwR(b, by)); }

    static floats load_halves(const uint8_t * p) {
        return from_bits(half_to_float(Q6_V_hi_W(Q6_Wuw_vunpack_Vuh(hvx::load(p - k_before)))));
    }

    // `n` rows, each with sums of its own: a sum is the next one's operand.
    template <class Format, int n>
    static void some_rows(const ints (&w)[8], const ints * scale, const uint8_t * q, int32_t (*sums)[gemm_panel]) {
        constexpr int quads = 8 / Format::scales;
#pragma GCC unroll 2
        for (int s = 0; s < Format::scales; s++) {
            ints dots[n];
#pragma GCC unroll 4
            for (int m = 0; m < n; m++)
                dots[m] = zeros();
#pragma GCC unroll 8
            for (int j = quads * s; j < quads * s + quads; j++) {
#pragma GCC unroll 4
                for (int m = 0; m < n; m++)
                    dots[m] = Q6_Vw_vrmpyacc_VwVubRb(dots[m], w[j], read_k_int(q + TB_K_BLOCK * m + 4 * j));
            }
#pragma GCC unroll 4
            for (int m = 0; m < n; m++)
                store_sums(sums[m], add_product(load_sums(sums[m]), dots[m], scale[s]));
        }
    }

    template <class Format>
    static void tile(const Format & tile, const uint8_t * scales, const uint8_t * q, int rows,
                     int32_t (*sums)[gemm_panel]) {
        ints w[8], scale[Format::scales];
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            w[j] = tile.weights(j, 0);
#pragma GCC unroll 2
        for (int s = 0; s < Format::scales; s++)
            scale[s] = widened<!Format::minima>(scales + 32 * s);
        int m = 0;
        for (; m + 4 <= rows; m += 4)
            some_rows<Format, 4>(w, scale, q + TB_K_BLOCK * m, sums + m);
        for (; m < rows; m++)
            some_rows<Format, 1>(w, scale, q + TB_K_BLOCK * m, sums + m);
    }

    template <class Format>
    static void block(const uint8_t * panel, const uint8_t * scales, const k_record & r, int rows,
                      int32_t (*sums)[gemm_panel]) {
        k_tile_by_tile<Format>(panel, scales, r.q, rows, sums,
                               [&](const Format & of, const uint8_t * its_scales, const uint8_t * its_q, int) {
                                   tile(of, its_scales, its_q, rows, sums);
                               });
    }
};

template <class Book, int offset> constexpr byte_table book_bytes = table_of(Book::at, offset);

template <class Book, int offset> struct k_book<k_unit, Book, offset> {
    static HVX_Vector look_up(HVX_Vector quants) {
        return Q6_Vb_vlut32_VbVbR_nomatch(quants, load_aligned(book_bytes<Book, offset>.at), 0);
    }
};

} // namespace

void fill_gemm_hvx_k(gemm_kernels & k) { fill_k_kernels<k_unit>(k, TILEBEAM_K_NAMES("4x32_hvx")); }

} // namespace tb::npu
