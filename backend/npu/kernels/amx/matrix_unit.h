// AMX's matrix unit: its tiles, configured for as long as a `matrix_unit` lives, and products of up to 32 rows of
// activations with a panel's 32 columns. None of this set was ever run on a CPU that has the unit: the tests run it
// over emulated instructions (tests/native/amx_emulated.h).
//
// A tile is 16 rows of 64 bytes at most. Weights in quad order are what the unit multiplies with: each 32-bit lane of a
// row has four k of one column. Internal linkage, see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_AMX_MATRIX_UNIT_H
#define TILEBEAM_NPU_KERNELS_AMX_MATRIX_UNIT_H

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "kernels/gemm.h"

namespace tb::npu {
namespace {

constexpr int unit_rows = 16;      // of a tile
constexpr int unit_row_bytes = 64; // of a tile: 16 columns

// GCC 12's intrinsics do not tell the compiler what memory they read: bytes written before must be there.
inline void finish_writing(const void * bytes) { asm volatile("" : : "r"(bytes) : "memory"); }

// Tiles by number, as the intrinsics take digits only: 0 and 1 have the activations of the first 16 rows and of those
// that follow, 2 and 3 the weights of the first and the second 16 columns, 4 to 7 the sums, row by row.
class matrix_unit {
  public:
    // For k activations of a row at a time: a multiple of 4.
    matrix_unit(int rows, int k) {
        struct {
            uint8_t palette, start_row, reserved[14];
            uint16_t row_bytes[16];
            uint8_t rows[16];
        } c{};
        static_assert(sizeof(c) == 64, "what ldtilecfg reads");
        c.palette = 1;
        const auto set = [&](int tile, int n, int bytes) {
            if (n <= 0) return; // a tile that is not used has neither
            c.rows[tile] = static_cast<uint8_t>(n);
            c.row_bytes[tile] = static_cast<uint16_t>(bytes);
        };
        for (int half = 0; half < 2; half++) {
            const int n = std::min(rows - unit_rows * half, unit_rows);
            set(half, n, k);
            set(2 + half, k / 4, unit_row_bytes);
            set(4 + 2 * half, n, unit_row_bytes);
            set(5 + 2 * half, n, unit_row_bytes);
        }
        finish_writing(&c);
        _tile_loadconfig(&c);
    }
    ~matrix_unit() { _tile_release(); } // no thread keeps tiles: the system would save them at every switch
    matrix_unit(const matrix_unit &) = delete;
    matrix_unit & operator=(const matrix_unit &) = delete;

    static void clear(int rows) {
        _tile_zero(4);
        _tile_zero(5);
        if (rows <= unit_rows) return;
        _tile_zero(6);
        _tile_zero(7);
    }

    // Adds the products of activations, rows `stride` bytes apart, with quads of signed weights.
    static void add(const uint8_t * q, int64_t stride, const uint8_t * w, int rows) {
        finish_writing(w);
        _tile_loadd(0, q, stride);
        _tile_loadd(2, w, quad_bytes);
        _tile_loadd(3, w + unit_row_bytes, quad_bytes);
        _tile_dpbssd(4, 0, 2);
        _tile_dpbssd(5, 0, 3);
        if (rows <= unit_rows) return;
        _tile_loadd(1, q + unit_rows * stride, stride);
        _tile_dpbssd(6, 1, 2);
        _tile_dpbssd(7, 1, 3);
    }

    static void store(int32_t (*sums)[gemm_panel], int rows) {
        constexpr int64_t stride = sizeof(sums[0]);
        _tile_stored(4, sums[0], stride);
        _tile_stored(5, sums[0] + gemm_panel / 2, stride);
        if (rows <= unit_rows) return;
        _tile_stored(6, sums[unit_rows], stride);
        _tile_stored(7, sums[unit_rows] + gemm_panel / 2, stride);
    }
};

// ---- few rows

// Up to here the kernels that this set replaces run on. Counted, not measured, in cycles of Sapphire Rapids for a tile
// of 32 k x 32 columns: vpdpbusd takes 12 and 11 for each row (two ports). The matrix unit takes 16 to unpack into L1
// and about 4 for each row (two stores of integer sums, six vector operations on two ports), with some 50 from a load
// to its product, which other work hides only where there are rows enough. The least that it can gain is 5 rows' work.
constexpr int few_rows = 4;

// What this set's kernels replace.
void (*replaced[gemm_format_count])(const gemm_int8_args & a);

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_AMX_MATRIX_UNIT_H
