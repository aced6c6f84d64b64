// What kernels know of a tile at compile time, out of the table of types (tilebeam/types.h).
// Internal linkage, see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_TILES_H
#define TILEBEAM_NPU_KERNELS_TILES_H

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "tilebeam/types.h"

namespace tb::npu {
namespace {

constexpr int column_bytes = 4; // of one column in a quad
constexpr int quad_bytes = TB_TILE_N * column_bytes;

struct tile_traits {
    size_t quants;   // bytes before the scales
    size_t bytes;    // with them
    uint32_t source; // the plain type whose values the tile holds
    bool column;     // one scale per column and 32 k; else `tile` grouping
    bool fifth;      // quants of five bits: the fifth ones follow the nibbles
    bool minima;     // after the scales
};

// All zero for a type that is not tiled.
constexpr tile_traits tile_of(uint32_t type) {
#define TILEBEAM_TRAITS(NAME, SOURCE, QUANTS, SCALES, COLUMN)                                                          \
case TB_##NAME:                                                                                                        \
    return {QUANTS, (QUANTS) + (SCALES), TB_##SOURCE, COLUMN, (QUANTS) == TB_QUANTS(5), (SCALES) == 2 * TB_HALF_SCALES};
#define TILEBEAM_COLUMN(NAME, LABEL, SOURCE, QUANTS, SCALES) TILEBEAM_TRAITS(NAME, SOURCE, QUANTS, SCALES, true)
#define TILEBEAM_TILE(NAME, LABEL, SOURCE, QUANTS, SCALES) TILEBEAM_TRAITS(NAME, SOURCE, QUANTS, SCALES, false)
    switch (type) {
        TB_COLUMN_TYPES(TILEBEAM_COLUMN)
        TB_TILE_TYPES(TILEBEAM_TILE)
    default:
        return {};
    }
#undef TILEBEAM_TRAITS
#undef TILEBEAM_COLUMN
#undef TILEBEAM_TILE
}

// The kernels of a set, for tiles of every format and gemm_prepared; their names end in e.g. "4x16_avx2".
#define TILEBEAM_COLUMN_KERNELS(k, end)                                                                                \
    (k).int8[gemm_q4] = kernel<format_q4>("gemm_q4c_" end);                                                            \
    (k).int8[gemm_q8] = kernel<format_q8>("gemm_q8c_" end);                                                            \
    (k).int8[gemm_iq4nl] = kernel<format_iq4nl>("gemm_nlc_" end);                                                      \
    (k).int8[gemm_prepared] = kernel<format_prepared>("gemm_q8p_" end);                                                \
    (k).int8[gemm_q5_0] = kernel<format_bits<TB_Q5_0_COL>>("gemm_q50c_" end);                                          \
    (k).int8[gemm_q4_1] = kernel<format_bits<TB_Q4_1_COL>>("gemm_q41c_" end);                                          \
    (k).int8[gemm_q5_1] = kernel<format_bits<TB_Q5_1_COL>>("gemm_q51c_" end);                                          \
    (k).int8[gemm_mxfp4] = kernel<format_mxfp4>("gemm_mx4c_" end);                                                     \
    (k).int8[gemm_nvfp4] = kernel<format_nvfp4>("gemm_nv4c_" end);                                                     \
    (k).int8[gemm_q1_0] = kernel<format_few_bits<TB_Q1_0_COL>>("gemm_q10c_" end);                                      \
    (k).int8[gemm_q2_0] = kernel<format_few_bits<TB_Q2_0_COL>>("gemm_q20c_" end)

// Nibbles to what they mean.
constexpr int8_t iq4nl_values[16] = {TB_IQ4_NL_VALUES(0)};
constexpr int8_t mxfp4_values[16] = {TB_MXFP4_VALUES(0)};
constexpr int mxfp4_offset = 12; // of unsigned values

// Whether a kernel's format has two scales per column and 32 k: those of the second 16 k stand where minima would.
template <class Format, class = void> constexpr bool has_halves = false;
template <class Format> constexpr bool has_halves<Format, std::void_t<decltype(Format::halves)>> = true;

// Q1_0 and Q2_0: quants of one and two bits. As unsigned numbers they are 0 and 2, or 0 to 3, with this offset.
constexpr int few_bits_offset = 1;

// A code book of block panels: `most` is its greatest value, and d of a block stands for `parts` of them.
template <int greatest, int parts_of_d, int... values> struct code_book {
    static constexpr int most = greatest, parts = parts_of_d;
    static constexpr int at[16] = {values...};
    template <class unit, int offset> static typename unit::ints table() { return unit::table((offset + values)...); }
};
using iq4_book = code_book<127, 1, TB_IQ4_NL_VALUES(0)>;
using iq1_book = code_book<9, TB_IQ1_PARTS, TB_IQ1_VALUES>;
using iq2_book = code_book<43, TB_IQ2_PARTS, TB_IQ2_VALUES>;
using iq3_xxs_book = code_book<62, TB_IQ3_XXS_PARTS, TB_IQ3_XXS_VALUES>;
using iq3_s_book = code_book<15, TB_IQ3_S_PARTS, TB_IQ3_S_VALUES>;

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_TILES_H
