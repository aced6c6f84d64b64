// Activations for the integer GEMM: the portable version's bits.
#include "kernels/gemm.h"

#include <cmath>
#include <cstring>
#include <immintrin.h>

namespace tb::npu {

namespace {

__m512 finite_abs(__m512 x, __mmask16 * finite) {
    const __m512 magnitude = _mm512_abs_ps(x);
    *finite = static_cast<__mmask16>(*finite & _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(INFINITY), _CMP_LT_OQ));
    return magnitude;
}

void quantize(const float * x, int64_t k_tiles, int32_t offset, uint8_t * group, int rows, int row) {
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15); // quad order
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

} // namespace

void fill_gemm_avx512vnni_convert(gemm_kernels & k) { k.quantize = quantize; }

} // namespace tb::npu
