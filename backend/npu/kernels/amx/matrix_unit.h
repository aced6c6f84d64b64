// AMX's matrix unit: its tiles, configured for as long as a `matrix_unit` lives, and products of up to 32 rows of
// activations with a panel's 32 columns.
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
constexpr int unit_columns = 16;   // of weights
constexpr int unit_row_bytes = 64; // of a tile: a quad of each column

// GCC 12's intrinsics do not tell the compiler what memory they read, or write: it is to be there.
inline void finish_writing(const void * bytes) { asm volatile("" : : "r"(bytes) : "memory"); }

// Tiles by number, as the intrinsics take digits only: 0 and 1 have the activations of the first 16 rows and of those
// that follow, 2 and 3 weights, 4 and 5 the first rows' sums with each of them, 6 and 7 the others'.
class matrix_unit {
  public:
    // For k activations of a row at a time: a multiple of 4, up to 64.
    matrix_unit(int rows, int k) {
        configuration c{};
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
        _tile_storeconfig(&before);
        finish_writing(&before);
        finish_writing(&c);
        _tile_loadconfig(&c);
    }
    // llama.cpp's CPU backend configures the tiles of a thread once, and counts on it for ever (ggml-cpu/amx/mmq.cpp).
    // Where nobody has them, nobody has them then: the system would save them at every switch.
    ~matrix_unit() {
        finish_writing(&before);
        _tile_loadconfig(&before);
    }
    matrix_unit(const matrix_unit &) = delete;
    matrix_unit & operator=(const matrix_unit &) = delete;

    static void clear(int rows) {
        _tile_zero(4);
        _tile_zero(5);
        if (rows <= unit_rows) return;
        _tile_zero(6);
        _tile_zero(7);
    }

    // Adds the products of activations, rows `stride` bytes apart, with quads of 16 columns: of the first weights and
    // of the second, signed bytes or not, both with quads `step` bytes apart.
    template <bool first_signed, bool second_signed>
    static void add(const uint8_t * q, int64_t stride, const uint8_t * first, const uint8_t * second, int64_t step,
                    int rows) {
        finish_writing(first);
        _tile_loadd(0, q, stride);
        _tile_loadd(2, first, step);
        _tile_loadd(3, second, step);
        if constexpr (first_signed) _tile_dpbssd(4, 0, 2);
        if constexpr (!first_signed) _tile_dpbsud(4, 0, 2);
        if constexpr (second_signed) _tile_dpbssd(5, 0, 3);
        if constexpr (!second_signed) _tile_dpbsud(5, 0, 3);
        if (rows <= unit_rows) return;
        _tile_loadd(1, q + unit_rows * stride, stride);
        if constexpr (first_signed) _tile_dpbssd(6, 1, 2);
        if constexpr (!first_signed) _tile_dpbsud(6, 1, 2);
        if constexpr (second_signed) _tile_dpbssd(7, 1, 3);
        if constexpr (!second_signed) _tile_dpbsud(7, 1, 3);
    }

    // The same with the first weights alone, which are not signed.
    static void add_first(const uint8_t * q, int64_t stride, const uint8_t * first, int rows) {
        finish_writing(first);
        _tile_loadd(0, q, stride);
        _tile_loadd(2, first, unit_row_bytes);
        _tile_dpbsud(4, 0, 2);
        if (rows <= unit_rows) return;
        _tile_loadd(1, q + unit_rows * stride, stride);
        _tile_dpbsud(6, 1, 2);
    }

    // Sums with the first weights and with the second: 16 columns of rows of 32.
    static void store(int32_t * first, int32_t * second, int rows) {
        constexpr int64_t stride = gemm_panel * sizeof(int32_t);
        _tile_stored(4, first, stride);
        _tile_stored(5, second, stride);
        if (rows > unit_rows) {
            _tile_stored(6, first + gemm_panel * unit_rows, stride);
            _tile_stored(7, second + gemm_panel * unit_rows, stride);
        }
        asm volatile("" : : : "memory");
    }

  private:
    struct configuration {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    };
    static_assert(sizeof(configuration) == 64, "what ldtilecfg reads");
    configuration before;
};

// Rows of a group at most, and how many of so many go through the unit at a time.
constexpr int unit_group_rows = gemm_most_rows;
constexpr int rows_of_unit(int rows) {
    const int parts = (rows + gemm_max_rows - 1) / gemm_max_rows;
    return (rows + parts - 1) / parts;
}

// What this set's kernels replace, and run themselves up to so many rows.
void (*replaced[gemm_format_count])(const gemm_int8_args & a);
constexpr int few_rows = 10;

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_AMX_MATRIX_UNIT_H
