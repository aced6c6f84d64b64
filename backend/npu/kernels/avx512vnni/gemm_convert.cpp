// What stands around the integer GEMM: activation quantization, `tile` grouping to int8, tiles to FP16 values. Each
// returns the portable version's bits, prepared quants plus the bias.
#include "kernels/gemm.h"

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

// The scales of one tile by column half: 16 row pairs' fixed-point ratios to the half's common scale, see gemm.h.
struct tile_scales {
    __m512i ratio[2];
    float common[2];
};

// `q4`: quants reach 8, so that the common scale is a fraction of the largest; else they reach 127.
tile_scales common_scales(const uint8_t * p, bool q4) {
    const __m512 low = halves_to_float(p), high = halves_to_float(p + 32);
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const float unit = static_cast<float>(1 << (q4 ? gemm_requantize_shift_q4 : gemm_requantize_shift_q8));
    tile_scales r;
    for (int h = 0; h < 2; h++) {
        const __m512 s = _mm512_permutex2var_ps(low, h ? odd : even, high);
        __mmask16 finite = 0xffff;
        const float smax = _mm512_reduce_max_ps(finite_abs(s, &finite));
        const bool good = finite == 0xffff;
        r.common[h] = !good ? NAN : q4 ? smax * (8.0f / 127.0f) : smax;
        const float inverse = good && smax > 0 ? 1.0f / r.common[h] : 0.0f;
        const __m512 ratio = _mm512_mul_ps(_mm512_mul_ps(s, _mm512_set1_ps(inverse)), _mm512_set1_ps(unit));
        r.ratio[h] = good ? _mm512_cvtps_epi32(ratio) : _mm512_setzero_si512();
    }
    return r;
}

// 4 bit: each row pair has a 16-entry table of its requantized values. Four tables at once, one per 128-bit lane: its
// first 8 entries come from one product, the rest from the other.
template <bool nonlinear> __m512i four_tables(__m512i ratio, int first) {
    // the values in fixed point: 16 times a Q4_0 quant, twice an IQ4_NL value
    const __m512i low = _mm512_broadcast_i32x4(nonlinear ? _mm_setr_epi16(-254, -208, -166, -130, -98, -70, -44, -20)
                                                         : _mm_setr_epi16(-128, -112, -96, -80, -64, -48, -32, -16));
    const __m512i high = _mm512_broadcast_i32x4(nonlinear ? _mm_setr_epi16(2, 26, 50, 76, 106, 138, 178, 226)
                                                          : _mm_setr_epi16(0, 16, 32, 48, 64, 80, 96, 112));
    // lane i: eight times the 16-bit word of row pair first + i
    const __m512i lane = _mm512_setr_epi32(0, 0, 0, 0, 0x20002, 0x20002, 0x20002, 0x20002, 0x40004, 0x40004, 0x40004,
                                           0x40004, 0x60006, 0x60006, 0x60006, 0x60006);
    const __m512i r =
        _mm512_permutexvar_epi16(_mm512_add_epi16(lane, _mm512_set1_epi16(static_cast<int16_t>(2 * first))), ratio);
    return _mm512_packs_epi16(_mm512_mulhrs_epi16(low, r), _mm512_mulhrs_epi16(high, r));
}

constexpr __mmask64 odd_bytes = 0xaaaaaaaaaaaaaaaaULL;

// As this set's kernel for prepared tiles wants them (gemm_kernels.bias).
__m512i biased(__m512i w) { return _mm512_xor_si512(w, _mm512_set1_epi8(static_cast<char>(0x80))); }

template <bool nonlinear> void prepare_nibbles(const uint8_t * tile, uint8_t * out) {
    const __m512i nibble = _mm512_set1_epi8(15);
    const tile_scales s = common_scales(tile + 512, !nonlinear);
    for (int h = 0; h < 2; h++) {
        for (int c = 0; c < 4; c++) {
            const __m512i v = _mm512_loadu_si512(tile + 128 * c + 64 * h);
            const __m512i low = _mm512_and_si512(v, nibble), high = _mm512_and_si512(_mm512_srli_epi16(v, 4), nibble);
            const __m512i tables = four_tables<nonlinear>(s.ratio[h], 4 * c);
            const __m512i t0 = _mm512_shuffle_i32x4(tables, tables, 0x00);
            const __m512i t1 = _mm512_shuffle_i32x4(tables, tables, 0x55);
            const __m512i t2 = _mm512_shuffle_i32x4(tables, tables, 0xaa);
            const __m512i t3 = _mm512_shuffle_i32x4(tables, tables, 0xff);
            const __m512i first = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(t0, low), odd_bytes, t1, low);
            const __m512i second = _mm512_mask_shuffle_epi8(_mm512_shuffle_epi8(t2, high), odd_bytes, t3, high);
            _mm512_storeu_si512(out + 256 * c + 64 * h, biased(first));
            _mm512_storeu_si512(out + 256 * c + 128 + 64 * h, biased(second));
        }
        _mm512_storeu_ps(out + 1024 + 64 * h, _mm512_set1_ps(s.common[h]));
    }
}

// Byte `position` of each 32-bit lane, sign extended, as float.
template <int position> __m512 signed_byte(__m512i v) {
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 24 - 8 * position), 24));
}

void prepare_q8(const uint8_t * tile, uint8_t * out) {
    const tile_scales s = common_scales(tile + 1024, false);
    for (int h = 0; h < 2; h++) {
        alignas(64) int32_t ratio[16];
        _mm512_store_si512(ratio, s.ratio[h]);
        for (int j = 0; j < 8; j++) {
            const __m512i v = _mm512_loadu_si512(tile + 128 * j + 64 * h);
            // even bytes belong to row pair 2j, odd ones to 2j + 1; each becomes twice its value in 16 bits
            const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(v, 8), 7);
            const __m512i odd =
                _mm512_srai_epi16(_mm512_and_si512(v, _mm512_set1_epi16(static_cast<int16_t>(0xff00))), 7);
            const __m512i e = _mm512_mulhrs_epi16(even, _mm512_set1_epi16(static_cast<int16_t>(ratio[2 * j])));
            const __m512i o = _mm512_mulhrs_epi16(odd, _mm512_set1_epi16(static_cast<int16_t>(ratio[2 * j + 1])));
            const __m512i bytes = _mm512_mask_mov_epi8(e, odd_bytes, _mm512_slli_epi16(o, 8));
            _mm512_storeu_si512(out + 128 * j + 64 * h, biased(bytes));
        }
        _mm512_storeu_ps(out + 1024 + 64 * h, _mm512_set1_ps(s.common[h]));
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
