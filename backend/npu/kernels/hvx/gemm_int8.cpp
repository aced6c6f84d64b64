// Integer GEMM on vrmpy: 32 columns x 4 k of a tile per vector, unsigned weights times signed activations from a scalar
// register. Weights that are signed have 128 added to them, which the group's start values take out again.
//
// The sums of 32 k become floats and are scaled. v66 has no HVX floating point: scalar instructions do that, in the
// portable kernel's order, so that the results have its bits. From v68 on it is done in qf32.
#include <cstring>
#include <type_traits>

#include "kernels/hvx/code_book.h"
#include "kernels/hvx/hvx.h"
#include "kernels/kernels.h"

namespace tb::npu {

void fill_gemm_hvx_convert(gemm_kernels & k);
void fill_gemm_hvx_fp16(gemm_kernels & k);
void fill_gemm_hvx_k(gemm_kernels & k);

namespace {

using namespace hvx;

constexpr int max_rows = 8;

constexpr byte_table mxfp4_bytes = table_of(mxfp4_values, mxfp4_offset);

// Quads 2c and 2c + 1 through a table.
void look_up_quads(const byte_table & table, const uint8_t * tile, int c, HVX_Vector * w) {
    const HVX_Vector values = load_aligned(table.at), chunk = load(tile + 128 * c);
    w[0] = Q6_Vb_vlut32_VbVbR_nomatch(chunk, values, 0);
    w[1] = Q6_Vb_vlut32_VbVbR_nomatch(Q6_Vuh_vlsr_VuhR(chunk, 4), values, 0);
}

// A format gives the quads (four k of 32 columns) 2c and 2c + 1 of a tile as unsigned bytes, and its scales as floats.
struct half_scales {
    static constexpr size_t scale_bytes = TB_HALF_SCALES;
    static constexpr bool has_minima = false;
    static HVX_Vector scales(const uint8_t * end) {
        return half_to_float(Q6_V_hi_W(Q6_Wuw_vunpack_Vuh(load(end - 128)))); // nothing past the tile is read
    }
};

struct format_q4 : half_scales {
    static constexpr size_t quants = tile_of(TB_Q4_0_COL).quants;
    static constexpr int32_t offset = 8;
    static void load_quads(const uint8_t * tile, int c, HVX_Vector * w) {
        const HVX_Vector chunk = load(tile + 128 * c);
        w[0] = Q6_V_vand_VV(chunk, words(0x0f0f0f0f));
        w[1] = Q6_V_vand_VV(Q6_Vuh_vlsr_VuhR(chunk, 4), words(0x0f0f0f0f));
    }
};

// Scales, then minima.
struct half_scales_and_minima {
    static constexpr size_t scale_bytes = 2 * TB_HALF_SCALES;
    static constexpr bool has_minima = true;
    static HVX_Vector scales(const uint8_t * end) {
        return half_to_float(Q6_V_lo_W(Q6_Wuw_vunpack_Vuh(load(end - 128))));
    }
    static HVX_Vector minima(const uint8_t * end) {
        return half_to_float(Q6_V_hi_W(Q6_Wuw_vunpack_Vuh(load(end - 128))));
    }
};

// Q5_0, Q4_1 and Q5_1.
template <uint32_t type>
struct format_bits : std::conditional_t<tile_of(type).minima, half_scales_and_minima, half_scales> {
    static constexpr size_t quants = tile_of(type).quants;
    static constexpr int32_t offset = tile_of(type).minima ? gemm_minima_offset : 16;
    static void load_quads(const uint8_t * tile, int c, HVX_Vector * w) {
        format_q4::load_quads(tile, c, w);
        if constexpr (tile_of(type).fifth) {
            const HVX_Vector plane = load(tile + TB_QUANTS(4));
            for (int i = 0; i < 2; i++) {
                const int j = 2 * c + i; // bit j of a byte goes above the nibble
                const HVX_Vector bits = j < 4 ? Q6_Vh_vasl_VhR(plane, 4 - j) : Q6_Vuh_vlsr_VuhR(plane, j - 4);
                w[i] = Q6_V_vor_VV(w[i], Q6_V_vand_VV(bits, words(0x10101010)));
            }
        }
    }
};

// Q1_0 and Q2_0.
template <uint32_t type> struct format_few_bits : half_scales {
    static constexpr size_t quants = tile_of(type).quants;
    static constexpr int32_t offset = few_bits_offset;
    static void load_quads(const uint8_t * tile, int c, HVX_Vector * w) {
        constexpr bool one = quants == TB_QUANTS(1);
        const HVX_Vector plane = load(tile + (one ? 0 : 128 * (c / 2)));
        for (int i = 0; i < 2; i++) {
            const int j = 2 * c + i, by = one ? j - 1 : 2 * (j % 4); // to the right
            const HVX_Vector bits = by < 0 ? Q6_Vh_vasl_VhR(plane, -by) : Q6_Vuh_vlsr_VuhR(plane, by);
            w[i] = Q6_V_vand_VV(bits, words(one ? 0x02020202 : 0x03030303));
        }
    }
};

struct format_iq4nl : half_scales {
    static constexpr size_t quants = tile_of(TB_IQ4_NL_COL).quants;
    static constexpr int32_t offset = 128;
    static void load_quads(const uint8_t * tile, int c, HVX_Vector * w) { look_up_quads(iq4nl_bytes, tile, c, w); }
};

struct format_mxfp4 {
    static constexpr size_t quants = tile_of(TB_MXFP4_COL).quants, scale_bytes = TB_POWER_SCALES;
    static constexpr bool has_minima = false;
    static constexpr int32_t offset = mxfp4_offset;
    static void load_quads(const uint8_t * tile, int c, HVX_Vector * w) { look_up_quads(mxfp4_bytes, tile, c, w); }
    // A subnormal power is the larger of the two as an integer.
    static HVX_Vector scales(const uint8_t * end) {
        const HVX_Vector halves_of_bytes = Q6_V_hi_W(Q6_Wuh_vunpack_Vub(load(end - 128)));
        const HVX_Vector x = Q6_V_hi_W(Q6_Wuw_vunpack_Vuh(halves_of_bytes)), one = words(1);
        return Q6_Vw_vmax_VwVw(Q6_Vw_vasl_VwR(Q6_Vw_vsub_VwVw(x, one), 23),
                               Q6_Vw_vasl_VwR(Q6_Vw_vadd_VwVw(x, one), 21));
    }
};

struct format_nvfp4 : format_mxfp4 {
    static constexpr size_t quants = tile_of(TB_NVFP4_COL).quants, scale_bytes = TB_SMALL_SCALES;
    static constexpr bool halves = true;
    // UE4M3, halves of them, as FP16 numbers times 128; the NaN counts as 0.
    static HVX_Vector small(HVX_Vector x) {
        const HVX_Vector zero = words(0), bits = Q6_V_vand_VV(x, words(0x7f));
        const HVX_Vector f = half_to_float(Q6_Vw_vasl_VwR(bits, 7));
        const HVX_Vector scaled = Q6_V_vmux_QVV(Q6_Q_vcmp_eq_VwVw(f, zero), zero, Q6_Vw_vadd_VwVw(f, words(7u << 23)));
        return Q6_V_vmux_QVV(Q6_Q_vcmp_eq_VwVw(x, words(0x7f)), zero, scaled);
    }
    static HVX_VectorPair bytes_of(const uint8_t * end) {
        return Q6_Wuw_vunpack_Vuh(Q6_V_hi_W(Q6_Wuh_vunpack_Vub(load(end - 128))));
    }
    static HVX_Vector scales(const uint8_t * end) { return small(Q6_V_lo_W(bytes_of(end))); }
    static HVX_Vector minima(const uint8_t * end) { return small(Q6_V_hi_W(bytes_of(end))); }
};

struct bytes_quads {
    static constexpr size_t quants = tile_of(TB_Q8_0_COL).quants;
    static constexpr int32_t offset = 128;
    static void load_quads(const uint8_t * tile, int c, HVX_Vector * w) {
        for (int i = 0; i < 2; i++)
            w[i] = Q6_V_vxor_VV(load(tile + 256 * c + 128 * i), words(0x80808080));
    }
};

struct format_q8 : bytes_quads, half_scales {};

struct format_prepared : bytes_quads {
    static constexpr size_t scale_bytes = gemm_prepared_bytes - gemm_prepared_quants;
    static constexpr bool has_minima = false;
    static HVX_Vector scales(const uint8_t * end) { return load(end - 128); }
};

// A word of a record; without the alignment it would be loaded by bytes.
int32_t word_at(const uint8_t * p) {
    int32_t v;
    std::memcpy(&v, __builtin_assume_aligned(p, 4), 4);
    return v;
}

// -offset times the sum of 16 activations.
template <class Format> int32_t start_of_16(const uint8_t * q) {
    int32_t sum = 0;
    for (int i = 0; i < 16; i++)
        sum += static_cast<int8_t>(q[i]);
    return -Format::offset * sum;
}

#if TILEBEAM_HVX_FLOAT

// Below 2^22 in magnitude, an integer plus the bits of 1.5 * 2^23 is a float.
HVX_Vector int_to_qf32(HVX_Vector x) {
    const HVX_Vector magic = words(0x4b400000);
    return Q6_Vqf32_vsub_VsfVsf(Q6_Vw_vadd_VwVw(x, magic), magic);
}

// One row's 32 results while a panel runs: qf32.
struct results {
    HVX_Vector at;
    void open(const float * out, bool add) {
        const HVX_Vector zero = words(0);
        at = Q6_Vqf32_vadd_VsfVsf(add ? load(out) : zero, zero);
    }
    void add(HVX_Vector dots, HVX_Vector weight_scales, int32_t scale) {
        const HVX_Vector both = Q6_Vqf32_vmpy_VsfVsf(weight_scales, Q6_V_vsplat_R(scale));
        at = Q6_Vqf32_vadd_Vqf32Vqf32(at, Q6_Vqf32_vmpy_Vqf32Vqf32(int_to_qf32(dots), both));
    }
    // `start`: the sum of the row's activations.
    void add(HVX_Vector dots, HVX_Vector weight_scales, HVX_Vector minima, int32_t scale, int32_t start) {
        add(dots, weight_scales, scale);
        add(words(static_cast<uint32_t>(start)), minima, scale);
    }
    void close(float * out) const { store(out, Q6_Vsf_equals_Vqf32(at)); }
};

#else

struct results {
    float * at;
    void open(float * out, bool add) {
        at = out;
        if (!add) std::memset(out, 0, gemm_panel * sizeof(float));
    }
    void add(HVX_Vector dots, HVX_Vector weight_scales, int32_t scale_bits) {
        alignas(128) int32_t dot[gemm_panel];
        alignas(128) float weight[gemm_panel];
        store_aligned(dot, dots);
        store_aligned(weight, weight_scales);
        float scale;
        std::memcpy(&scale, &scale_bits, 4);
        for (int n = 0; n < gemm_panel; n++)
            at[n] += static_cast<float>(dot[n]) * (weight[n] * scale);
    }
    // `start`: the sum of the row's activations.
    void add(HVX_Vector dots, HVX_Vector weight_scales, HVX_Vector minima, int32_t scale_bits, int32_t start) {
        alignas(128) int32_t dot[gemm_panel];
        alignas(128) float weight[gemm_panel], least[gemm_panel];
        store_aligned(dot, dots);
        store_aligned(weight, weight_scales);
        store_aligned(least, minima);
        float scale;
        std::memcpy(&scale, &scale_bits, 4);
        for (int n = 0; n < gemm_panel; n++)
            at[n] += (static_cast<float>(dot[n]) * weight[n] + static_cast<float>(start) * least[n]) * scale;
    }
    void close(float *) const {}
};

#endif

template <class Format, int rows> void block(const gemm_int8_args & a) {
    results sums[rows];
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
        sums[m].open(a.out[m], a.add);
    const uint8_t * tile = a.panel;
    const uint8_t * record = a.group;
    constexpr size_t tile_bytes = Format::quants + Format::scale_bytes;
    constexpr bool halves = has_halves<Format>;
    constexpr int parts = halves ? 2 : 1; // with a scale each
    for (uint32_t t = static_cast<uint32_t>(a.k_tiles); t != 0; t--, tile += tile_bytes) {
        for (int h = 0; h < parts; h++) {
            HVX_Vector dots[rows];
#pragma GCC unroll 8
            for (int m = 0; m < rows; m++)
                dots[m] = Q6_V_vsplat_R(halves               ? start_of_16<Format>(record + 32 * m + 16 * h)
                                        : Format::has_minima ? 0
                                                             : word_at(record + 36 * rows + 4 * m));
#pragma GCC unroll 4
            for (int c = 4 / parts * h; c < 4 / parts * (h + 1); c++) {
                HVX_Vector w[2];
                Format::load_quads(tile, c, w);
#pragma GCC unroll 8
                for (int m = 0; m < rows; m++) {
                    const uint8_t * q = record + 32 * m + 8 * c;
                    dots[m] = Q6_Vw_vrmpyacc_VwVubRb(dots[m], w[0], word_at(q));
                    dots[m] = Q6_Vw_vrmpyacc_VwVubRb(dots[m], w[1], word_at(q + 4));
                }
            }
            HVX_Vector scales = Format::scales(tile + tile_bytes);
            if constexpr (halves) {
                if (h == 1) scales = Format::minima(tile + tile_bytes);
            }
#pragma GCC unroll 8
            for (int m = 0; m < rows; m++) {
                const int32_t scale = word_at(record + 32 * rows + 4 * m);
                if constexpr (Format::has_minima) {
                    sums[m].add(dots[m], scales, Format::minima(tile + tile_bytes), scale,
                                word_at(record + 36 * rows + 4 * m));
                } else {
                    sums[m].add(dots[m], scales, scale);
                }
            }
        }
        record += gemm_record_bytes(rows);
    }
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
        sums[m].close(a.out[m]);
}

template <class Format> void run(const gemm_int8_args & a) {
    using function = void (*)(const gemm_int8_args &);
    static constexpr function blocks[max_rows] = {block<Format, 1>, block<Format, 2>, block<Format, 3>,
                                                  block<Format, 4>, block<Format, 5>, block<Format, 6>,
                                                  block<Format, 7>, block<Format, 8>};
    blocks[a.rows - 1](a);
}

template <class Format> gemm_int8 kernel(const char * name) { return {name, max_rows, Format::offset, run<Format>}; }

} // namespace

void fill_hvx(kernel_table & t) {
    TILEBEAM_COLUMN_KERNELS(t.gemm, "8x32_hvx");
    fill_gemm_hvx_convert(t.gemm);
    fill_gemm_hvx_fp16(t.gemm);
    fill_gemm_hvx_k(t.gemm);
    fill_attention_hvx(t.attention);
    fill_vec_hvx(t.vec);
}

} // namespace tb::npu
