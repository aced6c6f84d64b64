// K-quant GEMM: block panels of 32 columns x 256 k (tilebeam/k_panels.h) against K groups of activation rows (gemm.h),
// written once over the names of a `unit` (kernels/<isa>/gemm_k.cpp).
//
// Products are summed as integers over all 256 k: each tile's dot products times their integer scales, minima (of Q6_K:
// the offset of 32) times the sums of activations; then one float step per column, row and 256 k. The integer sums stay
// in L1: more of them than registers are in use, and the compiler would spill in the innermost loop.
//
// unit::tile<Format>(tile, scales, q, rows, sums) adds the products of a tile with all rows to their integer sums; sets
// with a dot product of four bytes use k_tile_of_dots.
// Internal linkage, see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_GEMM_K_H
#define TILEBEAM_NPU_KERNELS_GEMM_K_H

#include <cmath>
#include <cstring>

#include "kernels/gemm.h"

namespace tb::npu {
namespace {

// A record's parts.
struct k_record {
    const uint8_t *q, *scales, *sums16, *sums32;
    k_record(const uint8_t * record, int rows)
        : q(record), scales(q + TB_K_BLOCK * rows), sums16(scales + sizeof(float) * static_cast<size_t>(rows)),
          sums32(sums16 + gemm_k_sums16 * static_cast<size_t>(rows)) {}
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

// ---- formats: weights(j, i) is quad j of the columns of vector i, as unsigned bytes

template <class unit> typename unit::ints k_nibbles(const uint8_t * tile, int j, int i) {
    const typename unit::ints v = unit::load(tile + 128 * (j / 2) + 4 * unit::width * i);
    return j % 2 ? unit::high_nibbles(v) : unit::low_nibbles(v);
}

// Scales and minima of a block, a byte each.
struct k_bytes {
    alignas(64) uint8_t scales[TB_K_LOW], minima[TB_K_LOW];
};

// Those of Q4_K and Q5_K, from their six bits.
template <class unit> void unpack_k_bytes(const uint8_t * fields, k_bytes & out) {
    constexpr int half = TB_K_LOW / 2; // sub-blocks 0 to 3, then 4 to 7
    for (int at = 0; at < half; at += 4 * unit::width) {
        const typename unit::ints first = unit::load(fields + at), second = unit::load(fields + half + at);
        const typename unit::ints top = unit::load(fields + TB_K_LOW + at);
        const auto join = [&](uint8_t * to, typename unit::ints low, int shift) {
            unit::store(to + at, unit::either(low, unit::masked(unit::shifted(top, shift), 0x30)));
        };
        join(out.scales, unit::low_nibbles(first), 4);
        join(out.scales + half, unit::low_nibbles(second), 2);
        join(out.minima, unit::high_nibbles(first), 0);
        join(out.minima + half, unit::high_nibbles(second), -2);
    }
}

template <class unit> struct format_q4_k {
    static constexpr size_t bytes = TB_Q4_K_PANEL, fields = TB_Q4_K_FIELDS, halves = TB_Q4_K_HALVES;
    static constexpr int scales = 1;     // of a tile
    static constexpr int most = 15;      // of a quant
    static constexpr bool minima = true; // else scales are signed and quants are 32 too large
    const uint8_t * quants;
    format_q4_k(const uint8_t * panel, int t) : quants(panel + TB_QUANTS(4) * t) {}
    typename unit::ints weights(int j, int i) const { return k_nibbles<unit>(quants, j, i); }
};

template <class unit> struct format_q5_k {
    static constexpr size_t bytes = TB_Q5_K_PANEL, fields = TB_Q5_K_FIELDS, halves = TB_Q5_K_HALVES;
    static constexpr int scales = 1, most = 31;
    static constexpr bool minima = true;
    const uint8_t *quants, *plane;
    format_q5_k(const uint8_t * panel, int t)
        : quants(panel + TB_QUANTS(4) * t), plane(panel + TB_K_QUANTS + TB_Q5_K_PLANE * t) {}
    typename unit::ints weights(int j, int i) const {
        const typename unit::ints bits = unit::shifted(unit::load(plane + 4 * unit::width * i), 4 - j);
        return unit::either(k_nibbles<unit>(quants, j, i), unit::masked(bits, 0x10));
    }
};

template <class unit> struct format_q6_k {
    static constexpr size_t bytes = TB_Q6_K_PANEL, fields = TB_Q6_K_FIELDS, halves = TB_Q6_K_HALVES;
    static constexpr int scales = 2, most = 63;
    static constexpr bool minima = false;
    const uint8_t *quants, *plane;
    format_q6_k(const uint8_t * panel, int t)
        : quants(panel + TB_QUANTS(4) * t), plane(panel + TB_K_QUANTS + TB_Q6_K_PLANE * t) {}
    typename unit::ints weights(int j, int i) const {
        const typename unit::ints v = unit::load(plane + 128 * (j / 4) + 4 * unit::width * i);
        return unit::either(k_nibbles<unit>(quants, j, i), unit::masked(unit::shifted(v, 4 - 2 * (j % 4)), 0x30));
    }
};

// ---- one tile

// Weights of unit::width columns in registers, and all rows pass by.
template <class unit, class Format>
void k_tile_of_dots(const Format & tile, const uint8_t * scales, const uint8_t * q, int rows,
                    int32_t (*sums)[gemm_panel]) {
    constexpr int quads = 8 / Format::scales;
    for (int i = 0; i < gemm_panel / unit::width; i++) {
        typename unit::ints w[8], scale[Format::scales];
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            w[j] = tile.weights(j, i);
#pragma GCC unroll 2
        for (int s = 0; s < Format::scales; s++)
            scale[s] = unit::template widened<!Format::minima>(scales + 32 * s + unit::width * i);
        const uint8_t * x = q;
#pragma GCC unroll 1
        for (int m = 0; m < rows; m++, x += TB_K_BLOCK) {
            typename unit::ints sum = unit::load_sums(sums[m] + unit::width * i);
#pragma GCC unroll 2
            for (int s = 0; s < Format::scales; s++) {
                typename unit::ints dot = unit::zeros();
#pragma GCC unroll 8
                for (int j = 0; j < quads; j++)
                    unit::dot(dot, w[quads * s + j], unit::broadcast(read_k_int(x + 4 * (quads * s + j))));
                sum = unit::add_product(sum, dot, scale[s]);
            }
            unit::store_sums(sums[m] + unit::width * i, sum);
        }
    }
}

// ---- one block of 256 k

// The float step: results += (d * sums - dmin * (minima . activations)) * scale, `factors` being the minima, or of Q6_K
// the scales; in pairs of sub-blocks.
template <class unit, class Format>
void k_finish(const uint8_t * factors, const uint8_t * halves, const k_record & r, int rows,
              const int32_t (*sums)[gemm_panel], float (*results)[gemm_panel]) {
    using ints = typename unit::ints;
    using floats = typename unit::floats;
    constexpr int pairs = Format::minima ? 4 : 8;
    for (int i = 0; i < gemm_panel / unit::width; i++) {
        ints factor[pairs];
#pragma GCC unroll 8
        for (int p = 0; p < pairs; p++)
            factor[p] = unit::template byte_pairs<!Format::minima>(factors + 64 * p + unit::width * i);
        const floats d = unit::load_halves(halves + 2 * unit::width * i);
        const floats dmin = Format::minima ? unit::load_halves(halves + TB_K_HALVES + 2 * unit::width * i) : d;
        for (int m = 0; m < rows; m++) {
            const uint8_t * of = Format::minima ? r.sums32 + gemm_k_sums32 * static_cast<size_t>(m)
                                                : r.sums16 + gemm_k_sums16 * static_cast<size_t>(m);
            ints taken = unit::zeros();
#pragma GCC unroll 8
            for (int p = 0; p < pairs; p++)
                taken = unit::add(taken, unit::multiply_pairs(factor[p], unit::broadcast(read_k_int(of + 4 * p))));
            const ints sum = unit::load_sums(sums[m] + unit::width * i);
            float scale;
            std::memcpy(&scale, r.scales + sizeof(float) * static_cast<size_t>(m), sizeof(scale));
            const floats s = unit::broadcast(scale);
            float * to = results[m] + unit::width * i;
            const floats before = unit::load_floats(to);
            if constexpr (Format::minima) {
                const floats x = unit::fms(d, unit::to_floats(sum), unit::mul(dmin, unit::to_floats(taken)));
                unit::store_floats(to, unit::fma(x, s, before));
            } else {
                const floats x = unit::mul(d, unit::to_floats(unit::less_32_times(sum, taken)));
                unit::store_floats(to, unit::fma(x, s, before));
            }
        }
    }
}

template <class unit, class Format> void multiply_k_panels(const gemm_int8_args & a) {
    alignas(64) int32_t sums[gemm_max_rows][gemm_panel];
    alignas(64) float results[gemm_max_rows][gemm_panel];
    k_bytes unpacked;
    for (int m = 0; m < a.rows; m++) {
        if (a.add) {
            std::memcpy(results[m], a.out[m], sizeof(results[m]));
        } else {
            std::memset(results[m], 0, sizeof(results[m]));
        }
    }
    const uint8_t * panel = a.panel;
    const uint8_t * record = a.group;
    for (int64_t t = 0; t < a.k_tiles; t += gemm_k_tiles, panel += Format::bytes) {
        if (a.rows <= 2) { // the hardware follows a stream to the end of its page only
            for (size_t i = 0; i < Format::bytes; i += 64)
                __builtin_prefetch(panel + Format::bytes + i);
        }
        std::memset(sums, 0, sizeof(sums[0]) * static_cast<size_t>(a.rows));
        const k_record r(record, a.rows);
        const uint8_t *scales = panel + Format::fields, *factors = scales;
        if constexpr (Format::minima) {
            unpack_k_bytes<unit>(panel + Format::fields, unpacked);
            scales = unpacked.scales;
            factors = unpacked.minima;
        }
        for (int i = 0; i < gemm_k_tiles; i++)
            unit::template tile<Format>(Format(panel, i), scales + 32 * Format::scales * i, r.q + 32 * i, a.rows, sums);
        k_finish<unit, Format>(factors, panel + Format::halves, r, a.rows, sums, results);
        record += gemm_k_record_bytes(a.rows);
    }
    for (int m = 0; m < a.rows; m++)
        std::memcpy(a.out[m], results[m], sizeof(results[m]));
}

// The kernels of a set, with the names that its other kernels have: "4x16_avx2".
template <class unit> void fill_k_kernels(gemm_kernels & k, const char * q4, const char * q5, const char * q6) {
    k.int8[gemm_q4_k] = {q4, gemm_max_rows, 0, multiply_k_panels<unit, format_q4_k<unit>>};
    k.int8[gemm_q5_k] = {q5, gemm_max_rows, 0, multiply_k_panels<unit, format_q5_k<unit>>};
    k.int8[gemm_q6_k] = {q6, gemm_max_rows, 0, multiply_k_panels<unit, format_q6_k<unit>>};
}

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_GEMM_K_H
