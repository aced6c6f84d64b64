// Products of low-bit weights by tables of partial sums, for lut_gemv.py, with AVX2. Compiled when the bench runs.
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
#include <immintrin.h>

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
    static constexpr int groups = sub < TB_TILE_K ? sub / 4 : TB_TILE_K / 4; // at a time
};

using one_bit = format<1, 1, 1, 0, big, big, by16::none, 2>;
using ternary = format<2, 1, 1, 0, big, big, by16::none, 2>;
using q2_k = format<2, 1, 2, 3, 16, big, by16::scales_and_minima, 1>;
using q3_k = format<3, 1, 2, -1, 16, big, by16::scales, 1>;
using q4_0 = format<4, 1, 2, -1, TB_TILE_K, TB_TILE_K, by16::none, 1>;

__m256i load(const void * p) { return _mm256_loadu_si256(static_cast<const __m256i *>(p)); }
__m256i table(const uint8_t * p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p)); }
__m256i two(const int16_t * p) {
    int v;
    std::memcpy(&v, p, 4);
    return _mm256_set1_epi32(v);
}
__m256i low(__m256i v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
__m256i high(__m256i v) { return low(_mm256_srli_epi16(v, 4)); }

// ---- one row of activations

float largest(const float * x, int k) {
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    const auto v = [&](int i) { return _mm256_and_ps(_mm256_loadu_ps(x + i), magnitude); };
    __m256 most = _mm256_setzero_ps();
    for (int i = 0; i < k; i += 32) {
        const __m256 a = _mm256_hadd_ps(v(i), v(i + 8)), b = _mm256_hadd_ps(v(i + 16), v(i + 24));
        most = _mm256_max_ps(most, _mm256_hadd_ps(a, b));
    }
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, most);
    return *std::max_element(lanes, lanes + 8);
}

__m256i integers(const float * x, float factor) { // 16, those of 4 in the order 0 2 1 3
    const __m256 f = _mm256_set1_ps(factor);
    return _mm256_packs_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), f)),
                              _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), f)));
}

// Tables and sums of 64 k, each half times its factor. Only eight entries are computed: the others are their mirror,
// entry ~i = -entry i.
void build(const float * x, const float (&factors)[2], uint8_t * tables, int32_t * sums) {
    const __m256i a = integers(x, factors[0]), b = integers(x + 16, factors[0]);
    const __m256i c = integers(x + 32, factors[1]), d = integers(x + 48, factors[1]);
    const auto pairs = [](__m256i v) { return _mm256_madd_epi16(v, _mm256_set1_epi16(1)); };
    const __m256i s = _mm256_hadd_epi32(_mm256_hadd_epi32(pairs(a), pairs(b)), _mm256_hadd_epi32(pairs(c), pairs(d)));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(sums),
                     _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1)));
    // Activation i of 16 groups; of groups 0 4 8 12 2 6 10 14 in the low lane, each with its successor in the high.
    const __m256i ab0 = _mm256_unpacklo_epi16(a, b), ab1 = _mm256_unpackhi_epi16(a, b);
    const __m256i cd0 = _mm256_unpacklo_epi16(c, d), cd1 = _mm256_unpackhi_epi16(c, d);
    const __m256i l0 = _mm256_unpacklo_epi32(ab0, cd0), l1 = _mm256_unpackhi_epi32(ab0, cd0);
    const __m256i h0 = _mm256_unpacklo_epi32(ab1, cd1), h1 = _mm256_unpackhi_epi32(ab1, cd1);
    const __m256i a0 = _mm256_unpacklo_epi64(l0, h0), a1 = _mm256_unpackhi_epi64(l0, h0);
    const __m256i a2 = _mm256_unpacklo_epi64(l1, h1), a3 = _mm256_unpackhi_epi64(l1, h1);
    // The eight sums with +a3, as bytes with 128 for 0, two entries in a word.
    const __m256i p = _mm256_add_epi16(a1, a0), m = _mm256_sub_epi16(a1, a0);
    const __m256i top = _mm256_add_epi16(a3, _mm256_set1_epi16(257 << (fraction - 1)));
    const auto entry = [](__m256i v) { return _mm256_srli_epi16(v, fraction); };
    const auto both = [&](__m256i first, __m256i second) {
        return _mm256_or_si256(entry(first), _mm256_slli_epi16(entry(second), 8));
    };
    const __m256i r = _mm256_sub_epi16(top, a2), t = _mm256_add_epi16(top, a2);
    const __m256i e0 = both(_mm256_sub_epi16(r, p), _mm256_sub_epi16(r, m));
    const __m256i e1 = both(_mm256_add_epi16(r, m), _mm256_add_epi16(r, p));
    const __m256i e2 = both(_mm256_sub_epi16(t, p), _mm256_sub_epi16(t, m));
    const __m256i e3 = both(_mm256_add_epi16(t, m), _mm256_add_epi16(t, p));
    const __m256i first0 = _mm256_unpacklo_epi16(e0, e1), first1 = _mm256_unpackhi_epi16(e0, e1);
    const __m256i last0 = _mm256_unpacklo_epi16(e2, e3), last1 = _mm256_unpackhi_epi16(e2, e3);
    const auto store = [&](int group, __m256i upper) { // of two groups, and of two that follow by 4
        const __m256i back = _mm256_setr_epi8(7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8, //
                                              7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8);
        const __m256i mirror = _mm256_sub_epi8(_mm256_setzero_si256(), _mm256_shuffle_epi8(upper, back));
        auto * to = reinterpret_cast<__m256i *>(tables + entries * group);
        _mm256_storeu_si256(to, _mm256_unpacklo_epi64(mirror, upper));
        _mm256_storeu_si256(to + 2, _mm256_unpackhi_epi64(mirror, upper));
    };
    store(0, _mm256_unpacklo_epi32(first0, last0));
    store(8, _mm256_unpackhi_epi32(first0, last0));
    store(2, _mm256_unpacklo_epi32(first1, last1));
    store(10, _mm256_unpackhi_epi32(first1, last1));
}

struct prepared {
    std::vector<uint8_t> tables; // [k / 4][16]
    std::vector<int16_t> starts; // [k / F::sub]: what sums begin with
    std::vector<int16_t> sums;   // [k / 16]: of activations, in 1/64 of a table's unit
    std::vector<float> scales;   // [k / F::block]: half a table's unit
    std::vector<int32_t> exact;  // [k / 16]: of activations, in 1/128
};

template <class F> void prepare(const float * x, size_t k, prepared & a) {
    a.tables.resize(k / 4 * entries);
    a.starts.resize(k / F::sub);
    a.sums.resize(k / 16);
    a.exact.resize(k / 16);
    a.scales.resize(k / F::block);
    constexpr size_t step = F::block < 64 ? 64 : F::block, units = step / F::block;
    for (size_t at = 0; at < k; at += step) {
        float factors[2];
        for (size_t i = 0; i < units; i++) {
            const float most = largest(x + at + F::block * i, F::block);
            a.scales[at / F::block + i] = most / 254.0f;
            factors[i] = most > 0 ? static_cast<float>(127 << fraction) / most : 0.0f;
        }
        if (units == 1) factors[1] = factors[0];
        for (size_t i = at; i < at + step; i += 64)
            build(x + i, factors, a.tables.data() + i / 4 * entries, a.exact.data() + i / 16);
    }
    constexpr int zero = F::values() * (F::sub / 4) * 128;
    for (size_t s = 0; s < k / F::sub; s++) {
        int sum = 0;
        for (int i = 0; i < F::sub / 16; i++)
            sum += a.exact[s * (F::sub / 16) + static_cast<size_t>(i)];
        const int start = ((F::offset * sum + (1 << (fraction - 1))) >> fraction) - zero;
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

// Two sums of 16 bits for 16 columns each; of a single plane that of all bytes and, apart, that of the high ones.
struct sums16 {
    __m256i v[2];
};

// In this order: the compiler's own needs more registers.
void add(__m256i & to, __m256i v) {
    to = _mm256_add_epi16(to, v);
    asm("" : "+x"(to));
}

template <class F, int plane> void add_single(sums16 & to, __m256i v) {
    if constexpr (F::planes == 1) {
        add(to.v[0], v);
        add(to.v[1], _mm256_srli_epi16(v, 8));
    } else {
        add(to.v[0], _mm256_maddubs_epi16(v, _mm256_set1_epi16(F::value(plane))));
        add(to.v[1], _mm256_maddubs_epi16(v, _mm256_set1_epi16(F::value(plane) << 8)));
    }
}

template <class F, int plane> void add_pair(__m256i & to, __m256i v) {
    add(to, _mm256_maddubs_epi16(v, _mm256_set1_epi16(F::value(plane) | F::value(plane + 1) << 8)));
}

// One pair of groups, planes from `plane` on, for some rows and halves of a panel.
template <class F, int rows, int halves, int plane = 0>
void add_groups(const uint8_t * w, const row_at * row, ptrdiff_t at, sums16 (&to)[rows][halves]) {
    if constexpr (plane < F::planes) {
        constexpr bool single = plane + 1 == F::planes;
#pragma GCC unroll 2
        for (int h = 0; h < halves; h++) {
            const uint8_t * from = w + columns * (F::planes * h + plane);
            const __m256i x = load(from), x0 = low(x), x1 = high(x);
            const __m256i y = single ? x : load(from + columns), y0 = low(y), y1 = high(y);
#pragma GCC unroll 4
            for (int m = 0; m < rows; m++) {
                const __m256i even = table(row[m].tables + at), odd = table(row[m].tables + at + entries);
                if constexpr (single) {
                    add_single<F, plane>(to[m][h], _mm256_shuffle_epi8(even, x0));
                    add_single<F, plane>(to[m][h], _mm256_shuffle_epi8(odd, x1));
                } else {
                    add_pair<F, plane>(to[m][h].v[0], _mm256_shuffle_epi8(even, x0));
                    add_pair<F, plane>(to[m][h].v[1], _mm256_shuffle_epi8(even, y0));
                    add_pair<F, plane>(to[m][h].v[0], _mm256_shuffle_epi8(odd, x1));
                    add_pair<F, plane>(to[m][h].v[1], _mm256_shuffle_epi8(odd, y1));
                }
            }
        }
        add_groups<F, rows, halves, plane + 2>(w, row, at, to);
    }
}

// Nothing is prefetched: the weights are one stream, which the hardware follows, and prefetches cost instructions.
constexpr int rows_at_once = 4;

// The sums of F::sub k: `s` of the row's, at byte `at` of its tables.
template <class F, int rows, int halves>
void sub_block(const uint8_t * w, const row_at * row, ptrdiff_t at, int s, sums16 (&to)[rows][halves]) {
    constexpr bool apart = F::planes == 1;
    __m256i start[rows];
#pragma GCC unroll 4
    for (int m = 0; m < rows; m++) {
        start[m] = _mm256_set1_epi16(row[m].starts[s]);
#pragma GCC unroll 2
        for (int h = 0; h < halves; h++)
            to[m][h].v[0] = to[m][h].v[1] = apart ? _mm256_setzero_si256() : start[m];
    }
#pragma GCC unroll 1
    for (int k = 0; k < F::sub; k += 4 * F::groups) {
#pragma GCC unroll 4
        for (int pair = 0; pair < F::groups / 2; pair++)
            add_groups<F>(w + F::pair_bytes * static_cast<size_t>(pair), row, at + 2 * entries * pair, to);
        w += F::groups / 2 * F::pair_bytes;
        at += entries * F::groups;
    }
#pragma GCC unroll 4
    for (int m = 0; m < rows && apart; m++) {
#pragma GCC unroll 2
        for (int h = 0; h < halves; h++) {
            to[m][h].v[0] = _mm256_sub_epi16(to[m][h].v[0], _mm256_slli_epi16(to[m][h].v[1], 8));
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++)
                to[m][h].v[i] = _mm256_add_epi16(to[m][h].v[i], start[m]);
        }
    }
}

__m256 halves_at(const uint8_t * p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }

// Blocks whose sums have no integer scales, from a half of the panel on.
template <class F, int rows, int halves>
void simple(const uint8_t * w, int half, int b, const row_at * row, __m256 (&out)[rows][halves][4]) {
    sums16 sums[rows][halves];
    sub_block<F>(w + columns * F::planes * half, row, static_cast<ptrdiff_t>(F::block / 4 * b) * entries, b, sums);
    const uint8_t * d = w + F::d + 2 * columns * half;
#pragma GCC unroll 8
    for (int i = 0; i < 4 * halves; i++) {
        const __m256 scale = halves_at(d + 16 * i);
#pragma GCC unroll 4
        for (int m = 0; m < rows; m++) {
            // as the upper halves of 32 bits: 65536 times the sum
            const __m256i zero = _mm256_setzero_si256(), v = sums[m][i / 4].v[i / 2 % 2];
            const __m256i wide = i % 2 ? _mm256_unpackhi_epi16(zero, v) : _mm256_unpacklo_epi16(zero, v);
            const __m256 by = _mm256_mul_ps(scale, _mm256_set1_ps(row[m].scales[b] * 0x1p-16f));
            __m256 & to = out[m][i / 4][i % 4];
            to = _mm256_fmadd_ps(by, _mm256_cvtepi32_ps(wide), to);
        }
    }
}

// Blocks with a scale, and perhaps a minimum, for each 16 k.
template <class F, int rows> void scaled(const uint8_t * w, int b, const row_at * row, __m256 (&out)[rows][1][4]) {
    constexpr int subs = F::block / F::sub;
    static_assert(F::halves == 1);
    __m256i total[rows][4] = {}, taken[rows][4] = {};
    const auto bytes = [&](int s, int i) {
        const uint8_t * small = w + F::chunk_bytes * static_cast<size_t>(s / 2) + F::quant_bytes;
        const __m128i v = _mm_loadu_si128((const __m128i *)(small + 16 * i));
        return F::minima ? _mm256_cvtepu8_epi16(v) : _mm256_cvtepi8_epi16(v);
    };
#pragma GCC unroll 1
    for (int s = 0; s < subs; s += 2) {
        const uint8_t * chunk = w + F::chunk_bytes * static_cast<size_t>(s / 2);
        sums16 sums[2][rows][1];
        for (int j = 0; j < 2; j++)
            sub_block<F>(chunk + F::quant_bytes / 2 * static_cast<size_t>(j), row,
                         static_cast<ptrdiff_t>(F::block / 4 * b + F::sub / 4 * (s + j)) * entries, subs * b + s + j,
                         sums[j]);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m256i scale = F::minima ? _mm256_and_si256(bytes(s, i), _mm256_set1_epi16(15)) : bytes(s, i);
#pragma GCC unroll 4
            for (int m = 0; m < rows; m++) {
                const __m256i u = sums[0][m][0].v[i / 2], v = sums[1][m][0].v[i / 2];
                const __m256i both = i % 2 ? _mm256_unpackhi_epi16(u, v) : _mm256_unpacklo_epi16(u, v);
                total[m][i] = _mm256_add_epi32(total[m][i], _mm256_madd_epi16(both, scale));
            }
        }
    }
#pragma GCC unroll 1
    for (int s = 0; s < subs && F::minima; s += 2) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m256i least = _mm256_srli_epi16(bytes(s, i), 4);
#pragma GCC unroll 4
            for (int m = 0; m < rows; m++) {
                const __m256i product = _mm256_madd_epi16(least, two(row[m].sums + subs * b + s));
                taken[m][i] = _mm256_add_epi32(taken[m][i], product);
            }
        }
    }
    const uint8_t * d = w + F::d;
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m256 by = halves_at(d + 16 * i);
        const __m256 least = _mm256_mul_ps(halves_at(d + 2 * columns * F::minima + 16 * i), _mm256_set1_ps(0.03125f));
#pragma GCC unroll 4
        for (int m = 0; m < rows; m++) {
            const __m256 scale = _mm256_set1_ps(row[m].scales[b]), sum = _mm256_cvtepi32_ps(total[m][i]);
            __m256 & to = out[m][0][i];
            if constexpr (F::minima) {
                const __m256 less = _mm256_mul_ps(least, _mm256_cvtepi32_ps(taken[m][i]));
                to = _mm256_fmadd_ps(_mm256_fmsub_ps(by, sum, less), scale, to);
            } else {
                to = _mm256_fmadd_ps(_mm256_mul_ps(by, scale), sum, to);
            }
        }
    }
}

// Not to be inlined: among its neighbours the compiler runs out of registers.
template <class F, int rows, int halves>
__attribute__((noinline)) void part(const uint8_t * w, int half, int blocks, const row_at * row) {
    constexpr int vectors = 4 * halves;
    const auto at = [&](int i) { return row[i / vectors].out + columns * half + 8 * (i % vectors); };
    __m256 out[rows][halves][4];
    for (int i = 0; i < rows * vectors; i++)
        out[i / vectors][i % vectors / 4][i % 4] = _mm256_loadu_ps(at(i));
#pragma GCC unroll 1
    for (int b = 0; b < blocks; b++, w += F::bytes) {
        if constexpr (F::integers == by16::none) {
            simple<F>(w, half, b, row, out);
        } else {
            scaled<F>(w, b, row, out);
        }
    }
    for (int i = 0; i < rows * vectors; i++)
        _mm256_storeu_ps(at(i), out[i / vectors][i % vectors / 4][i % 4]);
}

// For one row all columns of a panel pass by a table; of several rows the sums alone fill the registers.
template <class F, int rows> void panel(const uint8_t * w, int blocks, const row_at * row) {
    constexpr int halves = rows == 1 ? F::halves : 1;
    for (int half = 0; half < F::halves; half += halves)
        part<F, rows, halves>(w, half, blocks, row);
}
// ---- the product

template <class F, int rows> void some_rows(const uint8_t * w, int blocks, const row_at * row, size_t left) {
    for (; left >= rows; left -= rows, row += rows)
        panel<F, rows>(w, blocks, row);
    if constexpr (rows > 1) some_rows<F, 1>(w, blocks, row, left);
}

template <class F>
void multiply(const uint8_t * w, size_t copies, size_t k, size_t n, const float * x, size_t rows, float * out) {
    constexpr size_t width = columns * F::halves;
    std::vector<prepared> prepared_rows(rows);
    std::vector<row_at> at(rows);
    for (size_t copy = 0; copy < copies; copy++) {
        for (size_t m = 0; m < rows; m++)
            prepare<F>(x + k * m, k, prepared_rows[m]);
        std::memset(out, 0, rows * n * sizeof(float));
        for (size_t from = 0; from < k; from += slice) {
            const size_t blocks = std::min<size_t>(slice, k - from) / F::block;
            for (size_t column = 0; column < n; column += width, w += F::bytes * blocks) {
                for (size_t m = 0; m < rows; m++)
                    at[m] = row_at::of<F>(prepared_rows[m], from, out + n * m + column);
                some_rows<F, rows_at_once>(w, static_cast<int>(blocks), at.data(), rows);
            }
        }
    }
}

} // namespace

// x (rows, k) times `copies` matrices of n columns, packed one after the other; out (rows, n) is the last product.
// `which`: 1 bit, ternary, Q2_K, Q3_K, Q4_0. k is a multiple of 256, n of 64.
extern "C" void tb_lut(int which, const uint8_t * w, size_t copies, size_t k, size_t n, const float * x, size_t rows,
                       float * out) {
    decltype(&multiply<q4_0>) ways[] = {multiply<one_bit>, multiply<ternary>, multiply<q2_k>, multiply<q3_k>,
                                        multiply<q4_0>};
    ways[which](w, copies, k, n, x, rows, out);
}
