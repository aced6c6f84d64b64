// What stands around the integer GEMM: activation quantization, `tile` grouping to int8, tiles to FP16 values. Each
// returns the portable version's bits.
#include "kernels/gemm.h"

#include <cmath>
#include <cstring>
#include <immintrin.h>

namespace tb::npu {

namespace {

__m256i load(const uint8_t * p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }

void store(uint8_t * p, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), v); }

__m256 halves_to_float(const uint8_t * p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}

__m256 magnitude(__m256 x) { return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff))); }

__m256 is_finite(__m256 m) { return _mm256_cmp_ps(m, _mm256_set1_ps(INFINITY), _CMP_LT_OQ); }

float largest(__m256 v) {
    __m128 r = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    r = _mm_max_ps(r, _mm_movehl_ps(r, r));
    return _mm_cvtss_f32(_mm_max_ss(r, _mm_movehdup_ps(r)));
}

int32_t total(__m256i v) {
    __m128i r = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    r = _mm_add_epi32(r, _mm_shuffle_epi32(r, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(r, _mm_shuffle_epi32(r, 0xb1)));
}

void quantize(const float * x, int64_t k_tiles, int32_t offset, uint8_t * group, int rows, int row) {
    // packs leave the fours of 0..31 in the order 0, 2, 4, 6, 1, 3, 5, 7 (each 128-bit lane by itself)
    const __m256i fours = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i quad =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
    for (int64_t t = 0; t < k_tiles; t++, x += 32) {
        uint8_t * record = group + t * gemm_record_bytes(rows);
        __m256 v[4], max = _mm256_setzero_ps(), finite = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
        for (int i = 0; i < 4; i++) {
            v[i] = _mm256_loadu_ps(x + 8 * i);
            max = _mm256_max_ps(max, magnitude(v[i]));
            finite = _mm256_and_ps(finite, is_finite(magnitude(v[i])));
        }
        __m256i q = _mm256_setzero_si256();
        float scale = NAN;
        int32_t sum = 0;
        if (_mm256_movemask_ps(finite) == 0xff) {
            const float amax = largest(max);
            scale = 0;
            if (amax >= gemm_least_amax) {
                scale = amax / 127.0f;
                const __m256 inverse = _mm256_set1_ps(127.0f / amax);
                __m256i i32[4];
                for (int i = 0; i < 4; i++)
                    i32[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
                sum = total(_mm256_add_epi32(_mm256_add_epi32(i32[0], i32[1]), _mm256_add_epi32(i32[2], i32[3])));
                q = _mm256_packs_epi16(_mm256_packs_epi32(i32[0], i32[1]), _mm256_packs_epi32(i32[2], i32[3]));
                q = _mm256_shuffle_epi8(_mm256_permutevar8x32_epi32(q, fours), quad);
            }
        }
        const int32_t start = -offset * sum;
        store(record + 32 * row, q);
        std::memcpy(record + 32 * rows + 4 * row, &scale, 4);
        std::memcpy(record + 36 * rows + 4 * row, &start, 4);
    }
}

// One column half's 16 row pairs: their fixed-point ratios to the half's common scale, see gemm.h.
struct half_scales {
    alignas(32) int32_t ratio[16];
    float common;
};

// `q4`: quants reach 8, so that the common scale is a fraction of the largest; else they reach 127.
half_scales common_scale(const uint8_t * p, int h, bool q4) {
    float s[32];
    alignas(32) float own[16];
    for (int i = 0; i < 4; i++)
        _mm256_storeu_ps(s + 8 * i, halves_to_float(p + 16 * i));
    for (int v = 0; v < 16; v++)
        own[v] = s[2 * v + h];
    const __m256 a = _mm256_load_ps(own), b = _mm256_load_ps(own + 8);
    const __m256 finite = _mm256_and_ps(is_finite(magnitude(a)), is_finite(magnitude(b)));
    const bool good = _mm256_movemask_ps(finite) == 0xff;
    const float smax = largest(_mm256_max_ps(magnitude(a), magnitude(b)));
    half_scales r;
    r.common = !good ? NAN : q4 ? smax * (8.0f / 127.0f) : smax;
    const __m256 inverse = _mm256_set1_ps(good && smax > 0 ? 1.0f / r.common : 0.0f);
    const __m256 unit =
        _mm256_set1_ps(static_cast<float>(1 << (q4 ? gemm_requantize_shift_q4 : gemm_requantize_shift_q8)));
    __m256i * ratio = reinterpret_cast<__m256i *>(r.ratio);
    const __m256i zero = _mm256_setzero_si256();
    _mm256_store_si256(ratio, good ? _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_mul_ps(a, inverse), unit)) : zero);
    _mm256_store_si256(ratio + 1, good ? _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_mul_ps(b, inverse), unit)) : zero);
    return r;
}

// The requantized values of the 16 quants as bytes, in both lanes. In fixed point they are 16 times a Q4_0 quant, twice
// an IQ4_NL value.
template <bool nonlinear> __m256i quant_table(int32_t ratio) {
    const __m128i r = _mm_set1_epi16(static_cast<int16_t>(ratio));
    const __m128i low = nonlinear ? _mm_setr_epi16(-254, -208, -166, -130, -98, -70, -44, -20)
                                  : _mm_setr_epi16(-128, -112, -96, -80, -64, -48, -32, -16);
    const __m128i high =
        nonlinear ? _mm_setr_epi16(2, 26, 50, 76, 106, 138, 178, 226) : _mm_setr_epi16(0, 16, 32, 48, 64, 80, 96, 112);
    return _mm256_broadcastsi128_si256(_mm_packs_epi16(_mm_mulhrs_epi16(low, r), _mm_mulhrs_epi16(high, r)));
}

template <bool nonlinear> void prepare_nibbles(const uint8_t * tile, uint8_t * out) {
    const __m256i nibble = _mm256_set1_epi8(15), odd = _mm256_set1_epi16(static_cast<int16_t>(0xff00));
    for (int h = 0; h < 2; h++) {
        const half_scales s = common_scale(tile + 512, h, !nonlinear);
        for (int j = 0; j < 8; j++) {
            const __m256i table0 = quant_table<nonlinear>(s.ratio[2 * j]);
            const __m256i table1 = quant_table<nonlinear>(s.ratio[2 * j + 1]);
            for (int g = 0; g < 2; g++) {
                const __m256i v = load(tile + 128 * (j / 2) + 64 * h + 32 * g);
                const __m256i q = _mm256_and_si256(j & 1 ? _mm256_srli_epi16(v, 4) : v, nibble);
                store(out + 128 * j + 64 * h + 32 * g,
                      _mm256_blendv_epi8(_mm256_shuffle_epi8(table0, q), _mm256_shuffle_epi8(table1, q), odd));
            }
        }
        for (int g = 0; g < 2; g++) {
            store(out + 1024 + 64 * h + 32 * g, _mm256_castps_si256(_mm256_set1_ps(s.common)));
        }
    }
}

// Byte `position` of each 32-bit lane, sign extended, as float.
template <int position> __m256 signed_byte(__m256i v) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(v, 24 - 8 * position), 24));
}

void prepare_q8(const uint8_t * tile, uint8_t * out) {
    const __m256i high_bytes = _mm256_set1_epi16(static_cast<int16_t>(0xff00));
    for (int h = 0; h < 2; h++) {
        const half_scales s = common_scale(tile + 1024, h, false);
        for (int j = 0; j < 8; j++) {
            const __m256i r0 = _mm256_set1_epi16(static_cast<int16_t>(s.ratio[2 * j]));
            const __m256i r1 = _mm256_set1_epi16(static_cast<int16_t>(s.ratio[2 * j + 1]));
            for (int g = 0; g < 2; g++) {
                const __m256i v = load(tile + 128 * j + 64 * h + 32 * g);
                // even bytes belong to row pair 2j, odd ones to 2j + 1; each becomes twice its value in 16 bits
                const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 7);
                const __m256i odd = _mm256_srai_epi16(_mm256_and_si256(v, high_bytes), 7);
                store(out + 128 * j + 64 * h + 32 * g,
                      _mm256_blendv_epi8(_mm256_mulhrs_epi16(even, r0),
                                         _mm256_slli_epi16(_mm256_mulhrs_epi16(odd, r1), 8), high_bytes));
            }
        }
        for (int g = 0; g < 2; g++) {
            store(out + 1024 + 64 * h + 32 * g, _mm256_castps_si256(_mm256_set1_ps(s.common)));
        }
    }
}

void prepare(uint32_t type, const uint8_t * panel, int64_t k_tiles, uint8_t * out) {
    for (int64_t t = 0; t < k_tiles; t++, out += gemm_prepared_bytes) {
        if (type == TB_Q8_0_TILE) {
            prepare_q8(panel + 1088 * t, out);
        } else if (type == TB_Q4_0_TILE) {
            prepare_nibbles<false>(panel + 576 * t, out);
        } else {
            prepare_nibbles<true>(panel + 576 * t, out);
        }
    }
}

__m256 rounded(__m256 x) { return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)); }

// The four k of one quad of 8 columns; quad order puts k 0, 2, 1, 3 at byte 0, 1, 2, 3.
void store_quad(__m256i bytes, __m256 scale0, __m256 scale1, float * out) {
    _mm256_storeu_ps(out, rounded(_mm256_mul_ps(signed_byte<0>(bytes), scale0)));
    _mm256_storeu_ps(out + 32, rounded(_mm256_mul_ps(signed_byte<2>(bytes), scale0)));
    _mm256_storeu_ps(out + 64, rounded(_mm256_mul_ps(signed_byte<1>(bytes), scale1)));
    _mm256_storeu_ps(out + 96, rounded(_mm256_mul_ps(signed_byte<3>(bytes), scale1)));
}

void dequantize(uint32_t type, const uint8_t * panel, int64_t k_tiles, float * out) {
    const bool q8 = type == TB_Q8_0_COL || type == TB_Q8_0_TILE;
    const bool column = type < TB_Q4_0_TILE;
    const bool nonlinear = type == TB_IQ4_NL_COL || type == TB_IQ4_NL_TILE;
    const size_t quants = q8 ? 1024 : 512;
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i values = _mm256_broadcastsi128_si256(
        nonlinear ? _mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
                  : _mm_setr_epi8(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7));
    for (int64_t t = 0; t < k_tiles; t++, panel += quants + 64, out += 1024) {
        float scale[32];
        for (int i = 0; i < 4; i++)
            _mm256_storeu_ps(scale + 8 * i, halves_to_float(panel + quants + 16 * i));
        for (int g = 0; g < 4; g++) {
            for (int j = 0; j < 8; j++) {
                __m256i w;
                if (q8) {
                    w = load(panel + 128 * j + 32 * g);
                } else {
                    const __m256i v = load(panel + 128 * (j / 2) + 32 * g);
                    w = _mm256_shuffle_epi8(values, _mm256_and_si256(j & 1 ? _mm256_srli_epi16(v, 4) : v, nibble));
                }
                // two row pairs: 2j and 2j + 1
                const __m256 s0 = column ? _mm256_loadu_ps(scale + 8 * g) : _mm256_set1_ps(scale[4 * j + g / 2]);
                const __m256 s1 = column ? s0 : _mm256_set1_ps(scale[4 * j + 2 + g / 2]);
                store_quad(w, s0, s1, out + 128 * j + 8 * g);
            }
        }
    }
}

void round_fp16(int64_t n, float * x) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(x + i, rounded(_mm256_loadu_ps(x + i)));
    for (; i < n; i++)
        x[i] = _mm256_cvtss_f32(rounded(_mm256_set1_ps(x[i])));
}

} // namespace

void fill_gemm_avx2_convert(gemm_kernels & k) {
    k.quantize = quantize;
    k.prepare = prepare;
    k.dequantize = dequantize;
    k.round_fp16 = round_fp16;
}

} // namespace tb::npu
