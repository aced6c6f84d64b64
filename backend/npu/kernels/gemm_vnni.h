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

#include "kernels/avx2/lanes.h"
#include "kernels/gemm_formats.h"

namespace tb::npu {
namespace {

// A format of gemm_formats.h, all 32 k of a vector of columns at once.
template <class unit, class Tile> struct whole_columns : Tile {
    static void weights(const uint8_t * tile, int i, typename unit::ints * w) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            w[j] = Tile::weights(tile, j / 2, j % 2, i);
    }
};

template <class unit> using format_q4 = whole_columns<unit, tile_q4<unit>>;
template <class unit> using format_q8 = whole_columns<unit, tile_q8<unit>>;
template <class unit> using format_iq4nl = whole_columns<unit, tile_iq4nl<unit>>;
template <class unit> using format_prepared = tile_prepared<unit, format_q8<unit>>;
template <class unit> using format_mxfp4 = whole_columns<unit, tile_mxfp4<unit>>;
template <class unit> using format_nvfp4 = whole_columns<unit, tile_nvfp4<unit>>;
template <class unit, uint32_t type> using format_bits = whole_columns<unit, tile_bits<unit, type>>;
template <class unit, uint32_t type> using format_few_bits = whole_columns<unit, tile_few_bits<unit, type>>;

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

template <class unit, class Format> gemm_int8 panel_kernel(const char * name) {
    return {name, gemm_max_rows, Format::offset, multiply_panel<unit, Format>};
}

// The kernels of `unit`, as TILEBEAM_COLUMN_KERNELS.
#define TILEBEAM_VNNI_KERNELS(k, end)                                                                                  \
    (k).int8[gemm_q4] = panel_kernel<unit, format_q4<unit>>("gemm_q4c_" end);                                          \
    (k).int8[gemm_q8] = panel_kernel<unit, format_q8<unit>>("gemm_q8c_" end);                                          \
    (k).int8[gemm_iq4nl] = panel_kernel<unit, format_iq4nl<unit>>("gemm_nlc_" end);                                    \
    (k).int8[gemm_prepared] = panel_kernel<unit, format_prepared<unit>>("gemm_q8p_" end);                              \
    (k).int8[gemm_q5_0] = panel_kernel<unit, format_bits<unit, TB_Q5_0_COL>>("gemm_q50c_" end);                        \
    (k).int8[gemm_q4_1] = panel_kernel<unit, format_bits<unit, TB_Q4_1_COL>>("gemm_q41c_" end);                        \
    (k).int8[gemm_q5_1] = panel_kernel<unit, format_bits<unit, TB_Q5_1_COL>>("gemm_q51c_" end);                        \
    (k).int8[gemm_mxfp4] = panel_kernel<unit, format_mxfp4<unit>>("gemm_mx4c_" end);                                   \
    (k).int8[gemm_nvfp4] = panel_kernel<unit, format_nvfp4<unit>>("gemm_nv4c_" end);                                   \
    (k).int8[gemm_q1_0] = panel_kernel<unit, format_few_bits<unit, TB_Q1_0_COL>>("gemm_q10c_" end);                    \
    (k).int8[gemm_q2_0] = panel_kernel<unit, format_few_bits<unit, TB_Q2_0_COL>>("gemm_q20c_" end)

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_GEMM_VNNI_H
