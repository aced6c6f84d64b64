// Attention's products with operands in BF16, over an ISA's `simd` struct (kernels/<isa>/simd.h) and its `bf16`, whose
// instruction adds two products to each lane: twice those of an FMA. Internal linkage, see vec_loops.h.
//
//     struct bf16 {
//         using vec = ..;                                    2 * lanes numbers
//         static vec round(simd::vec low, simd::vec high);   those of low first
//         static vec alternate(simd::vec low, simd::vec high); low[0], high[0], low[1] ..
//         static vec load(const uint32_t * pairs), all(const uint32_t * pair);
//         static void store(uint32_t * pairs, vec x);
//         static simd::vec as_floats(vec x);                 the same bits
//         static simd::vec add(simd::vec sum, vec a, vec b); + the products of both numbers of each pair
//     };
//
// Operands lie in pairs. Scores: pairs of neighbouring elements of a cell, [dim / 2][cells], so that a step multiplies
// one broadcast pair of a query with whole vectors of cells. Accumulation: pairs of neighbouring cells, [cells /
// 2][dim]. Both are put together once per tile, for all of its rows.
//
// The cells of a tile have much in common where a model adds biases to its keys (Qwen2), more than 8 bits leave room
// for. So what is rounded is a cell's difference from the tile's middle one, whose score, in float32, is added to all:
// with Qwen2.5-0.5B a seventh of the divergence (docs/accuracy.md).
#ifndef TILEBEAM_NPU_KERNELS_ATTENTION_BF16_SIMD_H
#define TILEBEAM_NPU_KERNELS_ATTENTION_BF16_SIMD_H

#include <algorithm>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/attention_cells.h"

namespace tb::npu {
namespace {

constexpr int fewest_rows = 12; // fewer do not pay for putting pairs together
constexpr int pair_rows = attention_tile_cells / 2;
constexpr int panel_vecs = simd::tile_vecs, panel = panel_vecs * lanes; // columns that are accumulated at once
constexpr int block_rows = 64;                                          // queries that are rounded at a time

// Elements d .. d + lanes - 1 of which `left` exist.
template <class row> vec part(const row & x, int d, int left) {
    return left >= lanes ? x.get(d) : left > 0 ? x.get_n(d, left) : simd::zero();
}

// sum[r][v] += pairs of left[r] . pairs of right, over n steps; right: [n][columns].
template <int rows, int vecs>
void multiply(const uint32_t * left, int stride, const uint32_t * right, int columns, int n, vec (&sum)[rows][vecs]) {
    for (int i = 0; i < n; i++) {
        bf16::vec x[vecs];
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++) {
            x[v] = bf16::load(right + i * columns + v * lanes);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const bf16::vec pair = bf16::all(left + r * stride + i);
#pragma GCC unroll 8
            for (int v = 0; v < vecs; v++) {
                sum[r][v] = bf16::add(sum[r][v], pair, x[v]);
            }
        }
    }
}

// ---- scores

// Differences from the middle cell, [dim / 2][attention_tile_cells] pairs; cells up to the next whole vector repeat the
// last one.
template <class row> void pair_elements(const attention_scores_args & a, const row & middle, uint32_t * pairs) {
    fetcher soon(a.fetch, (a.cells + lanes - 1) / lanes * ((a.dim + 2 * lanes - 1) / (2 * lanes)));
    for (int c = 0; c < a.cells; c += lanes) {
        row rows[lanes];
        for (int i = 0; i < lanes; i++) {
            rows[i] = row(a.k[std::min(c + i, a.cells - 1)]);
        }
        for (int d = 0; d < a.dim; d += 2 * lanes) {
            soon.step();
            const int left = a.dim - d;
            const vec low = part(middle, d, left), high = part(middle, d + lanes, left - lanes);
            vec x[lanes];
            for (int i = 0; i < lanes; i++) {
                x[i] = bf16::as_floats(bf16::round(simd::sub(part(rows[i], d, left), low),
                                                   simd::sub(part(rows[i], d + lanes, left - lanes), high)));
            }
            simd::transpose(x);
            for (int i = 0; i < std::min(lanes, (left + 1) / 2); i++) {
                simd::store(reinterpret_cast<float *>(pairs + (d / 2 + i) * attention_tile_cells + c), x[i]);
            }
        }
    }
}

// The scores of one cell, by row; room for whole vectors.
template <class row> void scores_of(const attention_scores_args & a, const row & cell, float * s) {
    for (int first = 0; first < a.rows; first += lanes) {
        vec sum[lanes];
        std::fill_n(sum, lanes, simd::zero());
        for (int d = 0; d < a.dim; d += lanes) {
            const vec k = part(cell, d, a.dim - d);
#pragma GCC unroll 16
            for (int i = 0; i < lanes; i++) {
                const cell_row<float> q(a.q[std::min(first + i, a.rows - 1)]);
                sum[i] = simd::fma(part(q, d, a.dim - d), k, sum[i]);
            }
        }
        simd::store(s + first, simd::sums(sum));
    }
}

// Rows of floats as pairs, each `stride` pairs long: a multiple of `lanes`.
void pair_queries(const float * const * q, int rows, int dim, uint32_t * pairs, int stride) {
    for (int r = 0; r < rows; r++) {
        const cell_row<float> x(q[r]);
        for (int d = 0; d < dim; d += 2 * lanes) {
            const vec high = part(x, d + lanes, dim - d - lanes);
            bf16::store(pairs + r * stride + d / 2, bf16::round(part(x, d, dim - d), high));
        }
    }
}

template <int rows, int vecs>
void scores_tile(const uint32_t * q, int stride, const uint32_t * k, int n, const float * added, float * s) {
    vec sum[rows][vecs];
    for (int r = 0; r < rows; r++) {
        std::fill_n(sum[r], vecs, simd::set1(added[r]));
    }
    multiply(q, stride, k, attention_tile_cells, n, sum);
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < vecs; v++) {
            simd::store(s + r * attention_tile_cells + v * lanes, sum[r][v]);
        }
    }
}

void scores_bf16(const attention_scores_args & a) {
    const int vecs = (a.cells + lanes - 1) / lanes, n = (a.dim + 1) / 2;
    const int stride = (a.dim + 2 * lanes - 1) / (2 * lanes) * lanes;
    // scratch has room for dim x 64 floats: half of it are the cells, the other half 64 queries
    uint32_t * k = reinterpret_cast<uint32_t *>(a.scratch);
    uint32_t * q = k + stride * attention_tile_cells;
    float added[attention_tile_rows];
    with_cells(a.type, [&](auto cell) {
        const decltype(cell) middle(a.k[a.cells / 2]);
        pair_elements(a, middle, k);
        scores_of(a, middle, added);
    });
    for (int first = 0; first < a.rows; first += block_rows) {
        const int in_block = std::min(block_rows, a.rows - first);
        pair_queries(a.q + first, in_block, a.dim, q, stride);
        int at_once = 0;
        for (int r = 0; r < in_block; r += at_once) {
            at_once = next_part(in_block - r, simd::tile_rows);
            float * s = a.s + (first + r) * attention_tile_cells;
            with_rows<simd::tile_rows>(at_once, [&](auto rows) {
                int v = 0;
                for (; v + simd::tile_vecs <= vecs; v += simd::tile_vecs) {
                    scores_tile<rows(), simd::tile_vecs>(q + r * stride, stride, k + v * lanes, n, added + first + r,
                                                         s + v * lanes);
                }
                for (; v < vecs; v++) {
                    scores_tile<rows(), 1>(q + r * stride, stride, k + v * lanes, n, added + first + r, s + v * lanes);
                }
            });
        }
    }
}

// ---- accumulate

// Columns d .. d + wide - 1 of V as [cells / 2][panel] pairs; a last odd cell is paired with zeros.
template <class row> void pair_cells(const row * v, int cells, int d, int wide, uint32_t * pairs, fetcher & soon) {
    for (int c = 0; c < cells; c += 2) {
        soon.step();
        for (int i = 0; i < wide; i += lanes) {
            const vec low = part(v[c], d + i, wide - i);
            const vec high = c + 1 < cells ? part(v[c + 1], d + i, wide - i) : simd::zero();
            bf16::store(pairs + c / 2 * panel + i, bf16::alternate(low, high));
        }
    }
}

// o[r][d ..] for `rows` rows and `vecs` vectors, whose last has `tail` elements.
template <int rows, int vecs>
void accumulate_tile(const attention_accumulate_args & a, int first, int d, int tail, const uint32_t * weights,
                     const uint32_t * v) {
    vec sum[rows][vecs];
    const auto width_of = [tail](int i) { return i == vecs - 1 ? tail : lanes; };
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const vec alpha = simd::set1(a.alpha[first + r]);
#pragma GCC unroll 8
        for (int i = 0; i < vecs; i++) {
            sum[r][i] = simd::mul(alpha, part(cell_row<float>(a.o[first + r]), d + i * lanes, width_of(i)));
        }
    }
    multiply(weights + first * pair_rows, pair_rows, v, panel, (a.cells + 1) / 2, sum);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 8
        for (int i = 0; i < vecs; i++) {
            float * o = a.o[first + r] + d + i * lanes;
            width_of(i) == lanes ? simd::store(o, sum[r][i]) : simd::store_n(o, sum[r][i], width_of(i));
        }
    }
}

template <class row> void accumulate_cells(const attention_accumulate_args & a) {
    row v[attention_tile_cells];
    for (int c = 0; c < a.cells; c++) {
        v[c] = row(a.v[c]);
    }
    alignas(64) uint32_t weights[attention_tile_rows * pair_rows];
    const float * p[attention_tile_rows];
    for (int r = 0; r < a.rows; r++) {
        p[r] = a.p + r * attention_tile_cells;
    }
    pair_queries(p, a.rows, a.cells, weights, pair_rows);
    uint32_t * pairs = reinterpret_cast<uint32_t *>(a.scratch);
    fetcher soon(a.fetch, (a.cells + 1) / 2 * ((a.dim + panel - 1) / panel));
    for (int d = 0; d < a.dim; d += panel) {
        const int wide = std::min(panel, a.dim - d);
        pair_cells(v, a.cells, d, wide, pairs, soon);
        int n = 0;
        for (int r = 0; r < a.rows; r += n) {
            n = next_part(a.rows - r, simd::tile_rows);
            with_rows<simd::tile_rows>(n, [&](auto rows) {
                if (wide == panel) {
                    return accumulate_tile<rows(), panel_vecs>(a, r, d, lanes, weights, pairs);
                }
                for (int i = 0; i < wide; i += lanes) {
                    accumulate_tile<rows(), 1>(a, r, d + i, std::min(lanes, wide - i), weights, pairs + i);
                }
            });
        }
    }
}

void accumulate_bf16(const attention_accumulate_args & a) {
    with_cells(a.type, [&a](auto cell) { accumulate_cells<decltype(cell)>(a); });
}

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_ATTENTION_BF16_SIMD_H
