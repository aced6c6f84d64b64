// Attention kernels written once over an ISA's `simd` struct (kernels/<isa>/simd.h, included before this). Internal
// linkage, see vec_loops.h.
//
// scores has two ways. Many rows: the tile's K cells are transposed once to [dim][cells] floats, then each step of d
// multiplies one broadcast q per row with whole vectors of cells, in a register tile of rows x vectors. Few rows (a
// decode step): lanes run along d, K is read once as it lies, and the lanes of each sum are added at the end.
// accumulate runs lanes along d of V, with a register tile of rows x vectors that stays in registers over all cells;
// for many rows, a panel of V as wide as that tile is widened to floats first.
#ifndef TILEBEAM_NPU_KERNELS_ATTENTION_SIMD_H
#define TILEBEAM_NPU_KERNELS_ATTENTION_SIMD_H

#include <algorithm>
#include <cstdint>

#include "kernels/attention.h"
#include "kernels/attention_any_order_simd.h"
#include "kernels/attention_cells.h"
#include "kernels/attention_softmax_simd.h"
#include "kernels/vec_simd.h"

namespace tb::npu {
namespace {

constexpr int transpose_rows = 12; // from this many rows on, transposing K pays

// ---- scores, many rows

// K cells as [dim][attention_tile_cells] floats; cells up to the next whole vector repeat the last one.
template <class row> void transpose_cells(const attention_scores_args & a) {
    fetcher soon(a.fetch, (a.cells + lanes - 1) / lanes * (a.dim / lanes));
    for (int c = 0; c < a.cells; c += lanes) {
        row rows[lanes];
        for (int i = 0; i < lanes; i++) {
            rows[i] = row(a.k[std::min(c + i, a.cells - 1)]);
        }
        int d = 0;
        for (; d + lanes <= a.dim; d += lanes) {
            soon.step();
            vec x[lanes];
            for (int i = 0; i < lanes; i++) {
                x[i] = rows[i].get(d);
            }
            simd::transpose(x);
            for (int i = 0; i < lanes; i++) {
                simd::store(a.scratch + (d + i) * attention_tile_cells + c, x[i]);
            }
        }
        if (d < a.dim) {
            vec x[lanes];
            for (int i = 0; i < lanes; i++) {
                x[i] = rows[i].get_n(d, a.dim - d);
            }
            simd::transpose(x);
            for (int i = 0; i < a.dim - d; i++) {
                simd::store(a.scratch + (d + i) * attention_tile_cells + c, x[i]);
            }
        }
    }
}

template <int rows, int vecs> void scores_tile(int dim, const float * const * q, const float * k, float * s) {
    const float * row[rows];
    vec sum[rows][vecs];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        row[r] = q[r];
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++) {
            sum[r][v] = simd::zero();
        }
    }
    const auto query = [&row](int r, int d) { return row[r][d]; };
    add_products(sum, dim, query, [k](int d, vec * x) {
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++) {
            x[v] = simd::load(k + d * attention_tile_cells + v * lanes);
        }
    });
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < vecs; v++) {
            simd::store(s + r * attention_tile_cells + v * lanes, sum[r][v]);
        }
    }
}

template <class row> void scores_many(const attention_scores_args & a) {
    transpose_cells<row>(a);
    const int vecs = (a.cells + lanes - 1) / lanes;
    int n = 0;
    for (int r = 0; r < a.rows; r += n) {
        n = next_part(a.rows - r, simd::tile_rows);
        float * s = a.s + r * attention_tile_cells;
        with_rows<simd::tile_rows>(n, [&](auto rows) {
            int v = 0;
            for (; v + simd::tile_vecs <= vecs; v += simd::tile_vecs) {
                scores_tile<rows(), simd::tile_vecs>(a.dim, a.q + r, a.scratch + v * lanes, s + v * lanes);
            }
            for (; v < vecs; v++) {
                scores_tile<rows(), 1>(a.dim, a.q + r, a.scratch + v * lanes, s + v * lanes);
            }
        });
    }
}

// ---- scores, few rows

constexpr int few_rows = 6; // at a time
static_assert(attention_any_order_rows < transpose_rows);

// How many cells meet `rows` rows in registers: a power of two, so that it divides the lanes.
constexpr int few_cells(int rows) {
    int cells = 1;
    while (2 * cells <= lanes && 2 * cells * rows <= simd::tile_rows * simd::tile_vecs) {
        cells *= 2;
    }
    return cells;
}

// Sums of the products of rows q and of cells k, still in lanes, to sums[row * lanes + cell].
template <int rows, int cells, class row>
void few_tile(int dim, const float * const * q, const row * k, vec * sums, fetcher & soon) {
    vec sum[rows * cells];
#pragma GCC unroll 32
    for (int i = 0; i < rows * cells; i++) {
        sum[i] = simd::zero();
    }
    const auto step = [&](auto && load_q, auto && load_k) __attribute__((always_inline)) {
        vec y[cells];
#pragma GCC unroll 16
        for (int c = 0; c < cells; c++) {
            y[c] = load_k(k[c]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const vec x = load_q(q[r]);
#pragma GCC unroll 16
            for (int c = 0; c < cells; c++) {
                sum[r * cells + c] = simd::fma(x, y[c], sum[r * cells + c]);
            }
        }
    };
    int d = 0;
    for (; d + lanes <= dim; d += lanes) {
        soon.step();
        step([d](const float * x) { return simd::load(x + d); }, [d](const row & x) { return x.get(d); });
    }
    if (d < dim) {
        const int n = dim - d;
        step([d, n](const float * x) { return simd::load_n(x + d, n); },
             [d, n](const row & x) { return x.get_n(d, n); });
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 16
        for (int c = 0; c < cells; c++) {
            sums[r * lanes + c] = sum[r * cells + c];
        }
    }
}

template <int rows, class row> void scores_few(const attention_scores_args & a, int first) {
    constexpr int cells = few_cells(rows);
    const attention_fetch nothing = {};
    fetcher soon(first == 0 ? a.fetch : nothing, (a.cells + cells - 1) / cells * (a.dim / lanes));
    for (int c = 0; c < a.cells; c += lanes) {
        vec sums[rows][lanes];
        for (int part = 0; part < lanes; part += cells) {
            row k[cells];
            for (int i = 0; i < cells; i++) {
                k[i] = row(a.k[std::min(c + part + i, a.cells - 1)]);
            }
            few_tile<rows, cells, row>(a.dim, a.q + first, k, &sums[0][part], soon);
        }
        for (int r = 0; r < rows; r++) {
            simd::store(a.s + (first + r) * attention_tile_cells + c, simd::sums(sums[r]));
        }
    }
}

void scores_simd(const attention_scores_args & a) {
    with_cells(a.type, [&a](auto cell) {
        using row = decltype(cell);
        if (a.rows >= transpose_rows && a.cells >= lanes) {
            return scores_many<row>(a);
        }
        int n = 0;
        for (int r = 0; r < a.rows; r += n) {
            n = next_part(a.rows - r, few_rows);
            with_rows<few_rows>(n, [&a, r](auto rows) { scores_few<rows(), row>(a, r); });
        }
    });
}

// ---- accumulate

// Where accumulate finds vectors of V: in the cells, or in a panel of them that was widened to floats.
template <class row> struct cell_source {
    const row * v;

    vec get(int c, int d) const { return v[c].get(d); }
    vec get_n(int c, int d, int n) const { return v[c].get_n(d, n); }
};

constexpr int panel = simd::tile_vecs * lanes;

struct panel_source {
    const float * x; // [cells][panel]
    int first;       // the panel's first column

    vec get(int c, int d) const { return simd::load(x + c * panel + d - first); }
    vec get_n(int c, int d, int n) const { return simd::load_n(x + c * panel + d - first, n); }
};

// o[r][d..] for `rows` rows and `vecs` vectors, whose last has `tail` elements.
template <int rows, int vecs, class S>
void accumulate_tile(const attention_accumulate_args & a, int first, int d, int tail, const S & v, fetcher & soon) {
    vec sum[rows][vecs];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const vec alpha = simd::set1(a.alpha[first + r]);
#pragma GCC unroll 8
        for (int i = 0; i < vecs; i++) {
            sum[r][i] = simd::mul(alpha, get(a.o[first + r] + d + i * lanes, i == vecs - 1 ? tail : lanes));
        }
    }
    const auto weight = [p = a.p + first * attention_tile_cells](int r, int c) {
        return p[r * attention_tile_cells + c];
    };
    add_products(sum, a.cells, weight, [&](int c, vec * x) __attribute__((always_inline)) {
        soon.step();
#pragma GCC unroll 8
        for (int i = 0; i < vecs; i++) {
            x[i] = i == vecs - 1 && tail < lanes ? v.get_n(c, d + i * lanes, tail) : v.get(c, d + i * lanes);
        }
    });
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 8
        for (int i = 0; i < vecs; i++) {
            put(a.o[first + r] + d + i * lanes, sum[r][i], i == vecs - 1 ? tail : lanes);
        }
    }
}

// Columns d to d + wide of `rows` rows.
template <int rows, class S>
void accumulate_columns(const attention_accumulate_args & a, int first, int d, int wide, const S & v, fetcher & soon) {
    if (wide == panel) {
        return accumulate_tile<rows, simd::tile_vecs>(a, first, d, lanes, v, soon);
    }
    for (int at = d; at < d + wide; at += lanes) {
        const int left = d + wide - at;
        if (left >= lanes) {
            accumulate_tile<rows, 1>(a, first, at, lanes, v, soon);
        } else {
            accumulate_tile<rows, 1>(a, first, at, left, v, soon);
        }
    }
}

template <class row> void accumulate_cells(const attention_accumulate_args & a) {
    row v[attention_tile_cells];
    for (int c = 0; c < a.cells; c++) {
        v[c] = row(a.v[c]);
    }
    const bool widen = a.rows > 2 * simd::tile_rows;
    fetcher soon(a.fetch, a.cells * ((a.dim + panel - 1) / panel));
    for (int d = 0; d < a.dim; d += panel) {
        const int wide = std::min(panel, a.dim - d);
        const bool widened = widen && wide == panel;
        for (int c = 0; c < a.cells && widened; c++) {
            soon.step();
#pragma GCC unroll 8
            for (int i = 0; i < simd::tile_vecs; i++) {
                simd::store(a.scratch + c * panel + i * lanes, v[c].get(d + i * lanes));
            }
        }
        int n = 0;
        for (int r = 0; r < a.rows; r += n) {
            n = next_part(a.rows - r, simd::tile_rows);
            with_rows<simd::tile_rows>(n, [&](auto rows) {
                if (widened) {
                    accumulate_columns<rows()>(a, r, d, wide, panel_source{a.scratch, d}, soon);
                } else {
                    accumulate_columns<rows()>(a, r, d, wide, cell_source<row>{v}, soon);
                }
            });
        }
    }
}

void accumulate_simd(const attention_accumulate_args & a) {
    with_cells(a.type, [&a](auto cell) { accumulate_cells<decltype(cell)>(a); });
}

void exp2_fp16_simd(const uint16_t * in, uint16_t * out, size_t n) {
    each(static_cast<int64_t>(n), [=](int64_t i, int m) {
        // what is above zero counts as zero; NaN stays NaN because min returns its second argument then
        const vec x = simd::min(simd::zero(), get(in + i, m));
        vec y[1] = {x};
        exp2_halves(y);
        put(out + i, y[0], m);
    });
}

void fill_attention_simd(attention_kernels & k) {
    k.scores = scores_simd;
    k.softmax = softmax_simd;
    k.accumulate = accumulate_simd;
    k.exp2_fp16 = exp2_fp16_simd;
    k.any_order = {powers_simd, accumulate_any_order_simd};
}

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_ATTENTION_SIMD_H
