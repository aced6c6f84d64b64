// GEMM with types of 256 k on AMX: kernels/gemm_k.h with the matrix unit's products of each tile. A type with a scale
// per 16 k feeds the unit a quarter of the k that it takes, others half. Internal linkage, see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_AMX_GEMM_K_H
#define TILEBEAM_NPU_KERNELS_AMX_GEMM_K_H

#include "kernels/amx/matrix_unit.h"
#include "kernels/gemm_k.h"

namespace tb::npu {
namespace {

template <class unit> struct k_on_unit : unit {
    static constexpr bool signed_weights = true;
    static constexpr bool starts = false;

    // While the matrix unit has a tile, vectors scale the products of the one before.
    template <class Format>
    static void block(const uint8_t * panel, const uint8_t * scales, const k_record & r, int rows,
                      int32_t (*sums)[gemm_panel]) {
        alignas(64) int32_t dots[2][Format::scales][gemm_max_rows][gemm_panel];
        const uint8_t * before = nullptr; // scales of the products that wait
        int at = 0;
        k_tile_by_tile<Format>(panel, scales, r.q, rows, sums,
                               [&](const Format & tile, const uint8_t * tile_scales, const uint8_t * tile_q, int) {
                                   make_products(tile, tile_q, rows, dots[at]);
                                   if (before != nullptr) scale_products<Format>(before, dots[1 - at], rows, sums);
                                   before = tile_scales;
                                   at = 1 - at;
                               });
        scale_products<Format>(before, dots[1 - at], rows, sums);
    }

  private:
    template <class Format>
    static void make_products(const Format & tile, const uint8_t * q, int rows,
                              int32_t (*dots)[gemm_max_rows][gemm_panel]) {
        constexpr int part = gemm_panel / Format::scales; // k
        alignas(64) uint8_t w[gemm_panel * gemm_panel];
        for (int i = 0; i < gemm_panel / unit::width; i++) {
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++)
                unit::store(w + quad_bytes * j + column_bytes * unit::width * i, tile.weights(j, i));
        }
        for (int s = 0; s < Format::scales; s++) {
            matrix_unit::clear(rows);
            matrix_unit::add(q + part * s, TB_K_BLOCK, w + gemm_panel * part * s, rows);
            matrix_unit::store(dots[s], rows);
        }
    }

    template <class Format>
    static void scale_products(const uint8_t * scales, const int32_t (*dots)[gemm_max_rows][gemm_panel], int rows,
                               int32_t (*sums)[gemm_panel]) {
        for (int i = 0; i < gemm_panel; i += unit::width) {
            typename unit::ints scale[Format::scales];
#pragma GCC unroll 2
            for (int s = 0; s < Format::scales; s++)
                scale[s] = unit::template widened<!Format::minima>(scales + gemm_panel * s + i);
            for (int m = 0; m < rows; m++) {
                typename unit::ints sum = unit::load_sums(sums[m] + i);
#pragma GCC unroll 2
                for (int s = 0; s < Format::scales; s++)
                    sum = unit::add_product(sum, unit::load_sums(dots[s][m] + i), scale[s]);
                unit::store_sums(sums[m] + i, sum);
            }
        }
    }
};

template <class unit> struct k_runs_on_unit {
    template <gemm_format format, class Format> static void run(const gemm_int8_args & a) {
        if (a.rows <= few_rows) return replaced[format](a);
        const matrix_unit tiles(a.rows, gemm_panel / Format::scales);
        multiply_k_panels<unit, Format>(a);
    }
};

// The kernels of a table that has others of the same formats.
template <class unit> void replace_k_kernels(gemm_kernels & k) {
    for (int f = gemm_q4_k; f < gemm_format_count; f++)
        replaced[f] = k.int8[f].run;
    fill_k_kernels<k_on_unit<unit>, k_runs_on_unit<k_on_unit<unit>>>(k, TILEBEAM_K_NAMES("32x32_amx"));
}

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_AMX_GEMM_K_H
