// What stands around the integer GEMM: activation quantization, tiles to FP16 values. Each returns the portable
// version's bits.
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

// Byte `position` of each 32-bit lane, sign extended, as float.
template <int position> __m512 signed_byte(__m512i v) {
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(v, 24 - 8 * position), 24));
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
    k.dequantize = dequantize;
    k.round_fp16 = round_fp16;
}

} // namespace tb::npu
