// The formats of tiles for integer GEMM, and how a panel's sums begin and end: written once over the names of a `unit`
// (avx2/lanes.h, avx512vnni/unit.h, neon/int8.h), vectors of unit::width columns, each 32-bit lane four k of one
// column.
//
// weights(tile, c, h, i) is quad 2 * c + h of the columns of vector i, as bytes: a weight and `offset`. What is added
// to the values of MXFP4 and to weights that fill a byte says the unit, unit::code_offset and unit::byte_offset; with 0
// they stay signed. Internal linkage, see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_GEMM_FORMATS_H
#define TILEBEAM_NPU_KERNELS_GEMM_FORMATS_H

#include "kernels/gemm.h"

namespace tb::npu {
namespace {

// What tiles of a type have in common.
template <class unit, uint32_t type> struct tile_format {
    static constexpr tile_traits traits = tile_of(type);
    static constexpr size_t bytes = traits.bytes;
    static constexpr bool packed = true, streams = true, has_minima = false;
    static typename unit::floats scales(const uint8_t * tile, int i) {
        return unit::load_halves(tile + traits.quants + 2 * unit::width * i);
    }
};

template <class unit> typename unit::ints tile_nibbles(const uint8_t * tile, int c, int h, int i) {
    const typename unit::ints v = unit::load(tile + quad_bytes * c + column_bytes * unit::width * i);
    return h ? unit::high_nibbles(v) : unit::low_nibbles(v);
}

template <class unit> struct tile_q4 : tile_format<unit, TB_Q4_0_COL> {
    static constexpr int32_t offset = 8;
    static typename unit::ints weights(const uint8_t * tile, int c, int h, int i) {
        return tile_nibbles<unit>(tile, c, h, i);
    }
};

// Q5_0, Q4_1 and Q5_1.
template <class unit, uint32_t type> struct tile_bits : tile_format<unit, type> {
    static constexpr tile_traits traits = tile_of(type);
    static constexpr bool has_minima = traits.minima;
    static constexpr int32_t offset = has_minima ? gemm_minima_offset : 16;
    static typename unit::ints weights(const uint8_t * tile, int c, int h, int i) {
        const typename unit::ints q = tile_nibbles<unit>(tile, c, h, i);
        if constexpr (!traits.fifth) return q;
        const typename unit::ints plane = unit::load(tile + TB_QUANTS(4) + column_bytes * unit::width * i);
        return unit::either(q, unit::masked(unit::shifted(plane, 4 - 2 * c - h), 16));
    }
    static typename unit::floats minima(const uint8_t * tile, int i) {
        return unit::load_halves(tile + traits.quants + TB_HALF_SCALES + 2 * unit::width * i);
    }
};

// Q1_0 and Q2_0.
template <class unit, uint32_t type> struct tile_few_bits : tile_format<unit, type> {
    static constexpr int32_t offset = few_bits_offset;
    static typename unit::ints weights(const uint8_t * tile, int c, int h, int i) {
        constexpr bool one = tile_of(type).quants == TB_QUANTS(1);
        const int j = 2 * c + h, by = one ? 1 - j : -2 * (j % 4); // to the left, or right if negative
        const uint8_t * plane = tile + (one ? 0 : quad_bytes * (j / 4)) + column_bytes * unit::width * i;
        return unit::masked(unit::shifted(unit::load(plane), by), one ? 2 : 3);
    }
};

template <class unit> struct tile_mxfp4 : tile_format<unit, TB_MXFP4_COL> {
    static constexpr int32_t offset = unit::code_offset;
    static typename unit::ints weights(const uint8_t * tile, int c, int h, int i) {
        return unit::look_up(unit::table(TB_MXFP4_VALUES(offset)), tile_nibbles<unit>(tile, c, h, i));
    }
    static typename unit::floats scales(const uint8_t * tile, int i) {
        return unit::load_powers(tile + tile_of(TB_MXFP4_COL).quants + unit::width * i);
    }
};

// Its tiles have scales for the first and the second 16 k.
template <class unit> struct tile_nvfp4 : tile_mxfp4<unit> {
    static constexpr bool halves = true;
    static constexpr size_t bytes = tile_of(TB_NVFP4_COL).bytes;
    static typename unit::floats scales(const uint8_t * tile, int i) {
        return unit::load_small(tile + tile_of(TB_NVFP4_COL).quants + unit::width * i);
    }
    static typename unit::floats minima(const uint8_t * tile, int i) {
        return unit::load_small(tile + tile_of(TB_NVFP4_COL).quants + TB_TILE_N + unit::width * i);
    }
};

template <class unit> struct tile_iq4nl : tile_format<unit, TB_IQ4_NL_COL> {
    static constexpr int32_t offset = unit::byte_offset;
    static typename unit::ints weights(const uint8_t * tile, int c, int h, int i) {
        return unit::look_up(unit::table(TB_IQ4_NL_VALUES(offset)), tile_nibbles<unit>(tile, c, h, i));
    }
};

template <class unit> struct tile_q8 : tile_format<unit, TB_Q8_0_COL> {
    static constexpr int32_t offset = unit::byte_offset;
    static constexpr bool packed = false;
    static typename unit::ints weights(const uint8_t * tile, int c, int h, int i) {
        const typename unit::ints v = unit::load(tile + quad_bytes * (2 * c + h) + column_bytes * unit::width * i);
        if constexpr (offset == 0) {
            return v;
        } else {
            return unit::flip_signs(v);
        }
    }
};

// Float scales behind the quants of a Q8_0 tile, as of gemm_prepared, which is in L1 already. Of what has quads as
// tile_q8.
template <class unit, class Quads = tile_q8<unit>> struct tile_prepared : Quads {
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

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_GEMM_FORMATS_H
