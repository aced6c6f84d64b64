// Integer GEMM on vpmaddubsw: 4 rows x 16 columns at a time, each 32-bit lane four k of one column.
//
// vpmaddubsw adds two products into 16 bits with saturation. Nibbles are safe: 15 * 127 * 2 = 3810, and the eight quads
// of 32 k together stay at 30480, so widening happens once per tile; with five bits, 31 * 127 * 2 = 7874, once per four
// quads. Signed bytes go in as |w| and a * sign(w):
// 128 * 127 * 2 = 32512 does not saturate, but each quad must be widened by itself.
#include "kernels/kernels.h"

#include <immintrin.h>

#include "kernels/avx2/lanes.h"
#include "kernels/gemm_tiles.h"

namespace tb::npu {

void fill_gemm_avx2_float(gemm_kernels & k);
void fill_gemm_avx2_convert(gemm_kernels & k);
void fill_gemm_avx2_k(gemm_kernels & k);

namespace {

__m256i widen_pairs(__m256i v) { return _mm256_madd_epi16(v, _mm256_set1_epi16(1)); }

// Quads whose products are summed in 16 bits; 1: each is widened by itself. Of few bits not eight, whose shifts the
// compiler would not know.
template <class Format> constexpr int narrow = Format::packed ? 4 : 1;

struct unit : lanes {
    static constexpr int rows = 4; // at a time
    static constexpr int32_t byte_offset = 0;
    // One row has registers for all columns, where quants take few steps: memory is read in order, activations once.
    template <class Format> static constexpr int vectors(int n) {
        return n == 1 && narrow<Format> != 4 ? gemm_panel / width : 2;
    }

    template <class Format, class Source, int block_rows>
    static void block(const uint8_t * tile, int first, const tile_rows & at);
};

using format_q4 = tile_q4<unit>;
using format_q8 = tile_q8<unit>;
using format_iq4nl = tile_iq4nl<unit>;
using format_prepared = tile_prepared<unit>;
using format_mxfp4 = tile_mxfp4<unit>;
using format_nvfp4 = tile_nvfp4<unit>;
template <uint32_t type> using format_bits = tile_bits<unit, type>;
template <uint32_t type> using format_few_bits = tile_few_bits<unit, type>;

template <> constexpr int narrow<format_q4> = 8;
template <> constexpr int narrow<format_bits<TB_Q4_1_COL>> = 8;
template <> constexpr int narrow<format_iq4nl> = 1;

// Quads 2 * c and 2 * c + 1 of some vectors of columns times those of `n` rows, added to 16 bits or 32.
template <class Format, class Source, int n, int vectors>
__attribute__((always_inline)) inline void add_chunk(const uint8_t * tile, int c, int first, const uint8_t * q,
                                                     __m256i (&sum)[n][vectors]) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        __m256i w[vectors], u[vectors];
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) {
            w[i] = Source::weights(tile, c, h, first + i);
            u[i] = _mm256_abs_epi8(w[i]);
        }
#pragma GCC unroll 4
        for (int m = 0; m < n; m++) {
            const __m256i a = unit::broadcast(read_int(q + 32 * m + 4 * h));
#pragma GCC unroll 4
            for (int i = 0; i < vectors; i++) {
                if constexpr (narrow<Format> > 1) {
                    sum[m][i] = _mm256_add_epi16(sum[m][i], _mm256_maddubs_epi16(w[i], a));
                } else {
                    const __m256i p = _mm256_maddubs_epi16(u[i], _mm256_sign_epi8(a, w[i]));
                    sum[m][i] = _mm256_add_epi32(sum[m][i], widen_pairs(p));
                }
                asm("" : "+x"(sum[m][i])); // keeps the order of additions: in another one they need more registers
            }
        }
    }
}

// A tile's dot products in 32 bits; of formats with two scales those of the first 16 k, and of the others in `second`.
template <class Format, class Source, int n, int vectors>
__attribute__((always_inline)) inline void dot_products(const uint8_t * tile, int first, const uint8_t * q,
                                                        __m256i (&sum)[n][vectors], __m256i (&second)[n][vectors]) {
    const auto each = [&](auto && f) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int m = 0; m < n; m++) {
#pragma GCC unroll 4
            for (int i = 0; i < vectors; i++)
                f(m, i);
        }
    };
    each([&](int m, int i) { sum[m][i] = _mm256_setzero_si256(); });
    if constexpr (narrow<Format> == 4) {
        add_chunk<Format, Source>(tile, 0, first, q, sum);
        add_chunk<Format, Source>(tile, 1, first, q + 8, sum);
        each([&](int m, int i) {
            second[m][i] = widen_pairs(sum[m][i]);
            sum[m][i] = _mm256_setzero_si256();
        });
        add_chunk<Format, Source>(tile, 2, first, q + 16, sum);
        add_chunk<Format, Source>(tile, 3, first, q + 24, sum);
        each([&](int m, int i) {
            const __m256i first_half = second[m][i];
            second[m][i] = widen_pairs(sum[m][i]);
            sum[m][i] = has_halves<Format> ? first_half : _mm256_add_epi32(first_half, second[m][i]);
        });
    } else {
#pragma GCC unroll 1
        for (int c = 0; c < 4; c++, q += 8)
            add_chunk<Format, Source>(tile, c, first, q, sum);
        if constexpr (narrow<Format> == 8) each([&](int m, int i) { sum[m][i] = widen_pairs(sum[m][i]); });
    }
}

template <class Format, class Source, int block_rows>
__attribute__((noinline)) void unit::block(const uint8_t * tile, int first, const tile_rows & at) {
    constexpr int n = block_rows, count = vectors<Format>(block_rows);
    __m256i sum[n][count], second[n][count];
    dot_products<Format, Source>(tile, first, at.q, sum, second);
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) {
        const __m256 scale = Source::scales(tile, first + i);
        __m256 least;
        if constexpr (Format::has_minima || has_halves<Format>) least = Source::minima(tile, first + i);
#pragma GCC unroll 4
        for (int m = 0; m < n; m++) {
            __m256i dot = sum[m][i];
            const __m256 s = unit::broadcast(read_float(at.scales + 4 * m));
            float * to = at.sums[m] + 8 * (first + i);
            if constexpr (has_halves<Format>) {
                const auto add = [&](__m256i part, int h, __m256 of_part) {
                    const int32_t start = -Format::offset * sum_of_16(at.q + 32 * m + 16 * h);
                    const __m256 x = _mm256_cvtepi32_ps(_mm256_add_epi32(part, _mm256_set1_epi32(start)));
                    store_floats(to, _mm256_fmadd_ps(x, _mm256_mul_ps(of_part, s), load_floats(to)));
                };
                add(dot, 0, scale);
                add(second[m][i], 1, least);
            } else if constexpr (Format::has_minima) {
                const __m256 start = _mm256_cvtepi32_ps(unit::broadcast(read_int(at.starts + 4 * m)));
                const __m256 x = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, _mm256_mul_ps(least, start));
                store_floats(to, _mm256_fmadd_ps(x, s, load_floats(to)));
            } else {
                if constexpr (Format::offset != 0)
                    dot = _mm256_add_epi32(unit::broadcast(read_int(at.starts + 4 * m)), dot);
                store_floats(to, _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_mul_ps(scale, s), load_floats(to)));
            }
        }
    }
}

template <class Format> gemm_int8 kernel(const char * name) {
    return {name, gemm_max_rows, Format::offset, multiply_tiles<unit, Format>};
}

} // namespace

void fill_avx2(kernel_table & t) {
    TILEBEAM_COLUMN_KERNELS(t.gemm, "4x16_avx2");
    fill_gemm_avx2_float(t.gemm);
    fill_gemm_avx2_convert(t.gemm);
    fill_gemm_avx2_k(t.gemm);
    fill_attention_avx2(t.attention);
    fill_vec_avx2(t.vec);
}

} // namespace tb::npu
