// Integer GEMM on vpmaddubsw: 4 rows x 16 columns at a time, each 32-bit lane four k of one column.
//
// vpmaddubsw adds two products into 16 bits with saturation. Nibbles are safe: 15 * 127 * 2 = 3810, and the eight quads
// of 32 k together stay at 30480, so widening happens once per tile. Signed bytes go in as |w| and a * sign(w):
// 128 * 127 * 2 = 32512 does not saturate, but each quad must be widened by itself.
#include "kernels/gemm.h"

#include <cstring>
#include <immintrin.h>

namespace tb::npu {

void fill_gemm_avx2_float(gemm_kernels & k);
void fill_gemm_avx2_convert(gemm_kernels & k);

namespace {

constexpr int max_rows = 4;

__m256i load(const uint8_t * p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }

__m256i broadcast_int(const uint8_t * p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return _mm256_set1_epi32(v);
}

__m256 broadcast_float(const uint8_t * p) {
    float v;
    std::memcpy(&v, p, 4);
    return _mm256_set1_ps(v);
}

__m256i widen_pairs(__m256i v) { return _mm256_madd_epi16(v, _mm256_set1_epi16(1)); }

// Quad j of the 8 columns from 8 * g on, as nibbles.
__m256i nibbles(const uint8_t * tile, int j, int g) {
    const __m256i v = load(tile + 128 * (j / 2) + 32 * g);
    return _mm256_and_si256(j & 1 ? _mm256_srli_epi16(v, 4) : v, _mm256_set1_epi8(15));
}

__m256 half_scales(const uint8_t * p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))); }

struct format_q4 {
    static constexpr size_t bytes = 576;
    static constexpr int32_t offset = 8;
    static constexpr bool narrow = true; // products are summed in 16 bits over the whole tile
    static __m256i weights(const uint8_t * tile, int j, int g) { return nibbles(tile, j, g); }
    static __m256 scales(const uint8_t * tile, int g) { return half_scales(tile + 512 + 16 * g); }
};

struct format_iq4nl {
    static constexpr size_t bytes = 576;
    static constexpr int32_t offset = 0;
    static constexpr bool narrow = false;
    static __m256i weights(const uint8_t * tile, int j, int g) {
        const __m256i values = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113));
        return _mm256_shuffle_epi8(values, nibbles(tile, j, g));
    }
    static __m256 scales(const uint8_t * tile, int g) { return half_scales(tile + 512 + 16 * g); }
};

struct format_q8 {
    static constexpr size_t bytes = 1088;
    static constexpr int32_t offset = 0;
    static constexpr bool narrow = false;
    static __m256i weights(const uint8_t * tile, int j, int g) { return load(tile + 128 * j + 32 * g); }
    static __m256 scales(const uint8_t * tile, int g) { return half_scales(tile + 1024 + 16 * g); }
};

struct format_prepared {
    static constexpr size_t bytes = gemm_prepared_bytes;
    static constexpr int32_t offset = 0;
    static constexpr bool narrow = false;
    static __m256i weights(const uint8_t * tile, int j, int g) { return load(tile + 128 * j + 32 * g); }
    static __m256 scales(const uint8_t * tile, int g) {
        return _mm256_loadu_ps(reinterpret_cast<const float *>(tile + 1024 + 32 * g));
    }
};

// Columns 16 * h to 16 * h + 15 of one tile, added to acc[row][2 * h], acc[row][2 * h + 1].
template <class Format, int rows>
void tile_half(const uint8_t * tile, const uint8_t * record, int h, __m256 (*acc)[4]) {
    __m256i sum[rows][2];
#pragma GCC unroll 4
    for (int m = 0; m < rows; m++)
        sum[m][0] = sum[m][1] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        const __m256i w0 = Format::weights(tile, j, 2 * h), w1 = Format::weights(tile, j, 2 * h + 1);
        if (Format::narrow) {
#pragma GCC unroll 4
            for (int m = 0; m < rows; m++) {
                const __m256i a = broadcast_int(record + 32 * m + 4 * j);
                sum[m][0] = _mm256_add_epi16(sum[m][0], _mm256_maddubs_epi16(w0, a));
                sum[m][1] = _mm256_add_epi16(sum[m][1], _mm256_maddubs_epi16(w1, a));
            }
        } else {
            const __m256i u0 = _mm256_abs_epi8(w0), u1 = _mm256_abs_epi8(w1);
#pragma GCC unroll 4
            for (int m = 0; m < rows; m++) {
                const __m256i a = broadcast_int(record + 32 * m + 4 * j);
                const __m256i p0 = _mm256_maddubs_epi16(u0, _mm256_sign_epi8(a, w0));
                const __m256i p1 = _mm256_maddubs_epi16(u1, _mm256_sign_epi8(a, w1));
                sum[m][0] = _mm256_add_epi32(sum[m][0], widen_pairs(p0));
                sum[m][1] = _mm256_add_epi32(sum[m][1], widen_pairs(p1));
            }
        }
    }
    const __m256 scale0 = Format::scales(tile, 2 * h), scale1 = Format::scales(tile, 2 * h + 1);
#pragma GCC unroll 4
    for (int m = 0; m < rows; m++) {
        __m256i dot0 = sum[m][0], dot1 = sum[m][1];
        if (Format::narrow) {
            const __m256i start = broadcast_int(record + 36 * rows + 4 * m);
            dot0 = _mm256_add_epi32(start, widen_pairs(dot0));
            dot1 = _mm256_add_epi32(start, widen_pairs(dot1));
        }
        const __m256 s = broadcast_float(record + 32 * rows + 4 * m);
        acc[m][2 * h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot0), _mm256_mul_ps(scale0, s), acc[m][2 * h]);
        acc[m][2 * h + 1] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot1), _mm256_mul_ps(scale1, s), acc[m][2 * h + 1]);
    }
}

template <class Format, int rows> void block(const gemm_int8_args & a) {
    __m256 acc[rows][4];
    for (int m = 0; m < rows; m++) {
        for (int g = 0; g < 4; g++)
            acc[m][g] = a.add ? _mm256_loadu_ps(a.out[m] + 8 * g) : _mm256_setzero_ps();
    }
    const uint8_t * tile = a.panel;
    const uint8_t * record = a.group;
    for (int64_t t = 0; t < a.k_tiles; t++, tile += Format::bytes, record += gemm_record_bytes(rows)) {
        tile_half<Format, rows>(tile, record, 0, acc);
        tile_half<Format, rows>(tile, record, 1, acc);
    }
    for (int m = 0; m < rows; m++) {
        for (int g = 0; g < 4; g++)
            _mm256_storeu_ps(a.out[m] + 8 * g, acc[m][g]);
    }
}

template <class Format> void run(const gemm_int8_args & a) {
    switch (a.rows) {
    case 1:
        return block<Format, 1>(a);
    case 2:
        return block<Format, 2>(a);
    case 3:
        return block<Format, 3>(a);
    default:
        return block<Format, 4>(a);
    }
}

template <class Format> gemm_int8 kernel(const char * name) { return {name, max_rows, Format::offset, run<Format>}; }

} // namespace

void fill_gemm_avx2(gemm_kernels & k) {
    k.int8[gemm_q4] = kernel<format_q4>("gemm_q4c_4x16_avx2");
    k.int8[gemm_q8] = kernel<format_q8>("gemm_q8c_4x16_avx2");
    k.int8[gemm_iq4nl] = kernel<format_iq4nl>("gemm_nlc_4x16_avx2");
    k.int8[gemm_prepared] = kernel<format_prepared>("gemm_q8p_4x16_avx2");
    k.coarse = {};
    fill_gemm_avx2_float(k);
    fill_gemm_avx2_convert(k);
}

} // namespace tb::npu
