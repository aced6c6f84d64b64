// What stands around the integer GEMM: activation quantization, `tile` grouping to int8, tiles to FP16 values. Each
// returns the portable version's bits, prepared quants plus the bias.
#include "kernels/avx512vnni/unit.h"
#include "kernels/gemm_vnni.h"

#include <cmath>
#include <cstring>
#include <immintrin.h>

namespace tb::npu {

namespace {

__m512i quad_order() {
    // within each four: 0, 2, 1, 3
    return _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
}

__m512 halves_to_float(const uint8_t * p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
}

__m512 finite_abs(__m512 x, __mmask16 * finite) {
    const __m512 magnitude = _mm512_abs_ps(x);
    *finite = static_cast<__mmask16>(*finite & _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(INFINITY), _CMP_LT_OQ));
    return magnitude;
}

void quantize(const float * x, int64_t k_tiles, int32_t offset, uint8_t * group, int rows, int row) {
    const __m128i order = _mm512_castsi512_si128(quad_order());
    for (int64_t t = 0; t < k_tiles; t++, x += 32) {
        uint8_t * record = group + t * gemm_record_bytes(rows);
        const __m512 x0 = _mm512_loadu_ps(x), x1 = _mm512_loadu_ps(x + 16);
        __mmask16 finite = 0xffff;
        const float amax = _mm512_reduce_max_ps(_mm512_max_ps(finite_abs(x0, &finite), finite_abs(x1, &finite)));
        __m128i q0 = _mm_setzero_si128(), q1 = q0;
        float scale = NAN;
        int32_t sum = 0;
        if (finite == 0xffff) {
            scale = 0;
            if (amax >= gemm_least_amax) {
                scale = amax / 127.0f;
                const __m512 inverse = _mm512_set1_ps(127.0f / amax);
                const __m512i i0 = _mm512_cvtps_epi32(_mm512_mul_ps(x0, inverse));
                const __m512i i1 = _mm512_cvtps_epi32(_mm512_mul_ps(x1, inverse));
                sum = _mm512_reduce_add_epi32(_mm512_add_epi32(i0, i1));
                q0 = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(i0), order);
                q1 = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(i1), order);
            }
        }
        const int32_t start = -offset * sum;
        _mm_storeu_si128(reinterpret_cast<__m128i *>(record + 32 * row), q0);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(record + 32 * row + 16), q1);
        std::memcpy(record + 32 * rows + 4 * row, &scale, 4);
        std::memcpy(record + 36 * rows + 4 * row, &start, 4);
    }
}

// The scales of one tile: each row pair's and column half's fixed-point ratio to the half's common scale (see gemm.h),
// in the tile's order: word 2 * pair + half.
struct tile_scales {
    __m512i ratios;
    float common[2];
};

// The largest of the eight words that `mask` does not cover.
unsigned largest(__m128i words, __m128i mask) {
    const __m128i least = _mm_minpos_epu16(_mm_or_si128(_mm_xor_si128(words, _mm_set1_epi16(-1)), mask));
    return 0xffff & ~static_cast<unsigned>(_mm_cvtsi128_si32(least));
}

// `q4`: quants reach 8, so that the common scale is a fraction of the largest; else they reach 127.
tile_scales common_scales(const uint8_t * p, bool q4) {
    // magnitudes of FP16 numbers compare as integers, and what is not finite is above all others
    const __m512i magnitude = _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi16(0x7fff));
    const __m256i max16 = _mm256_max_epu16(_mm512_castsi512_si256(magnitude), _mm512_extracti64x4_epi64(magnitude, 1));
    const __m128i max8 = _mm_max_epu16(_mm256_castsi256_si128(max16), _mm256_extracti128_si256(max16, 1));
    const unsigned top[2] = {largest(max8, _mm_set1_epi32(static_cast<int>(0xffff0000))),
                             largest(max8, _mm_set1_epi32(0xffff))};
    constexpr unsigned infinity = 0x7c00;
    const __m128 smax = _mm_cvtph_ps(_mm_set1_epi32(static_cast<int>(top[0] | top[1] << 16)));
    const __m128 common = q4 ? _mm_mul_ps(smax, _mm_set1_ps(8.0f / 127.0f)) : smax;
    const __m128 unit_ratio =
        _mm_set1_ps(static_cast<float>(1 << (q4 ? gemm_requantize_shift_q4 : gemm_requantize_shift_q8)));
    // lanes: half 0, half 1, half 0, half 1
    const __mmask8 live =
        static_cast<__mmask8>((top[0] - 1 < infinity - 1 ? 5 : 0) | (top[1] - 1 < infinity - 1 ? 10 : 0));
    const __m128 inverse = _mm_maskz_div_ps(live, _mm_set1_ps(1), common);
    const __m512 factor = _mm512_broadcast_f32x4(inverse), shift = _mm512_set1_ps(_mm_cvtss_f32(unit_ratio));
    const __mmask16 lanes = static_cast<__mmask16>((live & 3) * 0x5555);
    const __m512i low =
        _mm512_maskz_cvtps_epi32(lanes, _mm512_mul_ps(_mm512_mul_ps(halves_to_float(p), factor), shift));
    const __m512i high =
        _mm512_maskz_cvtps_epi32(lanes, _mm512_mul_ps(_mm512_mul_ps(halves_to_float(p + 32), factor), shift));
    tile_scales r;
    r.ratios = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(low)), _mm512_cvtepi32_epi16(high), 1);
    r.common[0] = top[0] < infinity ? _mm_cvtss_f32(common) : NAN;
    r.common[1] = top[1] < infinity ? _mm_cvtss_f32(_mm_movehdup_ps(common)) : NAN;
    return r;
}

constexpr __mmask64 odd_bytes = 0xaaaaaaaaaaaaaaaaULL;

// As this set's kernel for prepared tiles wants them (gemm_kernels.bias).
__m512i biased(__m512i w) { return _mm512_xor_si512(w, _mm512_set1_epi8(static_cast<char>(0x80))); }

// 4 bit: each row pair has a 16-entry table of its requantized values. Four tables at once, one per 128-bit lane, of
// the words that `words` names: its first 8 entries come from one product, the rest from the other.
template <bool nonlinear> __m512i four_tables(__m512i ratios, __m512i words) {
    // the values in fixed point: 16 times a Q4_0 quant, twice an IQ4_NL value
    const __m512i low = _mm512_broadcast_i32x4(nonlinear ? _mm_setr_epi16(-254, -208, -166, -130, -98, -70, -44, -20)
                                                         : _mm_setr_epi16(-128, -112, -96, -80, -64, -48, -32, -16));
    const __m512i high = _mm512_broadcast_i32x4(nonlinear ? _mm_setr_epi16(2, 26, 50, 76, 106, 138, 178, 226)
                                                          : _mm_setr_epi16(0, 16, 32, 48, 64, 80, 96, 112));
    const __m512i r = _mm512_permutexvar_epi16(words, ratios);
    return biased(_mm512_packs_epi16(_mm512_mulhrs_epi16(low, r), _mm512_mulhrs_epi16(high, r)));
}

// What a tile's quants need: for nibbles a table each, [half][c][row pair of the chunk][value].
struct prepared_scales {
    tile_scales s;
    alignas(64) uint8_t tables[2][4][4][16];
};

template <bool nonlinear> void make_tables(prepared_scales & p) {
    // lane i: eight times the word of row pair i, column half 0
    const __m512i pair = _mm512_setr_epi32(0, 0, 0, 0, 0x20002, 0x20002, 0x20002, 0x20002, 0x40004, 0x40004, 0x40004,
                                           0x40004, 0x60006, 0x60006, 0x60006, 0x60006);
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            const __m512i words = _mm512_add_epi16(pair, _mm512_set1_epi16(static_cast<int16_t>(8 * c + h)));
            _mm512_store_si512(p.tables[h][c], four_tables<nonlinear>(p.s.ratios, words));
        }
    }
}

void prepare_nibbles(const uint8_t * tile, const prepared_scales & p, uint8_t * out) {
    const __m512i nibble = _mm512_set1_epi8(15);
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            // loads with a broadcast leave the ports of the shuffles free
            const auto table = [&](int i) {
                return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i *>(p.tables[h][c][i])));
            };
            const __m512i v = _mm512_loadu_si512(tile + 128 * c + 64 * h);
            const __m512i low = _mm512_and_si512(v, nibble), high = _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble);
            const __m512i first = _mm512_shuffle_epi8(table(0), low), second = _mm512_shuffle_epi8(table(2), high);
            _mm512_storeu_si512(out + 256 * c + 64 * h, _mm512_mask_shuffle_epi8(first, odd_bytes, table(1), low));
            _mm512_storeu_si512(out + 256 * c + 128 + 64 * h,
                                _mm512_mask_shuffle_epi8(second, odd_bytes, table(3), high));
        }
        _mm512_storeu_ps(out + 1024 + 64 * h, _mm512_set1_ps(p.s.common[h]));
    }
}

// Byte `position` of each 32-bit lane, sign extended, as float.
template <int position> __m512 signed_byte(__m512i v) {
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 24 - 8 * position), 24));
}

void prepare_q8(const uint8_t * tile, const tile_scales & s, uint8_t * out) {
    alignas(64) int16_t ratios[32];
    _mm512_store_si512(ratios, s.ratios);
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            const __m512i v = _mm512_loadu_si512(tile + 128 * j + 64 * h);
            // even bytes belong to row pair 2j, odd ones to 2j + 1; each becomes twice its value in 16 bits
            const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 7);
            const __m512i odd =
                _mm512_srai_epi16(_mm512_and_si512(v, _mm512_set1_epi16(static_cast<int16_t>(0xff00))), 7);
            const __m512i e = _mm512_mulhrs_epi16(even, _mm512_set1_epi16(ratios[4 * j + h]));
            const __m512i o = _mm512_mulhrs_epi16(odd, _mm512_set1_epi16(ratios[4 * j + 2 + h]));
            const __m512i bytes = _mm512_mask_mov_epi8(e, odd_bytes, _mm512_slli_epi16(o, 8));
            _mm512_storeu_si512(out + 128 * j + 64 * h, biased(bytes));
        }
        _mm512_storeu_ps(out + 1024 + 64 * h, _mm512_set1_ps(s.common[h]));
    }
}

// Scales and tables first: their long chains of dependent instructions overlap only among themselves.
template <uint32_t type> void prepare_panel(const uint8_t * panel, int64_t k_tiles, uint8_t * out) {
    constexpr size_t quants = type == TB_Q8_0_TILE ? 1024 : 512, bytes = quants + 64;
    prepared_scales scales[gemm_piece_tiles];
    for (int64_t first = 0; first < k_tiles; first += gemm_piece_tiles, panel += gemm_piece_tiles * bytes) {
        const int n = static_cast<int>(k_tiles - first < gemm_piece_tiles ? k_tiles - first : gemm_piece_tiles);
        for (int t = 0; t < n; t++) {
            prefetch_piece<bytes>(panel + bytes * t);
            scales[t].s = common_scales(panel + bytes * t + quants, type == TB_Q4_0_TILE);
            if constexpr (type != TB_Q8_0_TILE) make_tables<type == TB_IQ4_NL_TILE>(scales[t]);
        }
        for (int t = 0; t < n; t++, out += gemm_prepared_bytes) {
            if constexpr (type == TB_Q8_0_TILE) {
                prepare_q8(panel + bytes * t, scales[t].s, out);
            } else {
                prepare_nibbles(panel + bytes * t, scales[t], out);
            }
        }
    }
}

void prepare(uint32_t type, const uint8_t * panel, int64_t k_tiles, uint8_t * out) {
    if (type == TB_Q8_0_TILE) {
        prepare_panel<TB_Q8_0_TILE>(panel, k_tiles, out);
    } else if (type == TB_Q4_0_TILE) {
        prepare_panel<TB_Q4_0_TILE>(panel, k_tiles, out);
    } else {
        prepare_panel<TB_IQ4_NL_TILE>(panel, k_tiles, out);
    }
}

__m512 rounded(__m512 x) { return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }

// The four k of one quad of 16 columns; quad order puts k 0, 2, 1, 3 at byte 0, 1, 2, 3.
void store_quad(__m512i bytes, __m512 scale0, __m512 scale1, float * out) {
    _mm512_storeu_ps(out, rounded(_mm512_mul_ps(signed_byte<0>(bytes), scale0)));
    _mm512_storeu_ps(out + 32, rounded(_mm512_mul_ps(signed_byte<2>(bytes), scale0)));
    _mm512_storeu_ps(out + 64, rounded(_mm512_mul_ps(signed_byte<1>(bytes), scale1)));
    _mm512_storeu_ps(out + 96, rounded(_mm512_mul_ps(signed_byte<3>(bytes), scale1)));
}

void dequantize(uint32_t type, const uint8_t * panel, int64_t k_tiles, float * out) {
    const bool q8 = type == TB_Q8_0_COL || type == TB_Q8_0_TILE;
    const bool column = type < TB_Q4_0_TILE;
    const bool nonlinear = type == TB_IQ4_NL_COL || type == TB_IQ4_NL_TILE;
    const size_t quants = q8 ? 1024 : 512;
    const __m512i nibble = _mm512_set1_epi8(15);
    const __m512i values = _mm512_broadcast_i32x4(
        nonlinear ? _mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
                  : _mm_setr_epi8(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7));
    for (int64_t t = 0; t < k_tiles; t++, panel += quants + 64, out += 1024) {
        alignas(64) float scale[32];
        _mm512_store_ps(scale, halves_to_float(panel + quants));
        _mm512_store_ps(scale + 16, halves_to_float(panel + quants + 32));
        for (int h = 0; h < 2; h++) {
            for (int j = 0; j < 8; j++) {
                __m512i w;
                if (q8) {
                    w = _mm512_loadu_si512(panel + 128 * j + 64 * h);
                } else {
                    const __m512i v = _mm512_loadu_si512(panel + 128 * (j / 2) + 64 * h);
                    w = _mm512_shuffle_epi8(values, _mm512_and_si512(j & 1 ? _mm512_srli_epi16(v, 4) : v, nibble));
                }
                // two row pairs: 2j and 2j + 1
                const __m512 s0 = column ? _mm512_load_ps(scale + 16 * h) : _mm512_set1_ps(scale[4 * j + h]);
                const __m512 s1 = column ? s0 : _mm512_set1_ps(scale[4 * j + 2 + h]);
                store_quad(w, s0, s1, out + 128 * j + 16 * h);
            }
        }
    }
}

void round_fp16(int64_t n, float * x) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        _mm512_storeu_ps(x + i, rounded(_mm512_loadu_ps(x + i)));
    if (i < n) {
        const __mmask16 tail = static_cast<__mmask16>((1u << (n - i)) - 1);
        _mm512_mask_storeu_ps(x + i, tail, rounded(_mm512_maskz_loadu_ps(tail, x + i)));
    }
}

} // namespace

void fill_gemm_avx512vnni_convert(gemm_kernels & k) {
    k.quantize = quantize;
    k.prepare = prepare;
    k.dequantize = dequantize;
    k.round_fp16 = round_fp16;
}

} // namespace tb::npu
