// Activations for the integer GEMM: the portable version's bits.
#include "kernels/gemm.h"

#include <cmath>
#include <cstring>

#include "kernels/avx2/lanes.h"

namespace tb::npu {

namespace {

__m256 magnitude(__m256 x) { return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff))); }

__m256 is_finite(__m256 m) { return _mm256_cmp_ps(m, _mm256_set1_ps(INFINITY), _CMP_LT_OQ); }

float largest(__m256 v) {
    __m128 r = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    r = _mm_max_ps(r, _mm_movehl_ps(r, r));
    return _mm_cvtss_f32(_mm_max_ss(r, _mm_movehdup_ps(r)));
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
                sum = sum_of(_mm256_add_epi32(_mm256_add_epi32(i32[0], i32[1]), _mm256_add_epi32(i32[2], i32[3])));
                q = _mm256_packs_epi16(_mm256_packs_epi32(i32[0], i32[1]), _mm256_packs_epi32(i32[2], i32[3]));
                q = _mm256_shuffle_epi8(_mm256_permutevar8x32_epi32(q, fours), quad);
            }
        }
        const int32_t start = -offset * sum;
        lanes::store(record + 32 * row, q);
        std::memcpy(record + 32 * rows + 4 * row, &scale, 4);
        std::memcpy(record + 36 * rows + 4 * row, &start, 4);
    }
}

} // namespace

void fill_gemm_avx2_convert(gemm_kernels & k) { k.quantize = quantize; }

} // namespace tb::npu
