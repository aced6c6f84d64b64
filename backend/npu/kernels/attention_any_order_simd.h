// attention_any_order over an ISA's `simd` struct (kernels/<isa>/simd.h, included before this): V is widened to doubles
// once for all rows, a panel at a time, and a register tile of sums stays in registers over all cells. Internal
// linkage, see vec_loops.h.
//
// A product of P and an odd V (53 bits, of which the last is set) is a number whose own last bit lies far below the
// sums' grid, so that none is in the middle between two of its points: see kernels/attention.h.
#ifndef TILEBEAM_NPU_KERNELS_ATTENTION_ANY_ORDER_SIMD_H
#define TILEBEAM_NPU_KERNELS_ATTENTION_ANY_ORDER_SIMD_H

#include "kernels/attention_any_order.h"
#include "kernels/attention_cells.h"
#include "kernels/vec_simd.h"

namespace tb::npu {
namespace {

constexpr int wide_lanes = lanes / 2;
constexpr int wide_panel = simd::tile_vecs * wide_lanes; // doubles
static_assert(attention_any_order_dim(1) % wide_panel == 0 && wide_panel % lanes == 0);

double powers_simd(int64_t n, float * x, float max) {
    exp_sum_simd(n, x, max);
    return sum_in_any_order(n, x);
}

// Columns [d, d + wide_panel) of `rows` rows; v: [cells][wide_panel].
template <int rows> void add_wide(const attention_any_order_args & a, int first, int d, const double * v) {
    using wide = simd::wide;
    constexpr int vecs = simd::tile_vecs;
    wide sum[rows][vecs];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 8
        for (int i = 0; i < vecs; i++) {
            sum[r][i] = simd::load(a.o[first + r] + d + i * wide_lanes);
        }
    }
    const auto weight = [p = a.p + first * attention_tile_cells](int r, int c) {
        return p[r * attention_tile_cells + c];
    };
    add_products(sum, a.cells, weight, [v](int c, wide * x) {
#pragma GCC unroll 8
        for (int i = 0; i < vecs; i++) {
            x[i] = simd::load(v + c * wide_panel + i * wide_lanes);
        }
    });
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 8
        for (int i = 0; i < vecs; i++) {
            simd::store(a.o[first + r] + d + i * wide_lanes, sum[r][i]);
        }
    }
}

template <class row> void accumulate_any_order(const attention_any_order_args & a) {
    alignas(64) double v[attention_tile_cells * wide_panel];
    fetcher soon(a.fetch, a.cells * ((a.dim + wide_panel - 1) / wide_panel));
    for (int d = 0; d < a.dim; d += wide_panel) {
        for (int c = 0; c < a.cells; c++) {
            soon.step();
            alignas(64) float x[wide_panel] = {};
            const row cell(a.v[c]);
            for (int i = 0; i < wide_panel && d + i < a.dim; i += lanes) {
                const int left = a.dim - d - i;
                simd::store(x + i, left >= lanes ? cell.get(d + i) : cell.get_n(d + i, left));
            }
            for (int i = 0; i < wide_panel; i++) {
                v[c * wide_panel + i] = odd(static_cast<double>(x[i]));
            }
        }
        int n = 0;
        for (int r = 0; r < a.rows; r += n) {
            n = next_part(a.rows - r, simd::tile_rows);
            with_rows<simd::tile_rows>(n, [&a, r, d, &v](auto rows) { add_wide<rows()>(a, r, d, v); });
        }
    }
}

void accumulate_any_order_simd(const attention_any_order_args & a) {
    with_cells(a.type, [&a](auto cell) { accumulate_any_order<decltype(cell)>(a); });
}

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_ATTENTION_ANY_ORDER_SIMD_H
