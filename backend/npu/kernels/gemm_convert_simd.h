// What becomes of tiles outside the integer kernels, written once over the names of a `unit`, an ISA's simd struct with
// bytes in registers of the same size (kernels/<isa>/gemm_float.cpp): FP16 values for the float kernels, and int8
// against one scale per column for `tile` grouping. Both give the portable version's bits.
// Internal linkage, see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_GEMM_CONVERT_SIMD_H
#define TILEBEAM_NPU_KERNELS_GEMM_CONVERT_SIMD_H

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/gemm.h"

namespace tb::npu {
namespace {

constexpr int8_t q4_values[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};

// The 32 scales at p.
template <class unit> void load_scales(const uint8_t * p, float (&scale)[32]) {
    for (int i = 0; i < 32; i += unit::width)
        unit::store(scale + i, unit::load(reinterpret_cast<const uint16_t *>(p) + i));
}

// Quads 2 * c and 2 * c + 1 of vector i of a tile's columns, as nibbles.
template <class unit> void load_nibbles(const uint8_t * tile, int c, int i, typename unit::bytes (&quad)[2]) {
    const typename unit::bytes v = unit::load_bytes(tile + 128 * c + 4 * unit::width * i);
    quad[0] = unit::low_nibbles(v);
    quad[1] = unit::high_nibbles(v);
}

// ---- to FP16 values

template <class unit, uint32_t type> void dequantize_tiles(const uint8_t * panel, int64_t k_tiles, float * out) {
    using vec = typename unit::vec;
    constexpr tile_traits tile = tile_of(type);
    constexpr bool q8 = tile.source == TB_Q8_0, column = tile.column;
    constexpr int width = unit::width;
    const int8_t (&values)[16] = tile.source == TB_IQ4_NL ? iq4nl_values : q4_values;
    const typename unit::bytes table = unit::table(values);
    for (int64_t t = 0; t < k_tiles; t++, panel += tile.bytes, out += 32 * gemm_panel) {
        float scale[32];
        load_scales<unit>(panel + tile.quants, scale);
        for (int i = 0; i < gemm_panel / width; i++) {
            for (int c = 0; c < 4; c++) {
                typename unit::bytes quad[2];
                if constexpr (q8) {
                    quad[0] = unit::load_bytes(panel + 256 * c + 4 * width * i);
                    quad[1] = unit::load_bytes(panel + 256 * c + 128 + 4 * width * i);
                } else {
                    load_nibbles<unit>(panel, c, i, quad);
                    quad[0] = unit::look_up(table, quad[0]);
                    quad[1] = unit::look_up(table, quad[1]);
                }
#pragma GCC unroll 2
                for (int h = 0; h < 2; h++) {
                    // row pairs 4 * c + 2 * h and the next; quad order puts k 0, 2, 1, 3 at byte 0, 1, 2, 3
                    const float * s = scale + 8 * c + 4 * h + width * i / 16;
                    const vec s0 = column ? unit::load(scale + width * i) : unit::set1(s[0]);
                    const vec s1 = column ? s0 : unit::set1(s[2]);
                    float * to = out + gemm_panel * (8 * c + 4 * h) + width * i;
                    const auto store = [&](int k, vec q, vec by) {
                        unit::store(to + gemm_panel * k, unit::round_to_half(unit::mul(q, by)));
                    };
                    store(0, unit::template signed_byte<0>(quad[h]), s0);
                    store(1, unit::template signed_byte<2>(quad[h]), s0);
                    store(2, unit::template signed_byte<1>(quad[h]), s1);
                    store(3, unit::template signed_byte<3>(quad[h]), s1);
                }
            }
        }
    }
}

template <class unit> void dequantize(uint32_t type, const uint8_t * panel, int64_t k_tiles, float * out) {
    switch (type) {
    case TB_Q4_0_COL:
        return dequantize_tiles<unit, TB_Q4_0_COL>(panel, k_tiles, out);
    case TB_IQ4_NL_COL:
        return dequantize_tiles<unit, TB_IQ4_NL_COL>(panel, k_tiles, out);
    case TB_Q8_0_COL:
        return dequantize_tiles<unit, TB_Q8_0_COL>(panel, k_tiles, out);
    case TB_Q4_0_TILE:
        return dequantize_tiles<unit, TB_Q4_0_TILE>(panel, k_tiles, out);
    case TB_IQ4_NL_TILE:
        return dequantize_tiles<unit, TB_IQ4_NL_TILE>(panel, k_tiles, out);
    default:
        return dequantize_tiles<unit, TB_Q8_0_TILE>(panel, k_tiles, out);
    }
}

template <class unit> void round_fp16(int64_t n, float * x) {
    int64_t i = 0;
    for (; i + unit::width <= n; i += unit::width)
        unit::store(x + i, unit::round_to_half(unit::load(x + i)));
    const int rest = static_cast<int>(n - i);
    if (rest > 0) unit::store_n(x + i, unit::round_to_half(unit::load_n(x + i, rest)), rest);
}

// ---- to int8 against one scale per column: gemm.h says how

// Of one column half's 16 row pairs the ratios to the half's common scale.
struct half_ratios {
    int16_t ratio[16];
    float common;
};

template <class unit> half_ratios common_scale(const uint8_t * p, int h, bool q4) {
    const int shift = q4 ? gemm_requantize_shift_q4 : gemm_requantize_shift_q8;
    float scale[32], largest = 0;
    load_scales<unit>(p, scale);
    bool finite = true;
    for (int v = 0; v < 16; v++) {
        const float s = std::fabs(scale[2 * v + h]);
        finite = finite && s < INFINITY;
        largest = std::max(largest, s);
    }
    half_ratios r;
    r.common = !finite ? NAN : q4 ? largest * (8.0f / 127.0f) : largest;
    const float inverse = finite && largest > 0 ? 1.0f / r.common : 0.0f;
    for (int v = 0; v < 16; v++) {
        const float ratio = finite ? scale[2 * v + h] * inverse * static_cast<float>(1 << shift) : 0.0f;
        // adding 1.5 * 2^23 rounds to the nearest integer, ties to even
        r.ratio[v] = static_cast<int16_t>(ratio + 12582912.0f - 12582912.0f);
    }
    return r;
}

// A quad's even bytes belong to one row pair, its odd ones to the next. Nibbles are looked up in a table per row pair,
// of their values in fixed point, 16 times a Q4_0 quant, twice an IQ4_NL value, times the pair's ratio.
template <class unit, uint32_t type> void prepare_tile(const uint8_t * tile, uint8_t * out) {
    constexpr int width = unit::width, vectors = 16 / width;
    constexpr tile_traits traits = tile_of(type);
    constexpr bool q4 = traits.source == TB_Q4_0, q8 = traits.source == TB_Q8_0;
    for (int half = 0; half < 2; half++) {
        const half_ratios r = common_scale<unit>(tile + traits.quants, half, q4);
        for (int c = 0; c < 4; c++) {
            typename unit::bytes table[4];
            if constexpr (!q8) {
                int16_t values[16];
                for (int i = 0; i < 16; i++)
                    values[i] = static_cast<int16_t>(q4 ? 16 * q4_values[i] : 2 * iq4nl_values[i]);
#pragma GCC unroll 4
                for (int v = 0; v < 4; v++)
                    table[v] = unit::requantized(values, r.ratio[4 * c + v]);
            }
            for (int i = vectors * half; i < vectors * (half + 1); i++) {
                typename unit::bytes quad[2];
                if constexpr (!q8) load_nibbles<unit>(tile, c, i, quad);
#pragma GCC unroll 2
                for (int h = 0; h < 2; h++) {
                    const int at = 128 * (2 * c + h) + 4 * width * i;
                    if constexpr (q8) {
                        const int16_t * ratio = r.ratio + 4 * c + 2 * h;
                        unit::store_bytes(out + at, unit::requantized(unit::load_bytes(tile + at), ratio[0], ratio[1]));
                    } else {
                        unit::store_bytes(out + at, unit::even_odd(unit::look_up(table[2 * h], quad[h]),
                                                                   unit::look_up(table[2 * h + 1], quad[h])));
                    }
                }
            }
        }
        for (int i = vectors * half; i < vectors * (half + 1); i++)
            unit::store(reinterpret_cast<float *>(out + gemm_prepared_quants) + width * i, unit::set1(r.common));
    }
}

template <class unit, uint32_t type> void prepare_tiles(const uint8_t * panel, int64_t k_tiles, uint8_t * out) {
    for (int64_t t = 0; t < k_tiles; t++, panel += tile_of(type).bytes, out += gemm_prepared_bytes)
        prepare_tile<unit, type>(panel, out);
}

template <class unit> void prepare(uint32_t type, const uint8_t * panel, int64_t k_tiles, uint8_t * out) {
    switch (type) {
    case TB_Q8_0_TILE:
        return prepare_tiles<unit, TB_Q8_0_TILE>(panel, k_tiles, out);
    case TB_Q4_0_TILE:
        return prepare_tiles<unit, TB_Q4_0_TILE>(panel, k_tiles, out);
    default:
        return prepare_tiles<unit, TB_IQ4_NL_TILE>(panel, k_tiles, out);
    }
}

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_GEMM_CONVERT_SIMD_H
