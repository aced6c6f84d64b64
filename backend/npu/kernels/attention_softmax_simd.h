// Softmax of attention over an ISA's `simd` struct (kernels/<isa>/simd.h, included before this): lanes run along the
// cells. Internal linkage, see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_ATTENTION_SOFTMAX_SIMD_H
#define TILEBEAM_NPU_KERNELS_ATTENTION_SOFTMAX_SIMD_H

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/attention.h"
#include "kernels/attention_cells.h"
#include "kernels/vec_simd.h"

namespace tb::npu {
namespace {

constexpr int power_vecs = simd::registers / 4; // vectors whose powers are computed side by side

// The table entries of t (already FP16 numbers, not above zero), computed: with this polynomial, one rounding to FP16
// at the end gives the table's bits for every input. NaN stays NaN. Step by step over all vectors: each waits for the
// step before, and a CPU's scheduler does not see far enough ahead to find the other vectors by itself.
template <int n> inline void exp2_halves(vec (&t)[n]) {
    vec whole[n];
    vec p[n];
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) {
        t[i] = simd::max(simd::set1(-30.0f), t[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) {
        whole[i] = simd::round(t[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) {
        t[i] = simd::sub(t[i], whole[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) {
        p[i] = simd::fma(simd::set1(0.00132669706f), t[i], simd::set1(0.00967545994f));
    }
    for (const float factor : {0.0555074252f, 0.240221217f, 0.693146944f, 1.0f}) {
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) {
            p[i] = simd::fma(p[i], t[i], simd::set1(factor));
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) {
        t[i] = simd::ldexp(p[i], whole[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) {
        t[i] = simd::round_to_half(t[i]);
    }
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

// p = exp2 of FP16(factor * s - offset) or, exact, exp of it, for `rows` rows from `first` on; adds up p.
template <int vecs, int rows>
inline void softmax_powers(const attention_softmax_args & a, int first, float factor, const float * offset) {
    constexpr int at_once = std::min(rows * vecs, power_vecs);
    static_assert(rows * vecs % at_once == 0 && (rows == 1 || rows * vecs == at_once));
    float * s = a.s + first * attention_tile_cells;
    vec sum[rows];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        sum[r] = simd::zero();
    }
    for (int from = 0; from < rows * vecs; from += at_once) {
        const auto cells = [s, from](int i) {
            return s + (from + i) / vecs * attention_tile_cells + (from + i) % vecs * lanes;
        };
        vec x[at_once];
#pragma GCC unroll 8
        for (int i = 0; i < at_once; i++) {
            x[i] = simd::fma(simd::load(cells(i)), simd::set1(factor), simd::set1(-offset[(from + i) / vecs]));
        }
        if (a.exact) {
#pragma GCC unroll 8
            for (int i = 0; i < at_once; i++) {
                x[i] = exp_vec(x[i]);
            }
        } else {
#pragma GCC unroll 8
            for (int i = 0; i < at_once; i++) {
                x[i] = simd::round_to_half(x[i]);
            }
            exp2_halves(x);
        }
#pragma GCC unroll 8
        for (int i = 0; i < at_once; i++) {
            simd::store(cells(i), x[i]);
            sum[i * rows / at_once] = simd::add(sum[i * rows / at_once], x[i]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        float * sums = a.sum + (first + r) * attention_sum_parts;
        simd::store(sums, simd::fma(simd::load(sums), simd::set1(a.alpha[first + r]), sum[r]));
    }
}

// A row's scores relative to its maximum. softmax_powers does it in one multiply-add, which rounds a little above zero
// what should be zero: of large scores by more than a power can hold.
template <int vecs> inline void softmax_differences(float * s, float factor, float base) {
#pragma GCC unroll 8
    for (int v = 0; v < vecs; v++) {
        const vec x = simd::mul(simd::load(s + v * lanes), simd::set1(factor));
        simd::store(s + v * lanes, simd::sub(x, simd::set1(base)));
    }
}

// Over the first `vecs` vectors of each row; cells past a.cells count as hidden. A block of rows at a time: their
// maxima are found together, and no row waits for another's.
template <int vecs> void softmax_vecs(const attention_softmax_args & a, uint64_t seen) {
    constexpr float log2e = 1.4426950408889634f;
    constexpr float large = 1 << 12; // rounding moves such a score by a thousandth at most
    constexpr uint64_t all = ~uint64_t{0} >> (64 - vecs * lanes);
    // Where nothing but a positive factor happens to the scores, it is applied to them and their maximum at once.
    const bool plain = a.softcap == 0.0f && a.bias == nullptr && a.scale > 0.0f && seen == all;
    const float factor = plain ? a.scale : 1.0f;
    const float unit = a.exact ? 1.0f : log2e;
    const auto top = [&](int row) {
        float * s = a.s + row * attention_tile_cells;
        if (!plain) {
            return softmax_scores<vecs>(a, s, seen);
        }
        vec x = simd::load(s);
#pragma GCC unroll 16
        for (int v = 1; v < vecs; v++) {
            x = simd::max(simd::load(s + v * lanes), x);
        }
        return x;
    };
    for (int first = 0; first < a.rows; first += lanes) {
        const int n = std::min(lanes, a.rows - first);
        vec highest;
        if (n == lanes) {
            vec tops[lanes];
            for (int i = 0; i < lanes; i++) {
                tops[i] = top(first + i);
            }
            simd::transpose(tops);
            highest = tops[0];
            for (int i = 1; i < lanes; i++) {
                highest = simd::max(tops[i], highest);
            }
        } else {
            alignas(64) float tops[lanes] = {};
            for (int i = 0; i < n; i++) {
                tops[i] = simd::top(top(first + i));
            }
            highest = simd::load(tops);
        }
        const vec old_max = get(a.max + first, n);
        const vec max = simd::max(simd::mul(highest, simd::set1(factor)), old_max);
        const vec base = simd::max(simd::set1(attention_least_base), max);
        alignas(64) float offset[lanes];
        float multiplier = factor * unit;
        if (simd::top(simd::max(base, simd::sub(simd::zero(), base))) < large) {
            simd::store(offset, simd::mul(base, simd::set1(unit)));
        } else {
            simd::store(offset, base);
            for (int i = 0; i < n; i++) {
                softmax_differences<vecs>(a.s + (first + i) * attention_tile_cells, factor, offset[i]);
            }
            simd::store(offset, simd::zero());
            multiplier = unit;
        }
        put(a.alpha + first, exp_vec(simd::sub(old_max, base)), n);
        put(a.max + first, max, n);
        constexpr int together = std::max(1, power_vecs / vecs);
        int i = 0;
        for (; i + together <= n; i += together) {
            softmax_powers<vecs, together>(a, first + i, multiplier, offset + i);
        }
        for (; i < n; i++) {
            softmax_powers<vecs, 1>(a, first + i, multiplier, offset + i);
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

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_ATTENTION_SOFTMAX_SIMD_H
