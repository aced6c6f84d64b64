// Integer GEMM for sets that multiply bytes without vpdpbusd, written once over the names of a `unit`
// (kernels/avx2/gemm_int8.cpp, kernels/neon/int8.h): what is common to them is the walk over tiles and rows.
//
// A tile meets all rows of the group before the next one comes, unit::rows of them at a time, so that their sums and
// a few vectors of weights fit into registers; float sums stay in L1 between tiles. Where more rows come than that, the
// tile's quants are unpacked once, into L1: then it is a tile of format `prepared`, with quants as unit::block wants
// them.
//
// unit::block<Format, Source, rows>(tile, first, at) adds the products of unit::vectors<Format>(rows) vectors of
// columns, from `first` on, with `rows` rows to their sums. Format says what the numbers mean, Source where they are:
// the format itself, or format_unpacked. It is not to be inlined: among its neighbours the compiler runs out of
// registers. Internal linkage, see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_GEMM_TILES_H
#define TILEBEAM_NPU_KERNELS_GEMM_TILES_H

#include <algorithm>
#include <cstring>

#include "kernels/gemm_formats.h"

namespace tb::npu {
namespace {

constexpr size_t unpacked_bytes = gemm_prepared_bytes + gemm_panel * sizeof(float);

// Quads of bytes, then float scales, then, of formats that have any, float minima, or scales of the second 16 k.
template <class unit> struct format_unpacked : tile_prepared<unit> {
    static typename unit::floats minima(const uint8_t * tile, int i) {
        return unit::load_floats(reinterpret_cast<const float *>(tile + gemm_prepared_bytes) + unit::width * i);
    }
};

template <class unit, class Format> void unpack_tile(const uint8_t * tile, uint8_t * out) {
    for (int c = 0; c < 4; c++) {
#pragma GCC unroll 8
        for (int i = 0; i < gemm_panel / unit::width; i++) {
#pragma GCC unroll 2
            for (int h = 0; h < 2; h++)
                unit::store(out + quad_bytes * (2 * c + h) + 4 * unit::width * i, Format::weights(tile, c, h, i));
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < gemm_panel / unit::width; i++)
        unit::store_floats(reinterpret_cast<float *>(out + gemm_prepared_quants) + unit::width * i,
                           Format::scales(tile, i));
    if constexpr (Format::has_minima || has_halves<Format>) {
#pragma GCC unroll 8
        for (int i = 0; i < gemm_panel / unit::width; i++)
            unit::store_floats(reinterpret_cast<float *>(out + gemm_prepared_bytes) + unit::width * i,
                               Format::minima(tile, i));
    }
}

// Some rows of a group: in the record of the tile, and their sums.
struct tile_rows {
    const uint8_t *q, *scales, *starts;
    float (*sums)[gemm_panel];
};

template <class unit, class Format, class Source, int rows>
void some_rows(const uint8_t * tile, const tile_rows & at, int n) {
    if (n == rows) {
        for (int first = 0; first < gemm_panel / unit::width; first += unit::template vectors<Format>(rows))
            unit::template block<Format, Source, rows>(tile, first, at);
    } else if constexpr (rows > 1) {
        some_rows<unit, Format, Source, rows - 1>(tile, at, n);
    }
}

// In blocks that differ by one row at most.
template <class unit, class Format, class Source>
void all_rows(const uint8_t * tile, const uint8_t * record, int rows, float (*sums)[gemm_panel]) {
    int blocks = (rows + unit::rows - 1) / unit::rows;
    for (int row = 0; row < rows; blocks--) {
        const int n = (rows - row) / blocks;
        const uint8_t * scales = record + 32 * rows + 4 * row;
        some_rows<unit, Format, Source, unit::rows>(tile, {record + 32 * row, scales, scales + 4 * rows, sums + row},
                                                    n);
        row += n;
    }
}

template <class unit, class Format> void multiply_tiles(const gemm_int8_args & a) {
    alignas(64) float sums[gemm_max_rows][gemm_panel];
    alignas(64) uint8_t unpacked[unpacked_bytes];
    const int rows = a.rows;
    open_sums<unit>(a, sums);
    const uint8_t * tile = a.panel;
    const uint8_t * record = a.group;
    for (int64_t t = 0; t < a.k_tiles; t++, tile += Format::bytes, record += gemm_record_bytes(rows)) {
        // The hardware follows a stream to the end of its page only. Into L2: into L1 is slower with more than one row.
        if (Format::streams) {
#pragma GCC unroll 18
            for (size_t i = 0; i < Format::bytes; i += 64)
                __builtin_prefetch(tile + 12 * Format::bytes + i, 0, 2);
        }
        if constexpr (Format::packed) {
            if (rows > unit::rows) {
                unpack_tile<unit, Format>(tile, unpacked);
                all_rows<unit, Format, format_unpacked<unit>>(unpacked, record, rows, sums);
                continue;
            }
        }
        all_rows<unit, Format, Format>(tile, record, rows, sums);
    }
    close_sums<unit>(a, sums);
}

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_GEMM_TILES_H
