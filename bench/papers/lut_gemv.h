// What the kernels of bench/lut_gemv.cpp share: formats, and tables of one row of activations.
//
// A weight of n bits is n planes of signs: 2 w = sum of value[p] * s[p] + offset, s = +-1, in units of its scale. Four
// activations have 16 sums of +-a0 +-a1 +-a2 +-a3, a byte each: a table, which one vpshufb reads for 32 nibbles. Bytes
// are unsigned, 128 for 0, so that vpmaddubsw adds two planes with their values in 16 bits; what is too much, and the
// offset's part, is what sums begin with.
//
// Weights: slices of `slice` k; in each, panels of 32 * halves columns; in each, blocks of F::block k: chunks of 32 k,
// with their integers behind their quants, so that all is one stream; scales d; minima. A vector of quants has nibbles
// of two groups of four k, the first one low. Its bytes are columns 0..15 or 16..31, each of planes 2 i and 2 i + 1; in
// a last single plane, columns c and c + 16 in place of two planes. Columns 4..7 and 8..11 change places, so that
// vpunpck* puts all in order.
#ifndef TILEBEAM_BENCH_LUT_GEMV_H
#define TILEBEAM_BENCH_LUT_GEMV_H

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tilebeam/types.h"

namespace {

constexpr int columns = TB_TILE_N, entries = 16;
constexpr int big = 8 * TB_TILE_K; // k of a super-block
constexpr int slice = 4 * big;     // k whose tables stay in L1
constexpr int fraction = 7;        // bits of the activations' integers behind those of a table

enum class by16 { none, scales, scales_and_minima }; // integers for each 16 k

template <int n, int first, int step, int off, int k_of_sum, int k_of_block, by16 small, int at_once> struct format {
    static constexpr int planes = n, offset = off, sub = k_of_sum, block = k_of_block, halves = at_once;
    static constexpr by16 integers = small;
    static constexpr int value(int p) { return p == 0 ? first : value(p - 1) * step; }
    static constexpr int values(int p = n) { return p == 0 ? 0 : value(p - 1) + values(p - 1); }
    static constexpr bool minima = small == by16::scales_and_minima;
    static constexpr size_t pair_bytes = columns * planes * halves; // of 8 k
    static constexpr size_t quant_bytes = 4 * pair_bytes;           // of 32 k
    static constexpr size_t chunk_bytes = quant_bytes + (small == by16::none ? 0 : 2 * columns * halves);
    static constexpr size_t d = block / TB_TILE_K * chunk_bytes; // where scales are
    static constexpr size_t bytes = d + halves * (minima ? 4 : 2) * columns;
    static constexpr int groups = sub < TB_TILE_K ? sub / 4 : TB_TILE_K / 4; // that fast aggregation averages
    static constexpr int levels = groups == 8 ? 3 : 2;
};

using one_bit = format<1, 1, 1, 0, big, big, by16::none, 2>;
using ternary = format<2, 1, 1, 0, big, big, by16::none, 2>;
using q2_k = format<2, 1, 2, 3, 16, big, by16::scales_and_minima, 1>;
using q3_k = format<3, 1, 2, -1, 16, big, by16::scales, 1>;
using q4_0 = format<4, 1, 2, -1, TB_TILE_K, TB_TILE_K, by16::none, 1>;

float from_half(const uint8_t * p) {
    _Float16 h;
    std::memcpy(&h, p, 2);
    return static_cast<float>(h);
}

// ---- one row of activations

struct prepared {
    std::vector<uint8_t> tables; // [k / 4][16]
    std::vector<int16_t> starts; // [k / F::sub]: what sums begin with
    std::vector<int16_t> sums;   // [k / 16]: of activations, in 1/64 of a table's unit
    std::vector<float> scales;   // [k / F::block]: half a table's unit
    std::vector<int32_t> exact;  // [k / 16]: of activations, in 1/128
};

template <class F, bool fast, class Tables> void prepare(const float * x, size_t k, prepared & a) {
    a.tables.resize(k / 4 * entries);
    a.starts.resize(k / F::sub);
    a.sums.resize(k / 16);
    a.exact.resize(k / 16);
    a.scales.resize(k / F::block);
    constexpr size_t step = F::block < 64 ? 64 : F::block, units = step / F::block;
    for (size_t at = 0; at < k; at += step) {
        float factors[2];
        for (size_t i = 0; i < units; i++) {
            const float most = Tables::largest(x + at + F::block * i, F::block);
            a.scales[at / F::block + i] = most / 254.0f;
            factors[i] = most > 0 ? static_cast<float>(127 << fraction) / most : 0.0f;
        }
        if (units == 1) factors[1] = factors[0];
        for (size_t i = at; i < at + step; i += 64)
            Tables::build(x + i, factors, a.tables.data() + i / 4 * entries, a.exact.data() + i / 16);
    }
    // Averages are rounded up half the time: by a quarter for each level.
    constexpr int zero = F::values() * (F::sub / 4) * 128;
    constexpr int rounding = fast ? F::values() * (F::sub / 4) * F::levels / 4 : 0;
    for (size_t s = 0; s < k / F::sub; s++) {
        int sum = 0;
        for (int i = 0; i < F::sub / 16; i++)
            sum += a.exact[s * (F::sub / 16) + static_cast<size_t>(i)];
        const int start = ((F::offset * sum + (1 << (fraction - 1))) >> fraction) - zero - rounding;
        a.starts[s] = static_cast<int16_t>(start);
    }
    for (size_t i = 0; F::minima && i < k / 16; i++)
        a.sums[i] = static_cast<int16_t>((a.exact[i] + 1) >> 1);
}

// Pointers into a row's arrays, from some k on.
struct row_at {
    const uint8_t * tables;
    const int16_t *starts, *sums;
    const float * scales;
    float * out; // of the panel
    template <class F> static row_at of(const prepared & a, size_t k, float * out) {
        return {a.tables.data() + k * 4, a.starts.data() + k / F::sub, a.sums.data() + k / 16,
                a.scales.data() + k / F::block, out};
    }
};

} // namespace

#endif // TILEBEAM_BENCH_LUT_GEMV_H
