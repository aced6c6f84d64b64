// `tile` grouping straight into the integer GEMM: formats for kernels/gemm_vnni.h that bring each 2(k) x 16(n) block to
// one scale per column and 32 k in registers. Same numbers as gemm_kernels.prepare followed by the prepared kernel.
//
// All 16 columns of a half share their blocks' scales, so that a half has 16 ratios to one common scale; a 4-bit block
// is then a table of 16 values, and each vector of nibbles needs four such tables. Internal linkage, see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_AVX512VNNI_TILE_GROUPS_H
#define TILEBEAM_NPU_KERNELS_AVX512VNNI_TILE_GROUPS_H

#include <algorithm>
#include <cmath>

#include "kernels/avx512vnni/unit.h"

namespace tb::npu {
namespace {

constexpr int tiles_at_once = 4; // one 128-bit lane each while their scales are compared
constexpr __mmask64 odd_bytes = 0xaaaaaaaaaaaaaaaaULL;

// The scales of some tiles. `ratios`: of each tile, 16-bit fixed point (see gemm.h), word 2 * row pair + half.
// `common`: [tile][half, half, ..].
struct common_scales {
    __m512i ratios[tiles_at_once];
    alignas(64) float common[tiles_at_once][4];

    // `scales`: of the first tile; the others' follow at equal distances. Of fewer than four the last one counts for
    // those that lack. `q4`: quants reach 8, so that the common scale is a fraction of the largest; else they reach
    // 127.
    void find(const uint8_t * scales, size_t distance, int tiles, bool q4) {
        uint8_t padded[tiles_at_once][64];
        if (tiles < tiles_at_once) {
            for (int i = 0; i < tiles_at_once; i++)
                std::memcpy(padded[i], scales + distance * static_cast<size_t>(std::min(i, tiles - 1)), 64);
            scales = padded[0];
            distance = 64;
        }
        __m512i m[tiles_at_once];
        // magnitudes of FP16 numbers compare as integers, and what is not finite is above all others
#pragma GCC unroll 4
        for (size_t i = 0; i < tiles_at_once; i++)
            m[i] = _mm512_and_si512(_mm512_loadu_si512(scales + distance * i), _mm512_set1_epi16(0x7fff));
        const __m512i m01 = largest_lanes<0x44, 0xee>(m[0], m[1]), m23 = largest_lanes<0x44, 0xee>(m[2], m[3]);
        __m512i top = largest_lanes<0x88, 0xdd>(m01, m23); // lane i: eight words of tile i
        top = _mm512_max_epu16(top, _mm512_shuffle_epi32(top, _MM_PERM_BADC));
        top = _mm512_max_epu16(top, _mm512_shuffle_epi32(top, _MM_PERM_CDAB));
        const __m512 most = _mm512_cvtph_ps(_mm512_cvtepi64_epi32(top));
        const __mmask16 finite = _mm512_cmp_ps_mask(most, _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
        const __mmask16 live = _mm512_mask_cmp_ps_mask(finite, most, _mm512_setzero_ps(), _CMP_GT_OQ);
        const __m512 one = q4 ? _mm512_mul_ps(most, _mm512_set1_ps(8.0f / 127.0f)) : most;
        _mm512_store_ps(common[0], _mm512_mask_mov_ps(_mm512_set1_ps(NAN), finite, one));
        const float fixed = static_cast<float>(1 << (q4 ? gemm_requantize_shift_q4 : gemm_requantize_shift_q8));
        // a power of two: no other rounding than that of the quotient
        const __m512 factor = _mm512_mul_ps(_mm512_maskz_div_ps(live, _mm512_set1_ps(1), one), _mm512_set1_ps(fixed));
        ratios[0] = ratios_of(scales + 0 * distance, _mm512_shuffle_f32x4(factor, factor, 0x00));
        ratios[1] = ratios_of(scales + 1 * distance, _mm512_shuffle_f32x4(factor, factor, 0x55));
        ratios[2] = ratios_of(scales + 2 * distance, _mm512_shuffle_f32x4(factor, factor, 0xaa));
        ratios[3] = ratios_of(scales + 3 * distance, _mm512_shuffle_f32x4(factor, factor, 0xff));
    }

  private:
    template <int low, int high> static __m512i largest_lanes(__m512i a, __m512i b) {
        return _mm512_max_epu16(_mm512_shuffle_i32x4(a, b, low), _mm512_shuffle_i32x4(a, b, high));
    }
    // Where the factor is 0 the scale may be no number: that converts to 0x80000000, whose low half is 0.
    static __m512i ratios_of(const uint8_t * scales, __m512 factor) {
        const __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(unit::load_halves(scales), factor));
        const __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(unit::load_halves(scales + 32), factor));
        return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(low)), _mm512_cvtepi32_epi16(high), 1);
    }
};

// What the formats share. Scales are found a group of tiles ahead: the chain of instructions is long, and runs beside
// the products of the tiles before.
template <uint32_t type> struct tile_format {
    static constexpr bool streams = true, has_minima = false;
    static constexpr tile_traits traits = tile_of(type);
    static constexpr size_t bytes = traits.bytes;
    static constexpr int32_t offset = 128;

    void open(const uint8_t * first, int64_t t, int64_t k_tiles) {
        if (t == 0) find(first, 0, k_tiles);
        if (t % tiles_at_once == 0) find(first + tiles_at_once * bytes, t + tiles_at_once, k_tiles);
        at = t;
    }
    __m512 scales(const uint8_t *, int h) const {
        __m512 s = _mm512_set1_ps(of(at).common[at % tiles_at_once][h]);
        // GCC would see that all lanes are equal, multiply scalars, and broadcast once per row
        asm("" : "+v"(s));
        return s;
    }

  protected:
    int64_t at = 0;

    const common_scales & of(int64_t t) const { return found[t / tiles_at_once & 1]; }

  private:
    common_scales found[2];

    // Out of line: inlined, GCC writes the products' sums to the stack.
    __attribute__((noinline)) void find(const uint8_t * first, int64_t t, int64_t k_tiles) {
        const int n = static_cast<int>(std::min<int64_t>(tiles_at_once, k_tiles - t));
        if (n > 0) found[t / tiles_at_once & 1].find(first + traits.quants, bytes, n, traits.source == TB_Q4_0);
    }
};

// Q4_0_TILE and IQ4_NL_TILE.
template <uint32_t type> struct format_nibbles_tile : tile_format<type> {
    using base = tile_format<type>;
    static constexpr bool nonlinear = base::traits.source == TB_IQ4_NL;

    void open(const uint8_t * tile, int64_t t, int64_t k_tiles) {
        base::open(tile, t, k_tiles);
        if (t == 0) make_tables(0);
        if (t % tiles_at_once == 2 && t + 2 < k_tiles) make_tables(t + 2);
    }
    void weights(const uint8_t * tile, int h, __m512i * w) const {
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            // loads with a broadcast leave the ports of the shuffles free
            const auto table = [&](int i) {
                const uint8_t * values = tables[base::at % ring][h][c][i];
                return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i *>(values)));
            };
            const __m512i v = unit::load(tile + 128 * c + 64 * h);
            const __m512i low = unit::low_nibbles(v), high = unit::high_nibbles(v);
            w[2 * c] = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(table(0), low), odd_bytes, table(1), low);
            w[2 * c + 1] = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(table(2), high), odd_bytes, table(3), high);
        }
    }

  private:
    static constexpr int ring = 2 * tiles_at_once;
    alignas(64) uint8_t tables[ring][2][4][4][16]; // [tile][half][c][row pair of the chunk][nibble]

    // Of the group of tiles that begins with tile t.
    __attribute__((noinline)) void make_tables(int64_t t) {
        const common_scales & s = base::of(t);
        // lane p: eight times the word of row pair p, column half 0
        const __m512i pair = _mm512_setr_epi32(0, 0, 0, 0, 0x20002, 0x20002, 0x20002, 0x20002, 0x40004, 0x40004,
                                               0x40004, 0x40004, 0x60006, 0x60006, 0x60006, 0x60006);
        // the values in fixed point: 16 times a Q4_0 quant, twice an IQ4_NL value
        const __m512i low =
            _mm512_broadcast_i32x4(nonlinear ? _mm_setr_epi16(-254, -208, -166, -130, -98, -70, -44, -20)
                                             : _mm_setr_epi16(-128, -112, -96, -80, -64, -48, -32, -16));
        const __m512i high = _mm512_broadcast_i32x4(nonlinear ? _mm_setr_epi16(2, 26, 50, 76, 106, 138, 178, 226)
                                                              : _mm_setr_epi16(0, 16, 32, 48, 64, 80, 96, 112));
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
#pragma GCC unroll 4
            for (int c = 0; c < 4; c++) {
                const __m512i words = _mm512_add_epi16(pair, _mm512_set1_epi16(static_cast<int16_t>(8 * c + h)));
#pragma GCC unroll 4
                for (int i = 0; i < tiles_at_once; i++) {
                    const __m512i r = _mm512_permutexvar_epi16(words, s.ratios[i]);
                    const __m512i v = _mm512_packs_epi16(_mm512_mulhrs_epi16(low, r), _mm512_mulhrs_epi16(high, r));
                    _mm512_store_si512(tables[t % ring + i][h][c], unit::flip_signs(v));
                }
            }
        }
    }
};

struct format_q8_tile : tile_format<TB_Q8_0_TILE> {
    void weights(const uint8_t * tile, int h, __m512i * w) const {
        const int16_t * ratios = reinterpret_cast<const int16_t *>(&of(at).ratios[at % tiles_at_once]);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            const __m512i v = unit::load(tile + 128 * j + 64 * h);
            // even bytes belong to row pair 2j, odd ones to 2j + 1; each becomes twice its value in 16 bits
            const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 7);
            const __m512i odd =
                _mm512_srai_epi16(_mm512_and_si512(v, _mm512_set1_epi16(static_cast<int16_t>(0xff00))), 7);
            const __m512i e = _mm512_mulhrs_epi16(even, _mm512_set1_epi16(ratios[4 * j + h]));
            const __m512i o = _mm512_mulhrs_epi16(odd, _mm512_set1_epi16(ratios[4 * j + 2 + h]));
            w[j] = unit::flip_signs(_mm512_mask_mov_epi8(e, odd_bytes, _mm512_slli_epi16(o, 8)));
        }
    }
};

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_AVX512VNNI_TILE_GROUPS_H
