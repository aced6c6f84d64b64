// Attention kernels written once over an ISA's `simd` struct (kernels/<isa>/simd.h, included before this). Internal
// linkage, see vec_loops.h.
//
// scores has two ways. Many rows: the tile's K cells are transposed once to [dim][cells] floats, then each step of d
// multiplies one broadcast q per row with whole vectors of cells, in a register tile of rows x vectors. Few rows (a
// decode step): lanes run along d, K is read once as it lies, and the lanes of 4 x 4 sums are added at the end.
// accumulate runs lanes along d of V, with a register tile of rows x vectors that stays in registers over all cells.
#ifndef TILEBEAM_NPU_KERNELS_ATTENTION_SIMD_H
#define TILEBEAM_NPU_KERNELS_ATTENTION_SIMD_H

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/attention.h"
#include "kernels/vec_simd.h"

namespace tb::npu {
namespace {

constexpr int lanes = simd::width;
constexpr int transpose_rows = 12; // from this many rows on, transposing K pays

// ---- scores, many rows

// K cells as [dim][attention_tile_cells] floats; cells up to the next whole vector repeat the last one.
template <class T> void transpose_cells(const attention_scores_args & a) {
    for (int c = 0; c < a.cells; c += lanes) {
        const T * rows[lanes];
        for (int i = 0; i < lanes; i++) {
            rows[i] = static_cast<const T *>(a.k[std::min(c + i, a.cells - 1)]);
        }
        int d = 0;
        for (; d + lanes <= a.dim; d += lanes) {
            vec x[lanes];
            for (int i = 0; i < lanes; i++) {
                x[i] = simd::load(rows[i] + d);
            }
            simd::transpose(x);
            for (int i = 0; i < lanes; i++) {
                simd::store(a.scratch + (d + i) * attention_tile_cells + c, x[i]);
            }
        }
        if (d < a.dim) {
            vec x[lanes];
            for (int i = 0; i < lanes; i++) {
                x[i] = simd::load_n(rows[i] + d, a.dim - d);
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
    for (int d = 0; d < dim; d++) {
        vec cell[vecs];
#pragma GCC unroll 8
        for (int v = 0; v < vecs; v++) {
            cell[v] = simd::load(k + d * attention_tile_cells + v * lanes);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const vec x = simd::set1(row[r][d]);
#pragma GCC unroll 8
            for (int v = 0; v < vecs; v++) {
                sum[r][v] = simd::fma(x, cell[v], sum[r][v]);
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < vecs; v++) {
            simd::store(s + r * attention_tile_cells + v * lanes, sum[r][v]);
        }
    }
}

template <int vecs> void scores_rows(int rows, int dim, const float * const * q, const float * k, float * s) {
    switch (rows) {
    case 1:
        return scores_tile<1, vecs>(dim, q, k, s);
    case 2:
        return scores_tile<2, vecs>(dim, q, k, s);
    case 3:
        return scores_tile<3, vecs>(dim, q, k, s);
    case 4:
        return scores_tile<4, vecs>(dim, q, k, s);
    case 5:
        return scores_tile<5, vecs>(dim, q, k, s);
    default:
        return scores_tile<6, vecs>(dim, q, k, s);
    }
}

// Parts of at most tile_rows rows, as equal as possible.
inline int next_part(int left) {
    return (left + (left + simd::tile_rows - 1) / simd::tile_rows - 1) /
           ((left + simd::tile_rows - 1) / simd::tile_rows);
}

template <class T> void scores_many(const attention_scores_args & a) {
    transpose_cells<T>(a);
    int n = 0;
    for (int r = 0; r < a.rows; r += n) {
        n = next_part(a.rows - r);
        const int vecs = (a.cells + lanes - 1) / lanes;
        int v = 0;
        for (; v + simd::tile_vecs <= vecs; v += simd::tile_vecs) {
            scores_rows<simd::tile_vecs>(n, a.dim, a.q + r, a.scratch + v * lanes,
                                         a.s + r * attention_tile_cells + v * lanes);
        }
        for (; v < vecs; v++) {
            scores_rows<1>(n, a.dim, a.q + r, a.scratch + v * lanes, a.s + r * attention_tile_cells + v * lanes);
        }
    }
}

// ---- scores, few rows

template <int rows, int cells, class T, class L>
__attribute__((always_inline)) inline void dot_step(const float * const (&q)[rows], const T * const (&k)[cells], int d,
                                                    vec (&sum)[lanes], L && load) {
    vec x[rows];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        x[r] = load(q[r] + d);
    }
#pragma GCC unroll 16
    for (int c = 0; c < cells; c++) {
        const vec y = load(k[c] + d);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            sum[r * cells + c] = simd::fma(x[r], y, sum[r * cells + c]);
        }
    }
}

template <int rows, class T> void scores_few(const attention_scores_args & a, int first) {
    constexpr int cells = rows == 1 ? lanes : rows == 2 ? lanes / 2 : lanes / 4;
    const int whole = a.dim / lanes * lanes;
    const float * q[rows];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        q[r] = a.q[first + r];
    }
    for (int c = 0; c < a.cells; c += cells) {
        const T * k[cells];
#pragma GCC unroll 16
        for (int i = 0; i < cells; i++) {
            k[i] = static_cast<const T *>(a.k[std::min(c + i, a.cells - 1)]);
        }
        vec sum[lanes];
#pragma GCC unroll 16
        for (int i = 0; i < lanes; i++) {
            sum[i] = simd::zero();
        }
        for (int d = 0; d < whole; d += lanes) {
            dot_step<rows, cells, T>(q, k, d, sum, [](const auto * x) { return simd::load(x); });
        }
        if (whole < a.dim) {
            const int n = a.dim - whole;
            dot_step<rows, cells, T>(q, k, whole, sum, [n](const auto * x) { return simd::load_n(x, n); });
        }
        alignas(64) float out[lanes];
        simd::store(out, simd::sums(sum));
        float * s = a.s + first * attention_tile_cells + c;
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            std::memcpy(s + r * attention_tile_cells, out + r * cells, cells * sizeof(float));
        }
    }
}

template <class T> void scores_of(const attention_scores_args & a) {
    if (a.rows >= transpose_rows && a.cells >= lanes) {
        return scores_many<T>(a);
    }
    for (int r = 0; r < a.rows; r += 4) {
        switch (a.rows - r) {
        case 1:
            scores_few<1, T>(a, r);
            break;
        case 2:
            scores_few<2, T>(a, r);
            break;
        case 3:
            scores_few<3, T>(a, r);
            break;
        default:
            scores_few<4, T>(a, r);
        }
    }
}

void scores_simd(const attention_scores_args & a) {
    if (a.type == cell_type::f16) {
        scores_of<uint16_t>(a);
    } else {
        scores_of<float>(a);
    }
}

// ---- softmax

// The table entry of t (already an FP16 number, not above zero), computed: with this polynomial, one rounding to FP16
// at the end gives the table's bits for every input. NaN stays NaN.
inline vec exp2_half(vec t) {
    const vec x = simd::max(simd::set1(-30.0f), t);
    const vec n = simd::round(x);
    const vec r = simd::sub(x, n);
    vec p = simd::set1(0.00132669706f);
    p = simd::fma(p, r, simd::set1(0.00967545994f));
    p = simd::fma(p, r, simd::set1(0.0555074252f));
    p = simd::fma(p, r, simd::set1(0.240221217f));
    p = simd::fma(p, r, simd::set1(0.693146944f));
    p = simd::fma(p, r, simd::set1(1.0f));
    return simd::round_to_half(simd::ldexp(p, n));
}

inline vec tanh_vec(vec x) { // 1 - 2 / (e^2x + 1)
    const vec one = simd::set1(1.0f);
    return simd::sub(one, simd::div(simd::set1(2.0f), simd::add(exp_vec(simd::add(x, x)), one)));
}

// s = scale, cap, bias; -inf where hidden. Written back, for softmax_powers.
template <int vecs> inline vec softmax_scores(const attention_softmax_args & a, float * s, uint64_t seen) {
    const vec lowest = simd::set1(-std::numeric_limits<float>::infinity());
    const vec scale = simd::set1(a.scale);
    vec top = lowest;
#pragma GCC unroll 8
    for (int v = 0; v < vecs; v++) {
        vec x = simd::mul(simd::load(s + v * lanes), scale);
        if (a.softcap != 0.0f) {
            const vec cap = simd::set1(a.softcap);
            x = simd::mul(cap, tanh_vec(simd::div(x, cap)));
        }
        if (a.bias != nullptr) {
            x = simd::add(x, simd::load(a.bias + v * lanes));
        }
        x = simd::select(static_cast<uint32_t>(seen >> (v * lanes)), x, lowest);
        simd::store(s + v * lanes, x);
        top = simd::max(x, top);
    }
    return top;
}

// p = exp2 of FP16(factor * s - offset) or, exact, exp of it; returns the sum of p, lane by lane.
template <int vecs, bool exact> inline vec softmax_powers(float * s, float factor, float offset) {
    const vec f = simd::set1(factor);
    const vec o = simd::set1(-offset);
    vec sum = simd::zero();
#pragma GCC unroll 8
    for (int v = 0; v < vecs; v++) {
        const vec x = simd::fma(simd::load(s + v * lanes), f, o);
        const vec p = exact ? exp_vec(x) : exp2_half(simd::round_to_half(x));
        simd::store(s + v * lanes, p);
        sum = simd::add(sum, p);
    }
    return sum;
}

// Over the first `vecs` vectors of each row; cells past a.cells count as hidden. A block of rows at a time: their
// maxima are found together, and no row waits for another's.
template <int vecs> void softmax_vecs(const attention_softmax_args & a, uint64_t seen) {
    constexpr float log2e = 1.4426950408889634f;
    constexpr uint64_t all = ~uint64_t{0} >> (64 - vecs * lanes);
    // Where nothing but a positive factor happens to the scores, it is applied to them and their maximum at once.
    const bool plain = a.softcap == 0.0f && a.bias == nullptr && a.scale > 0.0f && seen == all;
    const float factor = plain ? a.scale : 1.0f;
    const float unit = a.exact ? 1.0f : log2e;
    for (int first = 0; first < a.rows; first += lanes) {
        const int n = std::min(lanes, a.rows - first);
        vec tops[lanes];
        for (int i = 0; i < lanes; i++) {
            float * s = a.s + (first + std::min(i, n - 1)) * attention_tile_cells;
            if (i >= n) {
                tops[i] = simd::zero();
            } else if (plain) {
                vec top = simd::load(s);
#pragma GCC unroll 8
                for (int v = 1; v < vecs; v++) {
                    top = simd::max(simd::load(s + v * lanes), top);
                }
                tops[i] = top;
            } else {
                tops[i] = softmax_scores<vecs>(a, s, seen);
            }
        }
        simd::transpose(tops);
        for (int step = lanes / 2; step > 0; step /= 2) {
            for (int i = 0; i < step; i++) {
                tops[i] = simd::max(tops[i], tops[i + step]);
            }
        }
        const vec old_max = get(a.max + first, n);
        const vec max = simd::max(simd::mul(tops[0], simd::set1(factor)), old_max);
        // nothing seen so far: any finite base makes powers of 0
        const vec base = simd::max(simd::set1(-1e38f), max);
        alignas(64) float offset[lanes];
        simd::store(offset, simd::mul(base, simd::set1(unit)));
        put(a.alpha + first, exp_vec(simd::sub(old_max, base)), n);
        put(a.max + first, max, n);
        for (int i = 0; i < n; i++) {
            const int row = first + i;
            float * s = a.s + row * attention_tile_cells;
            vec sum = a.exact ? softmax_powers<vecs, true>(s, factor * unit, offset[i])
                              : softmax_powers<vecs, false>(s, factor * unit, offset[i]);
            float * sums = a.sum + row * attention_sum_parts;
            simd::store(sums, simd::fma(simd::load(sums), simd::set1(a.alpha[row]), sum));
        }
    }
}

void softmax_simd(const attention_softmax_args & a) {
    constexpr int vecs = attention_tile_cells / lanes;
    const uint64_t all = a.cells == 64 ? ~uint64_t{0} : (uint64_t{1} << a.cells) - 1;
    const uint64_t seen = a.visible & all;
    if (a.cells > attention_tile_cells / 2) {
        return softmax_vecs<vecs>(a, seen);
    }
    if (a.cells > attention_tile_cells / 4) {
        return softmax_vecs<vecs / 2>(a, seen);
    }
    return softmax_vecs<vecs / 4>(a, seen);
}

// ---- accumulate

// o[r][d..] for `rows` rows and `vecs` vectors; the last vector has `tail` elements.
template <int rows, int vecs, class T>
void accumulate_tile(const attention_accumulate_args & a, int first, const T * const * v, int d, int tail) {
    const float * p = a.p + first * attention_tile_cells;
    vec sum[rows][vecs];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const vec alpha = simd::set1(a.alpha[first + r]);
#pragma GCC unroll 8
        for (int i = 0; i < vecs; i++) {
            sum[r][i] = simd::mul(alpha, get(a.o[first + r] + d + i * lanes, i == vecs - 1 ? tail : lanes));
        }
    }
    for (int c = 0; c < a.cells; c++) {
        vec x[vecs];
#pragma GCC unroll 8
        for (int i = 0; i < vecs; i++) {
            x[i] = get(v[c] + d + i * lanes, i == vecs - 1 ? tail : lanes);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const vec weight = simd::set1(p[r * attention_tile_cells + c]);
#pragma GCC unroll 8
            for (int i = 0; i < vecs; i++) {
                sum[r][i] = simd::fma(weight, x[i], sum[r][i]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
#pragma GCC unroll 8
        for (int i = 0; i < vecs; i++) {
            put(a.o[first + r] + d + i * lanes, sum[r][i], i == vecs - 1 ? tail : lanes);
        }
    }
}

template <int rows, class T> void accumulate_rows(const attention_accumulate_args & a, int first, const T * const * v) {
    constexpr int step = simd::tile_vecs * lanes;
    int d = 0;
    for (; d + step <= a.dim; d += step) {
        accumulate_tile<rows, simd::tile_vecs, T>(a, first, v, d, lanes);
    }
    for (; d < a.dim; d += lanes) {
        const int left = a.dim - d;
        if (left >= lanes) {
            accumulate_tile<rows, 1, T>(a, first, v, d, lanes);
        } else {
            accumulate_tile<rows, 1, T>(a, first, v, d, left);
        }
    }
}

template <class T> void accumulate_of(const attention_accumulate_args & a, const T * const * v) {
    int n = 0;
    for (int r = 0; r < a.rows; r += n) {
        n = next_part(a.rows - r);
        switch (n) {
        case 1:
            accumulate_rows<1, T>(a, r, v);
            break;
        case 2:
            accumulate_rows<2, T>(a, r, v);
            break;
        case 3:
            accumulate_rows<3, T>(a, r, v);
            break;
        case 4:
            accumulate_rows<4, T>(a, r, v);
            break;
        case 5:
            accumulate_rows<5, T>(a, r, v);
            break;
        default:
            accumulate_rows<6, T>(a, r, v);
        }
    }
}

void accumulate_simd(const attention_accumulate_args & a) {
    const float * floats[attention_tile_cells];
    if (a.type == cell_type::f16) {
        const uint16_t * halves[attention_tile_cells];
        for (int c = 0; c < a.cells; c++) {
            halves[c] = static_cast<const uint16_t *>(a.v[c]);
        }
        if (a.rows <= 2 * simd::tile_rows) {
            return accumulate_of<uint16_t>(a, halves);
        }
        for (int c = 0; c < a.cells; c++) {
            floats[c] = a.scratch + static_cast<int64_t>(c) * a.dim;
            f16_to_f32_simd(a.dim, halves[c], a.scratch + static_cast<int64_t>(c) * a.dim);
        }
    } else {
        for (int c = 0; c < a.cells; c++) {
            floats[c] = static_cast<const float *>(a.v[c]);
        }
    }
    accumulate_of<float>(a, floats);
}

void exp2_fp16_simd(const uint16_t * in, uint16_t * out, size_t n) {
    each(static_cast<int64_t>(n), [=](int64_t i, int m) {
        // what is above zero counts as zero; NaN stays NaN because min returns its second argument then
        const vec x = simd::min(simd::zero(), get(in + i, m));
        put(out + i, exp2_half(x), m);
    });
}

void fill_attention_simd(attention_kernels & k) {
    k.scores = scores_simd;
    k.softmax = softmax_simd;
    k.accumulate = accumulate_simd;
    k.exp2_fp16 = exp2_fp16_simd;
}

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_ATTENTION_SIMD_H
