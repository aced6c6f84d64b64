// Dequantization of Q4_0 from other layouts than Tilebeam's, into the same FP16 tiles: what bench/hvx_packets.py
// compares with (the layouts of the paper's figure 15). Written over the same scaled products as the product's kernels,
// with what each layout allows; correct, and tested like kernels (tests/test_hvx.py).
//
// All read whole vectors: up to 128 bytes past the last block must be readable.
#ifndef TILEBEAM_BENCH_HVX_LAYOUTS_H
#define TILEBEAM_BENCH_HVX_LAYOUTS_H

#include <cstdint>
#include <cstring>

#include "kernels/hvx/multiply.h"
#include "tilebeam/types.h"

namespace tb::bench {

using namespace tb::npu::hvx;

constexpr uint32_t block_bytes = 18;        // ggml's Q4_0 block: FP16 scale, 16 bytes of quants
constexpr uint32_t super_block_bytes = 144; // the paper's: 8 FP16 scales, 128 bytes of quants
constexpr uint32_t tile_bytes = 2048;       // FP16

struct alignas(128) constant_words {
    uint32_t at[32];
};

constexpr constant_words value_table() {
    constant_words t{};
    for (int i = 0; i < 32; i++)
        t.at[i] = quant_bits(i % 16 - 8) * 0x10001u;
    return t;
}

inline constexpr constant_words q4_values = value_table();

// Byte offsets in a tile of elements 0..31 of one column (twice: the second time for the next column).
constexpr constant_words column_offsets() {
    constant_words t{};
    for (uint32_t i = 0; i < 32; i++) {
        const uint32_t k = 2 * i % 32, next = i / 16 * 4;
        const uint32_t even = (k >> 1) * 128 + next;
        t.at[i] = even | (even + 2) << 16;
    }
    return t;
}

inline constexpr constant_words scatter_offsets = column_offsets();

inline HVX_Vector constant(const constant_words & t) { return load_aligned(t.at); }

// Halves [0, n) of a, then halves of b as they lie.
inline HVX_Vector splice(HVX_Vector a, HVX_Vector b, uint32_t halves_of_a) {
    return Q6_V_vmux_QVV(Q6_Q_vsetq_R(static_cast<int32_t>(2 * halves_of_a)), a, b);
}

// The 32 quants of the block whose bytes start at byte 2 of `v`, one per half, in ggml's order (nibbles are not masked:
// the look-up takes four bits).
inline HVX_Vector block_quants(HVX_Vector v) {
    const HVX_Vector bytes = Q6_V_lo_W(Q6_Wuh_vunpack_Vub(v));
    const HVX_Vector high = Q6_V_vror_VR(Q6_Vuh_vlsr_VuhR(bytes, 4), 96); // 16 halves up
    return splice(bytes, high, 16);
}

inline HVX_Vector look_up_halves(HVX_Vector quants) {
    return Q6_V_lo_W(Q6_Wh_vlut16_VbVhR_nomatch(quants, constant(q4_values), 0));
}

inline uint32_t scale_bits(const uint8_t * block) {
    uint16_t bits;
    std::memcpy(&bits, __builtin_assume_aligned(block, 2), sizeof(bits));
    return bits;
}

// Conventional: a tile's 32 columns, each one block of 32 k, `stride` bytes apart. A group at a time is dequantized and
// its elements are scattered to where the matrix unit wants them.
__attribute__((noinline)) inline void conventional_one(const uint8_t * blocks, uint32_t stride, uint16_t * out) {
    const HVX_Vector offsets = constant(scatter_offsets);
    const HVX_VectorPred first_half = Q6_Q_vsetq_R(64);
    intptr_t column = reinterpret_cast<intptr_t>(out);
    for (uint32_t n = 32; n != 0; n--, blocks += stride, column += 4) {
        const HVX_Vector values = look_up_halves(block_quants(load(blocks + 2)));
        const HVX_Vector scaled = scales(halves(scale_bits(blocks))).times(values);
        Q6_vscatter_QRMVhV(first_half, column, static_cast<int32_t>(tile_bytes - 1), offsets, scaled);
    }
}

#if TILEBEAM_HVX_FLOAT
// The same without tables: mask, unpack, convert (the paper's figure 9, left). 1024 + q is FP16 0x6400 | q, and the
// difference to 1032 is q - 8.
__attribute__((noinline)) inline void conventional_arithmetic(const uint8_t * blocks, uint32_t stride, uint16_t * out) {
    const HVX_Vector offsets = constant(scatter_offsets);
    const HVX_VectorPred first_half = Q6_Q_vsetq_R(64);
    intptr_t column = reinterpret_cast<intptr_t>(out);
    for (uint32_t n = 32; n != 0; n--, blocks += stride, column += 4) {
        const HVX_Vector quants = Q6_V_vand_VV(block_quants(load(blocks + 2)), halves(15));
        const HVX_Vector values = Q6_Vqf16_vsub_VhfVhf(Q6_V_vor_VV(quants, halves(0x6400)), halves(0x6408));
        const HVX_Vector scaled = scales(halves(scale_bits(blocks))).times_qf16(values);
        Q6_vscatter_QRMVhV(first_half, column, static_cast<int32_t>(tile_bytes - 1), offsets, scaled);
    }
}
#endif

// Eight columns at a time, two per scatter, all loads first: as far as this layout can be driven.
__attribute__((noinline)) inline void conventional_tuned(const uint8_t * blocks, uint32_t stride, uint16_t * out) {
    const HVX_Vector offsets = constant(scatter_offsets);
    intptr_t column = reinterpret_cast<intptr_t>(out);
    for (uint32_t n = 4; n != 0; n--, column += 32) {
        HVX_Vector bytes[8];
        uint32_t scale[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++, blocks += stride) {
            bytes[i] = load(blocks + 2);
            scale[i] = scale_bits(blocks);
        }
        HVX_Vector scaled[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const HVX_Vector first = block_quants(bytes[2 * i]), second = block_quants(bytes[2 * i + 1]);
            const HVX_Vector values = look_up_halves(splice(first, Q6_V_vror_VR(second, 64), 32));
            scaled[i] = scales(splice(halves(scale[2 * i]), halves(scale[2 * i + 1]), 32)).times(values);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            Q6_vscatter_RMVhV(column + 8 * i, static_cast<int32_t>(tile_bytes - 1), offsets, scaled[i]);
    }
}

// The same pointer, unknown to the compiler: it would otherwise see that a vector of quants holds the next block's
// scale too, and take it out of the vector through the stack.
inline const uint8_t * laundered(const uint8_t * p) {
    __asm__("" : "+r"(p));
    return p;
}

// Tile groups, not coalesced: 32 elements in HMX order per ordinary block, blocks one after another. Two of them make a
// vector of the tile.
__attribute__((noinline)) inline void tile_groups(const uint8_t * blocks, uint32_t tiles, uint16_t * __restrict out) {
    const uint8_t * headers = laundered(blocks);
    for (uint32_t n = 16 * tiles; n != 0; n--, blocks += 2 * block_bytes, headers += 2 * block_bytes, out += 64) {
        const HVX_Vector first = block_quants(load(blocks + 2)), second = block_quants(load(blocks + block_bytes + 2));
        const HVX_Vector values = look_up_halves(splice(first, Q6_V_vror_VR(second, 64), 32));
        const HVX_Vector scale = splice(halves(scale_bits(headers)), halves(scale_bits(headers + block_bytes)), 32);
        store_aligned(out, scales(scale).times(values));
    }
}

// Indices that spread scales 4i .. 4i + 3 over two vectors.
constexpr constant_words spread_indices(uint32_t i) {
    constant_words t{};
    for (uint32_t word = 0; word < 32; word++) {
        const uint32_t even = 4 * i + word / 16, odd = even + 2;
        t.at[word] = (odd << 8 | even) * 0x10001u;
    }
    return t;
}

inline constexpr constant_words spread[2] = {spread_indices(0), spread_indices(1)};

// Tile groups, coalesced as in the paper: super-blocks of eight groups, their quants in quad order. Four are a tile;
// the next four are loaded while these are worked on, as in the product's kernels.
struct four_super_blocks {
    HVX_Vector scales[4], quants[4];
    explicit four_super_blocks(const uint8_t * p) {
#pragma GCC unroll 4
        for (uint32_t b = 0; b < 4; b++) {
            scales[b] = load(p + b * super_block_bytes);
            quants[b] = load(p + b * super_block_bytes + 16);
        }
    }
};

__attribute__((noinline)) inline void super_blocks(const uint8_t * blocks, uint32_t tiles, uint16_t * __restrict out) {
    if (tiles == 0) return;
    const HVX_Vector values = constant(q4_values);
    const uint8_t * last = blocks + (tiles - 1) * 4 * super_block_bytes;
    four_super_blocks next(blocks);
    for (; tiles != 0; tiles--) {
        const four_super_blocks now = next;
        blocks = blocks == last ? blocks : blocks + 4 * super_block_bytes;
        next = four_super_blocks(blocks);
#pragma GCC unroll 4
        for (int b = 0; b < 4; b++, out += 256) {
            const HVX_Vector all = Q6_V_lo_W(Q6_Wuw_vunpack_Vuh(now.scales[b]));
            const HVX_Vector nibbles[2] = {now.quants[b], Q6_Vuh_vlsr_VuhR(now.quants[b], 4)};
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++) {
                const HVX_VectorPair q = Q6_Wh_vlut16_VbVhR_nomatch(nibbles[i], values, 0);
                const HVX_VectorPair s = Q6_Wh_vlut16_VbVhR_nomatch(constant(spread[i]), all, 0);
                store_aligned(out + 128 * i, scales(Q6_V_lo_W(s)).times(Q6_V_lo_W(q)));
                store_aligned(out + 128 * i + 64, scales(Q6_V_hi_W(s)).times(Q6_V_hi_W(q)));
            }
        }
    }
}

// No dequantization: the quants of 4-bit tiles are copied as they are, what no layout can beat. The compiler must not
// see a memcpy in it.
#if defined(__clang__)
__attribute__((no_builtin("memcpy", "memmove")))
#endif
__attribute__((noinline)) inline void copy_quants(const uint8_t * panel, uint32_t tiles, uint16_t * __restrict out) {
    for (; tiles != 0; tiles--, panel += TB_QUANTS(4) + TB_HALF_SCALES, out += 256) {
        const HVX_Vector chunk[4] = {load(panel), load(panel + 128), load(panel + 256), load(panel + 384)};
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++)
            store_aligned(out + 64 * c, chunk[c]);
    }
}

} // namespace tb::bench

#endif // TILEBEAM_BENCH_HVX_LAYOUTS_H
