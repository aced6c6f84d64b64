// Integer GEMM for sets with vpdpbusd, written once over the names of a `unit` (avx512vnni/unit.h, avxvnni/unit.h):
// vectors of unit::width columns, each 32-bit lane four k of one column.
//
// A tile's quants, unpacked in registers, meet all rows of the group before the next tile comes. The float sums stay in
// L1: beside eight dot products a sum is one load and one store, and so any number of rows goes through one loop, and
// an activation is loaded once for unit::vectors vectors.
//
// vpdpbusd shares its ports with multiplications, and each 32 k with a scale of their own cost two of those beside
// eight dot products: 80 % of the peak is the most that `multiply_panel` can reach. Internal linkage, see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_GEMM_VNNI_H
#define TILEBEAM_NPU_KERNELS_GEMM_VNNI_H

#include <cstring>

#include "kernels/gemm.h"

namespace tb::npu {
namespace {

int32_t read_int(const uint8_t * p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return v;
}

float read_float(const uint8_t * p) {
    float v;
    std::memcpy(&v, p, 4);
    return v;
}

// Vector `i` of the scales after a tile's quants.
template <class unit> typename unit::floats half_scales(const uint8_t * p, int i) {
    return unit::load_halves(p + 2 * unit::width * i);
}

// What tiles of a type have in common.
template <class unit, uint32_t type> struct format_of {
    static constexpr tile_traits traits = tile_of(type);
    static constexpr bool streams = true, has_minima = false;
    static constexpr size_t bytes = traits.bytes;
    static typename unit::floats scales(const uint8_t * tile, int i) {
        return half_scales<unit>(tile + traits.quants, i);
    }
};

template <class unit> struct format_q4 : format_of<unit, TB_Q4_0_COL> {
    static constexpr int32_t offset = 8;
    static void weights(const uint8_t * tile, int i, typename unit::ints * w) {
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            const typename unit::ints v = unit::load(tile + quad_bytes * c + column_bytes * unit::width * i);
            w[2 * c] = unit::low_nibbles(v);
            w[2 * c + 1] = unit::high_nibbles(v);
        }
    }
};

// Q5_0, Q4_1 and Q5_1.
template <class unit, uint32_t type> struct format_bits : format_of<unit, type> {
    static constexpr tile_traits traits = tile_of(type);
    static constexpr bool has_minima = traits.minima;
    static constexpr int32_t offset = has_minima ? gemm_minima_offset : 16;
    static void weights(const uint8_t * tile, int i, typename unit::ints * w) {
        format_q4<unit>::weights(tile, i, w);
        if constexpr (traits.fifth) {
            const typename unit::ints plane = unit::load(tile + TB_QUANTS(4) + column_bytes * unit::width * i);
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++)
                w[j] = unit::either(w[j], unit::masked(unit::shifted(plane, 4 - j), 16));
        }
    }
    static typename unit::floats minima(const uint8_t * tile, int i) {
        return half_scales<unit>(tile + traits.quants + TB_HALF_SCALES, i);
    }
};

// Q1_0 and Q2_0.
template <class unit, uint32_t type> struct format_few_bits : format_of<unit, type> {
    static constexpr int32_t offset = few_bits_offset;
    static void weights(const uint8_t * tile, int i, typename unit::ints * w) {
        const uint8_t * from = tile + column_bytes * unit::width * i;
        if constexpr (tile_of(type).quants == TB_QUANTS(1)) {
            const typename unit::ints ones = unit::load(from);
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++)
                w[j] = unit::masked(unit::shifted(ones, 1 - j), 2);
        } else {
#pragma GCC unroll 2
            for (int c = 0; c < 2; c++) {
                const typename unit::ints pairs = unit::load(from + quad_bytes * c);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++)
                    w[4 * c + j] = unit::masked(unit::shifted(pairs, -2 * j), 3);
            }
        }
    }
};

template <class unit> struct format_mxfp4 : format_of<unit, TB_MXFP4_COL> {
    static constexpr int32_t offset = mxfp4_offset;
    static void weights(const uint8_t * tile, int i, typename unit::ints * w) {
        const typename unit::ints values = unit::table(TB_MXFP4_VALUES(mxfp4_offset));
        format_q4<unit>::weights(tile, i, w);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            w[j] = unit::look_up(values, w[j]);
    }
    static typename unit::floats scales(const uint8_t * tile, int i) {
        return unit::load_powers(tile + tile_of(TB_MXFP4_COL).quants + unit::width * i);
    }
};

// Its tiles have scales for the first and the second 16 k.
template <class unit> struct format_nvfp4 : format_mxfp4<unit> {
    static constexpr bool halves = true;
    static constexpr size_t bytes = tile_of(TB_NVFP4_COL).bytes;
    static typename unit::floats scales(const uint8_t * tile, int i) {
        return unit::load_small(tile + tile_of(TB_NVFP4_COL).quants + unit::width * i);
    }
    static typename unit::floats minima(const uint8_t * tile, int i) {
        return unit::load_small(tile + tile_of(TB_NVFP4_COL).quants + TB_TILE_N + unit::width * i);
    }
};

template <class unit> struct format_iq4nl : format_of<unit, TB_IQ4_NL_COL> {
    static constexpr int32_t offset = 128;
    static void weights(const uint8_t * tile, int i, typename unit::ints * w) {
        const typename unit::ints values = unit::table(TB_IQ4_NL_VALUES(128));
        format_q4<unit>::weights(tile, i, w);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            w[j] = unit::look_up(values, w[j]);
    }
};

template <class unit> struct format_q8 : format_of<unit, TB_Q8_0_COL> {
    static constexpr int32_t offset = 128;
    static void weights(const uint8_t * tile, int i, typename unit::ints * w) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            w[j] = unit::flip_signs(unit::load(tile + quad_bytes * j + column_bytes * unit::width * i));
    }
};

// The quants of a Q8_0 tile with float scales, in L1 already.
template <class unit> struct format_prepared : format_q8<unit> {
    static constexpr bool streams = false;
    static constexpr size_t bytes = gemm_prepared_bytes;
    static typename unit::floats scales(const uint8_t * tile, int i) {
        return unit::load_floats(reinterpret_cast<const float *>(tile + gemm_prepared_quants) + unit::width * i);
    }
};

// ---- whole panels

// A panel's sums, one row after the other: out's, or zeros; and back.
template <class unit> void open_sums(const gemm_int8_args & a, float (*sums)[gemm_panel]) {
    for (int m = 0; m < a.rows; m++) {
        for (int i = 0; i < gemm_panel; i += unit::width)
            unit::store_floats(sums[m] + i, a.add ? unit::load_floats(a.out[m] + i) : unit::zero());
    }
}

template <class unit> void close_sums(const gemm_int8_args & a, const float (*sums)[gemm_panel]) {
    for (int m = 0; m < a.rows; m++) {
        for (int i = 0; i < gemm_panel; i += unit::width)
            unit::store_floats(a.out[m] + i, unit::load_floats(sums[m] + i));
    }
}

// What 32 k add to sums: their dot products, times the columns' scales and the row's; minima times the sum of the row's
// activations, `start`.
template <class unit, class Format>
void add_products(float * sums, typename unit::ints dot, const typename unit::floats & scale,
                  const typename unit::floats & least, typename unit::floats row_scale, const uint8_t * start) {
    if constexpr (Format::has_minima) {
        const auto q = unit::broadcast(static_cast<float>(read_int(start)));
        const auto x = unit::fma(unit::to_floats(dot), scale, unit::mul(least, q));
        unit::store_floats(sums, unit::fma(x, row_scale, unit::load_floats(sums)));
    } else {
        unit::store_floats(sums, unit::fma(unit::to_floats(dot), unit::mul(scale, row_scale), unit::load_floats(sums)));
    }
}

// A tile some tiles on: the hardware follows a stream to the end of its page, and that is in the next one as often as
// not.
template <size_t bytes, size_t ahead, auto hint> void prefetch(const uint8_t * tile) {
#pragma GCC unroll 18
    for (size_t i = 0; i < bytes; i += 64)
        _mm_prefetch(reinterpret_cast<const char *>(tile + ahead * bytes + i), hint);
}

template <class unit, class Format> void multiply_panel(const gemm_int8_args & a) {
    constexpr int vectors = unit::vectors, panel_vectors = gemm_panel / unit::width;
    constexpr bool halves = has_halves<Format>;
    constexpr int parts = halves ? 2 : 1, quads = 8 / parts; // with a scale each
    alignas(64) float sums[gemm_max_rows][gemm_panel];
    const int rows = a.rows;
    open_sums<unit>(a, sums);
    const uint8_t * tile = a.panel;
    const uint8_t * record = a.group;
    for (int64_t t = 0; t < a.k_tiles; t++, tile += Format::bytes, record += gemm_record_bytes(rows)) {
        if constexpr (Format::streams) { // one or two rows are done with a tile before another could come from L2
            rows <= 2 ? prefetch<Format::bytes, 12, _MM_HINT_T0>(tile) : prefetch<Format::bytes, 24, _MM_HINT_T1>(tile);
        }
#pragma GCC unroll 4
        for (int first = 0; first < panel_vectors; first += vectors) {
            typename unit::ints w[vectors][8];
            typename unit::floats scale[vectors], least[vectors];
#pragma GCC unroll 4
            for (int i = 0; i < vectors; i++) {
                Format::weights(tile, first + i, w[i]);
                scale[i] = Format::scales(tile, first + i);
                if constexpr (Format::has_minima || halves) least[i] = Format::minima(tile, first + i);
            }
            const uint8_t * q = record;
            const uint8_t * factors = record + 32 * rows;
            float * sum = sums[0] + unit::width * first;
            for (int m = 0; m < rows; m++, q += 32, factors += 4, sum += gemm_panel) {
                const typename unit::floats s = unit::broadcast(read_float(factors));
#pragma GCC unroll 2
                for (int h = 0; h < parts; h++) {
                    typename unit::ints dot[vectors];
                    const int32_t start = halves               ? -Format::offset * sum_of_16(q + 16 * h)
                                          : Format::has_minima ? 0
                                                               : read_int(factors + 4 * rows);
#pragma GCC unroll 4
                    for (int i = 0; i < vectors; i++)
                        dot[i] = unit::broadcast(start);
#pragma GCC unroll 8
                    for (int j = quads * h; j < quads * (h + 1); j++) {
                        const typename unit::ints x = unit::broadcast(read_int(q + 4 * j));
#pragma GCC unroll 4
                        for (int i = 0; i < vectors; i++)
                            unit::dot(dot[i], w[i][j], x);
                    }
#pragma GCC unroll 4
                    for (int i = 0; i < vectors; i++)
                        add_products<unit, Format>(sum + unit::width * i, dot[i], h == 0 ? scale[i] : least[i],
                                                   least[i], s, factors + 4 * rows);
                }
            }
        }
    }
    close_sums<unit>(a, sums);
}

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_GEMM_VNNI_H
