// GEMM with types of 256 k: block panels (tilebeam/k_panels.h) against K groups of activation rows (gemm.h), written
// once over the names of a `unit` (kernels/<isa>/gemm_k.cpp).
//
// Products are summed as integers over all 256 k: each tile's dot products times their integer scales, minima (or the
// scales and an offset of quants) times the sums of activations; then one float step per column, row and 256 k. The
// integer sums stay in L1: more of them than registers are in use, and the compiler would spill in the innermost loop.
//
// unit::block<Format>(panel, scales, record, rows, sums) makes the integer sums of a block's products with all rows;
// sets with a dot product of four bytes use k_block_of_dots, whose sums have taken the quants' offset back out already
// (unit::starts). Internal linkage, see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_GEMM_K_H
#define TILEBEAM_NPU_KERNELS_GEMM_K_H

#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels/gemm.h"

namespace tb::npu {
namespace {

// A record's parts.
struct k_record {
    const uint8_t *q, *scales, *sums16, *sums32;
    k_record(const uint8_t * record, int rows)
        : q(record), scales(q + TB_K_BLOCK * rows), sums16(scales + sizeof(float) * static_cast<size_t>(rows)),
          sums32(sums16 + gemm_k_sums16 * static_cast<size_t>(rows)) {}
    // Without its first rows.
    k_record from(int row) const {
        k_record r = *this;
        const size_t m = static_cast<size_t>(row);
        r.q += TB_K_BLOCK * m;
        r.scales += sizeof(float) * m;
        r.sums16 += gemm_k_sums16 * m;
        r.sums32 += gemm_k_sums32 * m;
        return r;
    }
};

// What brings 256 activations to int8: 0 for all of them where they are as good as zero, NaN where one is not finite.
struct k_scale {
    float scale, inverse;
};

inline k_scale scale_of_k_block(float amax, bool finite) {
    if (!finite) return {NAN, 0.0f};
    return amax < gemm_least_amax ? k_scale{0.0f, 0.0f} : k_scale{amax / 127.0f, 127.0f / amax};
}

inline void store_k_sums(const k_record & r, int row, float scale, const int16_t (&sums16)[16],
                         const int16_t (&sums32)[8]) {
    const size_t m = static_cast<size_t>(row);
    std::memcpy(const_cast<uint8_t *>(r.scales) + sizeof(scale) * m, &scale, sizeof(scale));
    std::memcpy(const_cast<uint8_t *>(r.sums16) + gemm_k_sums16 * m, sums16, gemm_k_sums16);
    std::memcpy(const_cast<uint8_t *>(r.sums32) + gemm_k_sums32 * m, sums32, gemm_k_sums32);
}

inline int32_t read_k_int(const uint8_t * p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return v;
}

// ---- formats: weights(j, i) is quad j of the columns of vector i, as unsigned bytes; signed ones only of code books.
// `plain`: they are no more than a shift and a mask away.

struct k_format {
    static constexpr int parts = 1;      // that d is divided into
    static constexpr bool one_d = false; // minima are multiplied by d, too
};

// Of a tile: nibbles, pairs of bits and single bits, the lowest moved to bit `to`.
template <class unit> typename unit::ints k_nibbles(const uint8_t * tile, int j, int i) {
    const typename unit::ints v = unit::load(tile + 128 * (j / 2) + 4 * unit::width * i);
    return j % 2 ? unit::high_nibbles(v) : unit::low_nibbles(v);
}

template <class unit> typename unit::ints k_pairs(const uint8_t * tile, int j, int i, int to) {
    const typename unit::ints v = unit::load(tile + 128 * (j / 4) + 4 * unit::width * i);
    return unit::masked(unit::shifted(v, to - 2 * (j % 4)), 3 << to);
}

template <class unit> typename unit::ints k_ones(const uint8_t * tile, int j, int i, int to) {
    return unit::masked(unit::shifted(unit::load(tile + 4 * unit::width * i), to - j), 1 << to);
}

constexpr size_t k_nibbles_bytes = TB_K_NIBBLES / gemm_k_tiles; // of a tile
constexpr size_t k_pairs_bytes = TB_K_PAIRS / gemm_k_tiles;
constexpr size_t k_ones_bytes = TB_K_ONES / gemm_k_tiles;

// A block's scales, a byte each, and what its sums of activations are multiplied by: minima, or the scales again.
struct k_factors {
    const uint8_t *scales, *factors;
};

// The numbers of a six(h) (tilebeam/k_panels.h), a byte each, in order. A vector may be longer than a part: what it
// stores too much the next part overwrites.
template <class unit, int h> void unpack_k_six(const uint8_t * fields, uint8_t * out) {
    constexpr int part = 16 * h; // bytes of each array's quarter, or half
    for (int at = 0; at < part; at += 4 * unit::width) {
        const typename unit::ints first = unit::load(fields + at), second = unit::load(fields + part + at);
        const typename unit::ints top = unit::load(fields + 2 * part + at);
        const auto join = [&](uint8_t * to, typename unit::ints low, int shift) {
            unit::store(to + at, unit::either(low, unit::masked(unit::shifted(top, shift), 0x30)));
        };
        join(out, unit::low_nibbles(first), 4);
        join(out + part, unit::low_nibbles(second), 2);
        join(out + 2 * part, unit::high_nibbles(first), 0);
        join(out + 3 * part, unit::high_nibbles(second), -2);
    }
}

// The same as signed numbers, 32 less.
template <class unit, int h> void unpack_k_six_signed(const uint8_t * fields, uint8_t * out) {
    unpack_k_six<unit, h>(fields, out);
    for (int at = 0; at < 64 * h; at += 4 * unit::width)
        unit::store(out + at, unit::less_bytes(unit::load(out + at), 32));
}

// Scales and minima of Q4_K and Q5_K.
template <class unit> struct k_with_minima : k_format {
    static constexpr int scales = 1;     // of a tile
    static constexpr bool minima = true; // else scales are signed
    static constexpr int offset = 0;     // of quants
    static k_factors unpack(const uint8_t * from, uint8_t * out) {
        unpack_k_six<unit, 8>(from, out);
        return {out, out + 256};
    }
};

template <class unit> struct format_q4_k : k_with_minima<unit> {
    static constexpr bool plain = true;
    static constexpr size_t bytes = TB_Q4_K_PANEL, fields = TB_Q4_K_FIELDS, halves = TB_Q4_K_HALVES;
    static constexpr int most = 15; // of a quant
    const uint8_t * quants;
    format_q4_k(const uint8_t * panel, int t) : quants(panel + k_nibbles_bytes * t) {}
    typename unit::ints weights(int j, int i) const { return k_nibbles<unit>(quants, j, i); }
};

template <class unit> struct format_q5_k : k_with_minima<unit> {
    static constexpr bool plain = false;
    static constexpr size_t bytes = TB_Q5_K_PANEL, fields = TB_Q5_K_FIELDS, halves = TB_Q5_K_HALVES;
    static constexpr int most = 31;
    const uint8_t *quants, *plane;
    format_q5_k(const uint8_t * panel, int t)
        : quants(panel + k_nibbles_bytes * t), plane(panel + TB_K_NIBBLES + k_ones_bytes * t) {}
    typename unit::ints weights(int j, int i) const {
        return unit::either(k_nibbles<unit>(quants, j, i), k_ones<unit>(plane, j, i, 4));
    }
};

template <class unit> struct format_q6_k : k_format {
    static constexpr bool plain = false;
    static constexpr size_t bytes = TB_Q6_K_PANEL, fields = TB_Q6_K_FIELDS, halves = TB_Q6_K_HALVES;
    static constexpr int scales = 2, most = 63, offset = 32;
    static constexpr bool minima = false;
    static k_factors unpack(const uint8_t * from, uint8_t *) { return {from, from}; }
    const uint8_t *quants, *plane;
    format_q6_k(const uint8_t * panel, int t)
        : quants(panel + k_nibbles_bytes * t), plane(panel + TB_K_NIBBLES + k_pairs_bytes * t) {}
    typename unit::ints weights(int j, int i) const {
        return unit::either(k_nibbles<unit>(quants, j, i), k_pairs<unit>(plane, j, i, 4));
    }
};

template <class unit> struct format_q2_k : k_format {
    static constexpr bool plain = true;
    static constexpr size_t bytes = TB_Q2_K_PANEL, fields = TB_Q2_K_FIELDS, halves = TB_Q2_K_HALVES;
    static constexpr int scales = 2, most = 3, offset = 0;
    static constexpr bool minima = true;
    static k_factors unpack(const uint8_t * from, uint8_t * out) {
        for (int at = 0; at < 512; at += 4 * unit::width) {
            unit::store(out + at, unit::low_nibbles(unit::load(from + at)));
            unit::store(out + 512 + at, unit::high_nibbles(unit::load(from + at)));
        }
        return {out, out + 512};
    }
    const uint8_t * plane;
    format_q2_k(const uint8_t * panel, int t) : plane(panel + k_pairs_bytes * t) {}
    typename unit::ints weights(int j, int i) const { return k_pairs<unit>(plane, j, i, 0); }
};

template <class unit> struct format_q3_k : k_format {
    static constexpr bool plain = false;
    static constexpr size_t bytes = TB_Q3_K_PANEL, fields = TB_Q3_K_FIELDS, halves = TB_Q3_K_HALVES;
    static constexpr int scales = 2, most = 7, offset = 4;
    static constexpr bool minima = false;
    static k_factors unpack(const uint8_t * from, uint8_t * out) {
        unpack_k_six_signed<unit, 8>(from, out);
        return {out, out};
    }
    const uint8_t *pairs, *ones;
    format_q3_k(const uint8_t * panel, int t)
        : pairs(panel + k_pairs_bytes * t), ones(panel + TB_K_PAIRS + k_ones_bytes * t) {}
    typename unit::ints weights(int j, int i) const {
        return unit::either(k_pairs<unit>(pairs, j, i, 0), k_ones<unit>(ones, j, i, 2));
    }
};

// A code book's values by quant: as they are for a set whose dot product takes signed weights, of others `offset` more.
template <class unit, class Book, int offset> struct k_book {
    static typename unit::ints look_up(typename unit::ints quants) {
        return unit::look_up(Book::template table<unit, offset>(), quants);
    }
};

template <class unit> struct format_iq4_xs : k_format {
    static constexpr bool plain = false;
    static constexpr size_t bytes = TB_IQ4_XS_PANEL, fields = TB_IQ4_XS_FIELDS, halves = TB_IQ4_XS_HALVES;
    static constexpr int scales = 1, offset = unit::signed_weights ? 0 : 128, most = iq4_book::most + offset;
    static constexpr bool minima = false;
    static k_factors unpack(const uint8_t * from, uint8_t * out) {
        unpack_k_six_signed<unit, 4>(from, out);
        return {out, out};
    }
    const uint8_t * quants;
    format_iq4_xs(const uint8_t * panel, int t) : quants(panel + k_nibbles_bytes * t) {}
    typename unit::ints weights(int j, int i) const {
        return k_book<unit, iq4_book, offset>::look_up(k_nibbles<unit>(quants, j, i));
    }
};

// IQ1 to IQ3: code books, and scales that are odd numbers, 2s + 1, of which a nibble has s.
template <class unit, class Book, int of_tile> struct k_odd_scales : k_format {
    static constexpr bool plain = false, minima = false;
    static constexpr int scales = of_tile, parts = Book::parts;
    static constexpr int offset = unit::signed_weights ? 0 : 64, most = Book::most + offset;
    static k_factors unpack(const uint8_t * from, uint8_t * out) {
        constexpr int half = TB_K_FOUR(8) * of_tile;
        for (int at = 0; at < half; at += 4 * unit::width) {
            const typename unit::ints v = unit::load(from + at), one = unit::broadcast(0x01010101);
            unit::store(out + at, unit::either(unit::shifted(unit::low_nibbles(v), 1), one));
            unit::store(out + half + at, unit::either(unit::shifted(unit::high_nibbles(v), 1), one));
        }
        return {out, out};
    }
    static typename unit::ints value(typename unit::ints quants) { return k_book<unit, Book, offset>::look_up(quants); }
};

template <class unit, class Book, int of_tile> struct format_three_bits : k_odd_scales<unit, Book, of_tile> {
    static constexpr size_t fields = TB_IQ2_FIELDS, halves = fields + TB_K_FOUR(8) * of_tile;
    static constexpr size_t bytes = halves + TB_K_HALVES;
    const uint8_t *pairs, *ones;
    format_three_bits(const uint8_t * panel, int t)
        : pairs(panel + k_pairs_bytes * t), ones(panel + TB_K_PAIRS + k_ones_bytes * t) {}
    typename unit::ints weights(int j, int i) const {
        return this->value(unit::either(k_pairs<unit>(pairs, j, i, 0), k_ones<unit>(ones, j, i, 2)));
    }
};

template <class unit, class Book> struct format_four_bits : k_odd_scales<unit, Book, 1> {
    static constexpr size_t bytes = TB_IQ3_PANEL, fields = TB_IQ3_FIELDS, halves = TB_IQ3_HALVES;
    const uint8_t * quants;
    format_four_bits(const uint8_t * panel, int t) : quants(panel + k_nibbles_bytes * t) {}
    typename unit::ints weights(int j, int i) const { return this->value(k_nibbles<unit>(quants, j, i)); }
};

// A weight is 8 (q - 1) plus or minus 1, and as many times 2s + 1: a scale times q, less a minimum.
using iq1_scales = code_book<120, 1, 8, 24, 40, 56, 72, 88, 104, 120, 8, 24, 40, 56, 72, 88, 104, 120>;
using iq1_minima = code_book<135, 1, 7, 21, 35, 49, 63, 77, 91, 105, 9, 27, 45, 63, 81, 99, 117, 135>;

template <class unit> struct format_iq1_s {
    static constexpr bool plain = true, minima = true, one_d = true;
    static constexpr int scales = 1, offset = 0, most = 2, parts = TB_IQ1_PARTS;
    static constexpr size_t bytes = TB_IQ1_S_PANEL, fields = TB_IQ1_S_FIELDS, halves = TB_IQ1_S_HALVES;
    static k_factors unpack(const uint8_t * from, uint8_t * out) {
        constexpr int half = TB_K_FOUR(8);
        for (int at = 0; at < half; at += 4 * unit::width) {
            const typename unit::ints v = unit::load(from + at);
            const typename unit::ints nibbles[2] = {unit::low_nibbles(v), unit::high_nibbles(v)};
            for (int i = 0; i < 2; i++) {
                unit::store(out + half * i + at, k_book<unit, iq1_scales, 0>::look_up(nibbles[i]));
                unit::store(out + half * (2 + i) + at, k_book<unit, iq1_minima, 0>::look_up(nibbles[i]));
            }
        }
        return {out, out + 2 * half};
    }
    const uint8_t * plane;
    format_iq1_s(const uint8_t * panel, int t) : plane(panel + k_pairs_bytes * t) {}
    typename unit::ints weights(int j, int i) const { return k_pairs<unit>(plane, j, i, 0); }
};

// Types with one scale, d: those of tiles are 1.
template <class unit> struct k_without_scales : k_format {
    static constexpr size_t fields = 0;
    static constexpr int scales = 1, most = 3, offset = 1;
    static constexpr bool minima = false;
    static k_factors unpack(const uint8_t *, uint8_t * out) {
        std::memset(out, 1, gemm_k_tiles * gemm_panel);
        return {out, out};
    }
};

template <class unit> struct format_tq2_0 : k_without_scales<unit> {
    static constexpr bool plain = true;
    static constexpr size_t bytes = TB_TQ2_0_PANEL, halves = TB_TQ2_0_HALVES;
    const uint8_t * plane;
    format_tq2_0(const uint8_t * panel, int t) : plane(panel + k_pairs_bytes * t) {}
    typename unit::ints weights(int j, int i) const { return k_pairs<unit>(plane, j, i, 0); }
};

// Where TQ1_0 has quad j of tile t: its row of bytes, and 3 to the power of its digit.
struct k_digits {
    int row, power;
    constexpr k_digits(int t, int j) : row(j), power(t) {
        constexpr int powers[] = {1, 3, 9, 27, 81};
        const int sixteen = 2 * t + j / 4; // of the block's 16
        if (sixteen >= 10) {
            row = sixteen < 15 ? 8 + j % 4 : 12;
            power = sixteen < 15 ? sixteen - 10 : j % 4;
        }
        power = powers[power];
    }
};

template <class unit> struct format_tq1_0 : k_without_scales<unit> {
    static constexpr bool plain = false;
    static constexpr size_t bytes = TB_TQ1_0_PANEL, halves = TB_TQ1_0_HALVES;
    const uint8_t * panel;
    int t;
    format_tq1_0(const uint8_t * p, int tile) : panel(p), t(tile) {}
    typename unit::ints weights(int j, int i) const {
        const k_digits d(t, j);
        return unit::top_digits(unit::load(panel + 128 * d.row + 4 * unit::width * i), d.power);
    }
};

// ---- one block of 256 k

// The sums of all tiles, one after the other: run(tile, scales, q, at) adds those of one, whose first scale is number
// `at` of the block's. locality: where the block after the next one is fetched to, as __builtin_prefetch has it.
template <class Format, int locality = 3, class Run>
void k_tile_by_tile(const uint8_t * panel, const uint8_t * scales, const uint8_t * q, int rows,
                    int32_t (*sums)[gemm_panel], const Run & run) {
    std::memset(sums, 0, sizeof(sums[0]) * static_cast<size_t>(rows));
    constexpr size_t piece = Format::bytes / gemm_k_tiles; // that comes with each tile: a burst would wait for itself
    for (int t = 0; t < gemm_k_tiles; t++) {
        // The hardware follows a stream to the end of its page only.
        const uint8_t * next = panel + 3 * Format::bytes / 2 + piece * static_cast<size_t>(t);
        for (size_t at = 0; at < piece; at += 64)
            __builtin_prefetch(next + at, 0, locality);
        run(Format(panel, t), scales + gemm_panel * Format::scales * t, q + TB_TILE_K * t, Format::scales * t);
    }
}

// What the dot products of a row begin with: -offset times the sums of its activations.
using k_start = int32_t[2 * gemm_k_tiles];

template <class Format> void open_k_starts(const k_record & r, int rows, k_start * starts) {
    constexpr int n = Format::scales * gemm_k_tiles;
    const uint8_t * from = Format::scales == 1 ? r.sums32 : r.sums16;
    for (int m = 0; m < rows; m++, from += n * sizeof(int16_t)) {
        int16_t sums[n];
        std::memcpy(sums, from, sizeof(sums));
        for (int i = 0; i < n; i++)
            starts[m][i] = -Format::offset * sums[i];
    }
}

// Weights of some vectors of columns in registers, and all rows pass by: an activation is loaded once for them.
template <class unit, int vectors, class Format>
void k_tile_of_dots(const Format & tile, const uint8_t * scales, const uint8_t * q, int at, const k_start * starts,
                    int rows, int32_t (*sums)[gemm_panel]) {
    constexpr int quads = 8 / Format::scales;
    for (int first = 0; first < gemm_panel / unit::width; first += vectors) {
        typename unit::ints w[vectors][8], scale[vectors][Format::scales];
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) {
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++)
                w[i][j] = tile.weights(j, first + i);
#pragma GCC unroll 2
            for (int s = 0; s < Format::scales; s++)
                scale[i][s] = unit::template widened<!Format::minima>(scales + 32 * s + unit::width * (first + i));
        }
        const uint8_t * x = q;
        int32_t * to = sums[0] + unit::width * first;
#pragma GCC unroll 1
        for (int m = 0; m < rows; m++, x += TB_K_BLOCK, to += gemm_panel) {
            typename unit::ints sum[vectors];
#pragma GCC unroll 4
            for (int i = 0; i < vectors; i++)
                sum[i] = unit::load_sums(to + unit::width * i);
#pragma GCC unroll 2
            for (int s = 0; s < Format::scales; s++) {
                typename unit::ints dot[vectors];
#pragma GCC unroll 4
                for (int i = 0; i < vectors; i++)
                    dot[i] = Format::offset ? unit::broadcast(starts[m][at + s]) : unit::zeros();
#pragma GCC unroll 8
                for (int j = 0; j < quads; j++) {
                    const typename unit::ints y = unit::broadcast(read_k_int(x + 4 * (quads * s + j)));
#pragma GCC unroll 4
                    for (int i = 0; i < vectors; i++)
                        unit::dot(dot[i], w[i][quads * s + j], y);
                }
#pragma GCC unroll 4
                for (int i = 0; i < vectors; i++)
                    sum[i] = unit::add_product(sum[i], dot[i], scale[i][s]);
            }
#pragma GCC unroll 4
            for (int i = 0; i < vectors; i++)
                unit::store_sums(to + unit::width * i, sum[i]);
        }
    }
}

// Some rows' dot products with weights of some vectors of columns, both in registers.
template <class unit, class Format, int rows, int vectors>
__attribute__((always_inline)) inline void
k_rows_of_dots(const typename unit::ints (&w)[vectors][8], const typename unit::ints (&scale)[vectors],
               const uint8_t * x, const k_start * starts, int at, int32_t * to) {
    typename unit::ints dot[rows][vectors];
#pragma GCC unroll 4
    for (int m = 0; m < rows; m++) {
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++)
            dot[m][i] = Format::offset ? unit::broadcast(starts[m][at]) : unit::zeros();
    }
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
#pragma GCC unroll 4
        for (int m = 0; m < rows; m++) {
            const typename unit::ints y = unit::broadcast(read_k_int(x + TB_K_BLOCK * m + 4 * j));
#pragma GCC unroll 4
            for (int i = 0; i < vectors; i++)
                unit::dot(dot[m][i], w[i][j], y);
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < rows; m++) {
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) {
            int32_t * sum = to + gemm_panel * m + unit::width * i;
            unit::store_sums(sum, unit::add_product(unit::load_sums(sum), dot[m][i], scale[i]));
        }
    }
}

// k_tile_of_dots with four rows at a time: a core that begins two dot products a cycle runs out of those that need not
// wait for another (Zen 5). For `plain` types with one scale per tile; Q5_K and Q6_K are slower so.
template <class unit, int vectors, class Format>
void k_tile_of_fours(const Format & tile, const uint8_t * scales, const uint8_t * q, int at, const k_start * starts,
                     int rows, int32_t (*sums)[gemm_panel]) {
    static_assert(Format::scales == 1);
    for (int first = 0; first < gemm_panel / unit::width; first += vectors) {
        typename unit::ints w[vectors][8], scale[vectors];
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) {
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++)
                w[i][j] = tile.weights(j, first + i);
            scale[i] = unit::template widened<!Format::minima>(scales + unit::width * (first + i));
        }
        int m = 0;
#pragma GCC unroll 1
        for (; m + 4 <= rows; m += 4)
            k_rows_of_dots<unit, Format, 4>(w, scale, q + TB_K_BLOCK * m, starts + m, at,
                                            sums[m] + unit::width * first);
#pragma GCC unroll 1
        for (; m < rows; m++)
            k_rows_of_dots<unit, Format, 1>(w, scale, q + TB_K_BLOCK * m, starts + m, at,
                                            sums[m] + unit::width * first);
    }
}

// The dot products of a few rows in registers, and weights pass by: no sum waits for the one before it.
template <class unit, int vectors, int rows, class Format>
void k_tile_of_few(const Format & tile, const uint8_t * scales, const uint8_t * q, int at, const k_start * starts,
                   int32_t (*sums)[gemm_panel]) {
    constexpr int quads = 8 / Format::scales;
    for (int first = 0; first < gemm_panel / unit::width; first += vectors) {
#pragma GCC unroll 2
        for (int s = 0; s < Format::scales; s++) {
            typename unit::ints dot[rows][vectors];
#pragma GCC unroll 4
            for (int m = 0; m < rows; m++) {
#pragma GCC unroll 4
                for (int i = 0; i < vectors; i++)
                    dot[m][i] = Format::offset ? unit::broadcast(starts[m][at + s]) : unit::zeros();
            }
#pragma GCC unroll 8
            for (int j = quads * s; j < quads * (s + 1); j++) {
                typename unit::ints w[vectors];
#pragma GCC unroll 4
                for (int i = 0; i < vectors; i++)
                    w[i] = tile.weights(j, first + i);
#pragma GCC unroll 4
                for (int m = 0; m < rows; m++) {
                    const typename unit::ints y = unit::broadcast(read_k_int(q + TB_K_BLOCK * m + 4 * j));
#pragma GCC unroll 4
                    for (int i = 0; i < vectors; i++)
                        unit::dot(dot[m][i], w[i], y);
                }
            }
#pragma GCC unroll 4
            for (int i = 0; i < vectors; i++) {
                const uint8_t * from = scales + 32 * s + unit::width * (first + i);
                const typename unit::ints scale = unit::template widened<!Format::minima>(from);
#pragma GCC unroll 4
                for (int m = 0; m < rows; m++) {
                    int32_t * to = sums[m] + unit::width * (first + i);
                    unit::store_sums(to, unit::add_product(unit::load_sums(to), dot[m][i], scale));
                }
            }
        }
    }
}

constexpr std::integral_constant<int, 3> to_l1;
constexpr std::integral_constant<int, 2> to_l2;

// One row of Q4_K is slower with prefetches into L2, three and more with those into L1; two share the loop of one, but
// for short vectors: of these one row has registers for four at once, and reads memory in order.
// Each case has a loop of its own: choosing inside of one, gcc 12 makes half as fast code of it.
template <class unit, class Format>
void k_block_of_dots(const uint8_t * panel, const uint8_t * scales, const k_record & r, int rows,
                     int32_t (*sums)[gemm_panel]) {
    k_start starts[gemm_max_rows];
    if constexpr (Format::offset != 0) open_k_starts<Format>(r, rows, starts);
    const auto run = [&](auto locality, const auto & of_tile) {
        k_tile_by_tile<Format, locality>(panel, scales, r.q, rows, sums, of_tile);
    };
    if constexpr (unit::vectors == 1) {
        if (rows == 1)
            return run(to_l1, [&](const auto &... tile) { k_tile_of_few<unit, 4, 1>(tile..., starts, sums); });
    }
    if (rows <= 2) {
        run(to_l1, [&](const auto &... tile) { k_tile_of_dots<unit, 1>(tile..., starts, rows, sums); });
    } else if (rows == 3) {
        run(to_l2, [&](const auto &... tile) { k_tile_of_few<unit, unit::vectors, 3>(tile..., starts, sums); });
    } else if (rows == 4) {
        run(to_l2, [&](const auto &... tile) { k_tile_of_few<unit, unit::vectors, 4>(tile..., starts, sums); });
    } else if constexpr (Format::plain && Format::scales == 1 && unit::vectors > 1) {
        run(to_l2, [&](const auto &... tile) { k_tile_of_fours<unit, unit::vectors>(tile..., starts, rows, sums); });
    } else {
        run(to_l2, [&](const auto &... tile) { k_tile_of_dots<unit, unit::vectors>(tile..., starts, rows, sums); });
    }
}

constexpr size_t k_before = 64; // bytes that HVX reads in front of a row of scales, instead of behind it

// The float step: results += (d * sums - dmin * (minima . activations)) * scale, `factors` being the minima, or where
// quants have an offset that sums still hold, the scales; in pairs of sub-blocks.
template <class unit, class Format>
void k_finish(const uint8_t * factors, const uint8_t * halves, const k_record & r, int rows,
              const int32_t (*sums)[gemm_panel], float (*results)[gemm_panel]) {
    using ints = typename unit::ints;
    using floats = typename unit::floats;
    constexpr int pairs = 4 * Format::scales;
    constexpr bool offset = Format::offset != 0 && !unit::starts;
    for (int i = 0; i < gemm_panel / unit::width; i++) {
        ints factor[pairs];
#pragma GCC unroll 8
        for (int p = 0; p < pairs; p++)
            factor[p] = unit::template byte_pairs<!Format::minima>(factors + 64 * p + unit::width * i);
        floats d = unit::load_halves(halves + 2 * unit::width * i);
        if constexpr (Format::parts != 1) d = unit::mul(d, unit::broadcast(1.0f / Format::parts));
        const floats dmin =
            Format::minima && !Format::one_d ? unit::load_halves(halves + TB_K_HALVES + 2 * unit::width * i) : d;
        for (int m = 0; m < rows; m++) {
            const uint8_t * of = pairs == 4 ? r.sums32 + gemm_k_sums32 * static_cast<size_t>(m)
                                            : r.sums16 + gemm_k_sums16 * static_cast<size_t>(m);
            ints taken = unit::zeros();
#pragma GCC unroll 8
            for (int p = 0; p < pairs && (Format::minima || offset); p++)
                taken = unit::add_pairs(taken, factor[p], unit::broadcast(read_k_int(of + 4 * p)));
            const ints sum = unit::load_sums(sums[m] + unit::width * i);
            float scale;
            std::memcpy(&scale, r.scales + sizeof(float) * static_cast<size_t>(m), sizeof(scale));
            const floats s = unit::broadcast(scale);
            float * to = results[m] + unit::width * i;
            const floats before = unit::load_floats(to);
            floats x;
            if constexpr (Format::one_d) {
                x = unit::mul(d, unit::to_floats(unit::template less_shifted<0>(sum, taken)));
            } else if constexpr (Format::minima) {
                x = unit::fms(d, unit::to_floats(sum), unit::mul(dmin, unit::to_floats(taken)));
            } else if constexpr (offset) {
                x = unit::mul(d,
                              unit::to_floats(unit::template less_shifted<__builtin_ctz(Format::offset)>(sum, taken)));
            } else {
                x = unit::mul(d, unit::to_floats(sum));
            }
            unit::store_floats(to, unit::fma(x, s, before));
        }
    }
}

inline void open_results(const gemm_int8_args & a, float (*results)[gemm_panel]) {
    for (int m = 0; m < a.rows; m++) {
        if (a.add) {
            std::memcpy(results[m], a.out[m], sizeof(*results));
        } else {
            std::memset(results[m], 0, sizeof(*results));
        }
    }
}

inline void close_results(const gemm_int8_args & a, const float (*results)[gemm_panel]) {
    for (int m = 0; m < a.rows; m++)
        std::memcpy(a.out[m], results[m], sizeof(*results));
}

template <class unit, class Format> void multiply_k_panels(const gemm_int8_args & a) {
    alignas(64) int32_t sums[gemm_max_rows][gemm_panel];
    alignas(64) float results[gemm_max_rows][gemm_panel];
    alignas(64) uint8_t unpacked[k_before + 1024];
    open_results(a, results);
    const uint8_t * panel = a.panel;
    const uint8_t * record = a.group;
    for (int64_t t = 0; t < a.k_tiles; t += gemm_k_tiles, panel += Format::bytes) {
        const k_record r(record, a.rows);
        const k_factors s = Format::unpack(panel + Format::fields, unpacked + k_before);
        unit::template block<Format>(panel, s.scales, r, a.rows, sums);
        k_finish<unit, Format>(s.factors, panel + Format::halves, r, a.rows, sums, results);
        record += gemm_k_record_bytes(a.rows);
    }
    close_results(a, results);
}

// The kernels of a set, which the names of its other kernels end in: "4x16_avx2".
#define TILEBEAM_K_NAMES(end)                                                                                          \
    {"gemm_q4k_" end, "gemm_q5k_" end, "gemm_q6k_" end, "gemm_q2k_" end, "gemm_q3k_" end,                              \
     "gemm_nlx_" end, "gemm_tq2_" end, "gemm_tq1_" end, "gemm_i2x_" end, "gemm_i2s_" end,                              \
     "gemm_i3x_" end, "gemm_i3s_" end, "gemm_i1s_" end, "gemm_i1m_" end}

template <gemm_format f> using k_of = std::integral_constant<gemm_format, f>;
template <class Format> struct k_as {
    using type = Format;
};

// Which function runs a format's kernel; another set may have others.
struct k_runs {
    template <class unit, gemm_format, class Format> static auto run() { return multiply_k_panels<unit, Format>; }
};

template <class unit, class Runs = k_runs>
void fill_k_kernels(gemm_kernels & k, const char * const (&names)[gemm_format_count - gemm_q4_k]) {
    const auto fill = [&](auto format, auto of) {
        constexpr gemm_format f = format;
        k.int8[f] = {names[f - gemm_q4_k], gemm_max_rows, 0,
                     Runs::template run<unit, f, typename decltype(of)::type>()};
    };
    fill(k_of<gemm_q4_k>(), k_as<format_q4_k<unit>>());
    fill(k_of<gemm_q5_k>(), k_as<format_q5_k<unit>>());
    fill(k_of<gemm_q6_k>(), k_as<format_q6_k<unit>>());
    fill(k_of<gemm_q2_k>(), k_as<format_q2_k<unit>>());
    fill(k_of<gemm_q3_k>(), k_as<format_q3_k<unit>>());
    fill(k_of<gemm_iq4_xs>(), k_as<format_iq4_xs<unit>>());
    fill(k_of<gemm_tq2_0>(), k_as<format_tq2_0<unit>>());
    fill(k_of<gemm_tq1_0>(), k_as<format_tq1_0<unit>>());
    fill(k_of<gemm_iq2_xxs>(), k_as<format_three_bits<unit, iq2_book, 1>>());
    fill(k_of<gemm_iq2_xs>(), k_as<format_three_bits<unit, iq2_book, 2>>());
    fill(k_of<gemm_iq3_xxs>(), k_as<format_four_bits<unit, iq3_xxs_book>>());
    fill(k_of<gemm_iq3_s>(), k_as<format_four_bits<unit, iq3_s_book>>());
    fill(k_of<gemm_iq1_s>(), k_as<format_iq1_s<unit>>());
    fill(k_of<gemm_iq1_m>(), k_as<format_three_bits<unit, iq1_book, 2>>());
}

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_GEMM_K_H
