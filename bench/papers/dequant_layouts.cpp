// 4-bit weights in several layouts to FP16 tiles in HMX order, for bench/dequant_layouts.py. Compiled for this CPU when
// the bench runs.
//
// A tile is 32 (k) x 32 (n) numbers, element (k, n) at (k / 2) * 64 + 2 n + k % 2. Tiles of a matrix come in order;
// tile i is written to out + i % ring * 1024.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "tilebeam/types.h"

#if defined(__AVX512BW__) && defined(__AVX512VL__)
#    include <immintrin.h>
#    define WIDE 1
#else
#    define WIDE 0
#endif

namespace {

constexpr int tile_elements = TB_TILE_K * TB_TILE_N;
constexpr size_t quant_bytes = TB_QUANTS(4), tile_bytes = quant_bytes + TB_HALF_SCALES;

float from_half(const uint8_t * p) {
    _Float16 h;
    std::memcpy(&h, p, 2);
    return static_cast<float>(h);
}

#if WIDE
// 16 signed words times scales, as FP16.
__m256i scaled(__m256i q, __m512 scale) {
    return _mm512_cvtps_ph(_mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(q)), scale),
                           _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// 32 words from 0 to 15, less 8, times two vectors of scales.
__m512i scaled(__m512i nibbles, __m512 low, __m512 high) {
    const __m512i q = _mm512_sub_epi16(nibbles, _mm512_set1_epi16(8));
    return _mm512_inserti64x4(_mm512_castsi256_si512(scaled(_mm512_castsi512_si256(q), low)),
                              scaled(_mm512_extracti64x4_epi64(q, 1), high), 1);
}

// The 32 nibbles of a ggml block, low ones first, as words.
__m512i words_of_block(const uint8_t * quants) {
    const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i *>(quants));
    const __m128i mask = _mm_set1_epi8(15);
    const __m256i low = _mm256_cvtepu8_epi16(_mm_and_si128(v, mask));
    const __m256i high = _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16(v, 4), mask));
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// Elements 64 * row on of a tile in Tilebeam's quad order: row pair `row`.
__m512i words_of_row(const uint8_t * tile, int row, int half) {
    const __m512i v = _mm512_loadu_si512(tile + 128 * (row / 4) + 64 * half);
    const int shift = (row & 1) * 8 + (row & 2) * 2;
    return _mm512_and_si512(_mm512_srli_epi16(v, static_cast<unsigned>(shift)), _mm512_set1_epi16(15));
}
#else
int nibble_of_block(const uint8_t * quants, int i) { return i < 16 ? quants[i] & 15 : quants[i - 16] >> 4; }

int nibble_of_row(const uint8_t * tile, int row, int i) {
    return tile[128 * (row / 4) + 2 * i + (row & 1)] >> (row & 2) * 2 & 15;
}
#endif

} // namespace

extern "C" {

// Rows of ggml blocks along k, one row per column n of the panel: 32 * k_tiles blocks of 18 bytes, row by row.
void tb_conventional(const uint8_t * in, uint16_t * out, size_t k_tiles, size_t panels, size_t ring) {
    for (size_t i = 0; i < k_tiles * panels; i++) {
        const uint8_t * panel = in + i / k_tiles * k_tiles * 32 * 18;
        uint16_t * to = out + i % ring * tile_elements;
        for (size_t n = 0; n < 32; n++) {
            const uint8_t * block = panel + (n * k_tiles + i % k_tiles) * 18;
#if WIDE
            const __m512 d = _mm512_set1_ps(from_half(block));
            const __m512i rows =
                _mm512_setr_epi32(0, 32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448, 480);
            _mm512_i32scatter_epi32(to + 2 * n, rows, scaled(words_of_block(block + 2), d, d), 4);
#else
            const float d = from_half(block);
            for (int k = 0; k < 32; k++) {
                const _Float16 x = static_cast<_Float16>(static_cast<float>(nibble_of_block(block + 2, k) - 8) * d);
                std::memcpy(to + k / 2 * 64 + 2 * n + k % 2, &x, 2);
            }
#endif
        }
    }
}

// Groups of 2 (k) x 16 (n): 32 ggml blocks per tile, each 32 consecutive elements of it.
void tb_groups(const uint8_t * in, uint16_t * out, size_t k_tiles, size_t panels, size_t ring) {
    for (size_t i = 0; i < k_tiles * panels; i++) {
        uint16_t * to = out + i % ring * tile_elements;
        for (int g = 0; g < 32; g++, in += 18) {
#if WIDE
            const __m512 d = _mm512_set1_ps(from_half(in));
            _mm512_storeu_si512(to + 32 * g, scaled(words_of_block(in + 2), d, d));
#else
            const float d = from_half(in);
            for (int k = 0; k < 32; k++) {
                const _Float16 x = static_cast<_Float16>(static_cast<float>(nibble_of_block(in + 2, k) - 8) * d);
                std::memcpy(to + 32 * g + k, &x, 2);
            }
#endif
        }
    }
}

// The same groups, eight in a super-block: FP16 scales[8], then 128 bytes of nibbles, four row pairs in quad order.
void tb_coalesced(const uint8_t * in, uint16_t * out, size_t k_tiles, size_t panels, size_t ring) {
    for (size_t i = 0; i < k_tiles * panels; i++) {
        uint16_t * to = out + i % ring * tile_elements;
        for (int c = 0; c < 4; c++, in += 144, to += 256) {
            for (int row = 0; row < 4; row++) {
                for (int half = 0; half < 2; half++) {
#if WIDE
                    const __m512 d = _mm512_set1_ps(from_half(in + 4 * row + 2 * half));
                    _mm512_storeu_si512(to + 64 * row + 32 * half, scaled(words_of_row(in + 16, row, half), d, d));
#else
                    const float d = from_half(in + 4 * row + 2 * half);
                    for (int k = 0; k < 32; k++) {
                        const int q = nibble_of_row(in + 16, row, 32 * half + k) - 8;
                        const _Float16 x = static_cast<_Float16>(static_cast<float>(q) * d);
                        std::memcpy(to + 64 * row + 32 * half + k, &x, 2);
                    }
#endif
                }
            }
        }
    }
}

// Tilebeam's tiles, one scale per column: nibbles in quad order, FP16 scales[32].
void tb_column(const uint8_t * in, uint16_t * out, size_t k_tiles, size_t panels, size_t ring) {
    for (size_t i = 0; i < k_tiles * panels; i++, in += tile_bytes) {
        uint16_t * to = out + i % ring * tile_elements;
#if WIDE
        __m512 d[4]; // each column's scale twice: for both rows of a pair
        for (int j = 0; j < 4; j++) {
            const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i *>(in + quant_bytes + 16 * j));
            d[j] = _mm512_cvtph_ps(_mm256_set_m128i(_mm_unpackhi_epi16(half, half), _mm_unpacklo_epi16(half, half)));
        }
        for (int row = 0; row < 16; row++) {
            _mm512_storeu_si512(to + 64 * row, scaled(words_of_row(in, row, 0), d[0], d[1]));
            _mm512_storeu_si512(to + 64 * row + 32, scaled(words_of_row(in, row, 1), d[2], d[3]));
        }
#else
        float d[32];
        for (int n = 0; n < 32; n++)
            d[n] = from_half(in + quant_bytes + 2 * n);
        for (int row = 0; row < 16; row++) {
            for (int e = 0; e < 64; e++) {
                const _Float16 x = static_cast<_Float16>(static_cast<float>(nibble_of_row(in, row, e) - 8) * d[e / 2]);
                std::memcpy(to + 64 * row + e, &x, 2);
            }
        }
#endif
    }
}

// No dequantization: the tile's bytes as they are.
void tb_none(const uint8_t * in, uint16_t * out, size_t k_tiles, size_t panels, size_t ring) {
    for (size_t i = 0; i < k_tiles * panels; i++)
        std::memcpy(out + i % ring * tile_elements, in + tile_bytes * i, tile_bytes);
}

} // extern "C"
