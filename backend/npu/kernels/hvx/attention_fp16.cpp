// The two products of FlashAttention on the matrix unit (hmx_model.h): tiles are packed on HVX.
#include <algorithm>
#include <cstring>

#include "kernels/attention.h"
#include "kernels/hvx/hmx_model.h"
#include "kernels/hvx/hvx.h"

namespace tb::npu {

namespace {

using namespace hvx;
using hmx::side;
using hmx::tile_halves;

constexpr int tiles_of(int n) { return (n + side - 1) / side; }

// `n` (at most 32) floats that are FP16 numbers, a word each; zeros behind them.
HVX_Vector halves_of(const float * x, int n) {
    if (n == side) return float_to_half(load(x));
    alignas(128) float part[side] = {};
    std::memcpy(part, x, static_cast<size_t>(n) * sizeof(float));
    return float_to_half(load_aligned(part));
}

// The same of a cell's row from `d` on.
HVX_Vector halves_of(const void * cell, cell_type type, int d, int n) {
    if (type == cell_type::f32) return halves_of(static_cast<const float *>(cell) + d, n);
    alignas(128) uint16_t part[2 * side] = {};
    std::memcpy(part, static_cast<const uint16_t *>(cell) + d, static_cast<size_t>(n) * sizeof(uint16_t));
    return Q6_V_lo_W(Q6_Wuw_vunpack_Vuh(load_aligned(part)));
}

// A tile whose row r is given by row(r), words of 32 halves, for r < rows; zeros behind them.
template <class F> void pack_rows(int rows, uint16_t * tile, F && row) {
    const HVX_Vector zeros = words(0);
    for (int r = 0; r < side; r += 2, tile += 2 * side)
        store_aligned(tile, interleave(r < rows ? row(r) : zeros, r + 1 < rows ? row(r + 1) : zeros));
}

// 32 (or fewer) cells of K from `d` on as the operand [k][cell]. Pairs of k stay together and pairs of cells do not, so
// this is a transposition of words; a cache kept in this order would need none.
void pack_columns(const void * const * cells, int n_cells, cell_type type, int d, int n, uint16_t * tile) {
    alignas(128) uint16_t row[2 * side];
    uint32_t pairs[side];
    std::memset(tile, 0, tile_halves * sizeof(uint16_t));
    for (int c = 0; c < n_cells; c++) {
        const HVX_Vector v = halves_of(cells[c], type, d, n);
        store_aligned(row, Q6_Vh_vpacke_VwVw(words(0), v));
        std::memcpy(pairs, row, sizeof pairs);
        for (int k = 0; k < side / 2; k++)
            std::memcpy(tile + hmx::element(2 * k, c), pairs + k, sizeof pairs[k]);
    }
}

// The first `rows` rows of an FP16 tile as floats, `n` of each.
template <class F> void unpack_rows(const uint16_t * tile, int rows, int n, F && row) {
    alignas(128) float part[2][side];
    for (int r = 0; r < rows; r += 2, tile += 2 * side) {
        const HVX_VectorPair both = deinterleave(load_aligned(tile));
        store_aligned(part[0], half_to_float(Q6_V_lo_W(both)));
        store_aligned(part[1], half_to_float(Q6_V_hi_W(both)));
        for (int i = 0; i < 2 && r + i < rows; i++)
            std::memcpy(row(r + i), part[i], static_cast<size_t>(n) * sizeof(float));
    }
}

// x (`rows` rows) times w over `tiles` tiles, to `n` floats of each row.
template <class F> void multiply(int rows, int n, const uint16_t * x, const uint16_t * w, int tiles, F && row) {
    hmx::accumulator sum;
    hmx::clear(sum);
    hmx::multiply(sum, rows, x, w, tiles);
    alignas(128) uint16_t tile[tile_halves];
    hmx::store(sum, rows, tile);
    unpack_rows(tile, rows, n, row);
}

void scores(const attention_scores_args & a) {
    const int k_tiles = tiles_of(a.dim);
    uint16_t * const queries = reinterpret_cast<uint16_t *>(a.scratch);
    uint16_t * const keys = queries + k_tiles * tile_halves;
    const auto width = [&](int t) { return std::min(side, a.dim - t * side); };
    for (int c = 0; c < a.cells; c += side) {
        for (int t = 0; t < k_tiles; t++)
            pack_columns(a.k + c, std::min(side, a.cells - c), a.type, t * side, width(t), keys + t * tile_halves);
        for (int r = 0; r < a.rows; r += side) {
            const int rows = std::min(side, a.rows - r);
            for (int t = 0; t < k_tiles; t++)
                pack_rows(rows, queries + t * tile_halves,
                          [&](int i) { return halves_of(a.q[r + i] + t * side, width(t)); });
            multiply(rows, side, queries, keys, k_tiles,
                     [&](int i) { return a.s + (r + i) * attention_tile_cells + c; });
        }
    }
}

void products(const attention_accumulate_args & a) {
    const int c_tiles = tiles_of(a.cells);
    uint16_t * const powers = reinterpret_cast<uint16_t *>(a.scratch);
    uint16_t * const values = powers + c_tiles * tile_halves;
    for (int d = 0; d < a.dim; d += side) {
        const int n = std::min(side, a.dim - d);
        for (int t = 0; t < c_tiles; t++)
            pack_rows(a.cells - t * side, values + t * tile_halves,
                      [&](int c) { return halves_of(a.v[t * side + c], a.type, d, n); });
        for (int r = 0; r < a.rows; r += side) {
            const int rows = std::min(side, a.rows - r);
            for (int t = 0; t < c_tiles; t++)
                pack_rows(rows, powers + t * tile_halves, [&](int i) {
                    return halves_of(a.p + (r + i) * attention_tile_cells + t * side,
                                     std::min(side, a.cells - t * side));
                });
            multiply(rows, n, powers, values, c_tiles, [&](int i) { return a.o[r + i] + d; });
        }
    }
}

} // namespace

void fill_attention_hvx_fp16(attention_kernels & k) {
    k.fp16 = {"attention_fp16_32x32_hvx_hmx_model", scores, products};
}

} // namespace tb::npu
