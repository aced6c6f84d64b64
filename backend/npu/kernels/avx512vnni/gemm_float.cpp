// Float GEMM: 12 rows x 32 columns in 24 accumulators, and what feeds it from F32, F16 and BF16 rows (a 16 x 16
// transpose in registers); plus the dot kernel for few rows.
#include "kernels/gemm.h"

#include <cstring>
#include <immintrin.h>

namespace tb::npu {

namespace {

constexpr int max_rows = 12;

template <int rows> void block(const gemm_float_args & a) {
    __m512 acc[rows][2];
#pragma GCC unroll 12
    for (int m = 0; m < rows; m++) {
        acc[m][0] = a.add ? _mm512_loadu_ps(a.out[m]) : _mm512_setzero_ps();
        acc[m][1] = a.add ? _mm512_loadu_ps(a.out[m] + 16) : _mm512_setzero_ps();
    }
    const float * w = a.panel;
    const float * x = a.group;
    for (int64_t k = 0; k < a.k; k++, w += 32, x += rows) {
        const __m512 w0 = _mm512_loadu_ps(w), w1 = _mm512_loadu_ps(w + 16);
#pragma GCC unroll 12
        for (int m = 0; m < rows; m++) {
            const __m512 v = _mm512_set1_ps(x[m]);
            acc[m][0] = _mm512_fmadd_ps(v, w0, acc[m][0]);
            acc[m][1] = _mm512_fmadd_ps(v, w1, acc[m][1]);
        }
    }
#pragma GCC unroll 12
    for (int m = 0; m < rows; m++) {
        _mm512_storeu_ps(a.out[m], acc[m][0]);
        _mm512_storeu_ps(a.out[m] + 16, acc[m][1]);
    }
}

template <int rows> void pick(const gemm_float_args & a) {
    if (a.rows == rows) {
        block<rows>(a);
    } else if constexpr (rows > 1) {
        pick<rows - 1>(a);
    }
}

struct f32 {
    static constexpr int size = 4;
    static __m512 load(const uint8_t * p, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, p); }
    static __m512 load(const uint8_t * p) { return _mm512_loadu_ps(p); }
};

struct f16 {
    static constexpr int size = 2;
    static __m512 load(const uint8_t * p, __mmask16 lanes) {
        return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, p));
    }
    static __m512 load(const uint8_t * p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    }
};

struct bf16 {
    static constexpr int size = 2;
    static __m512 widen(__m256i v) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)); }
    static __m512 load(const uint8_t * p, __mmask16 lanes) { return widen(_mm256_maskz_loadu_epi16(lanes, p)); }
    static __m512 load(const uint8_t * p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))); }
};

__mmask16 first_lanes(int64_t n) { return n >= 16 ? 0xffff : static_cast<__mmask16>((1u << n) - 1); }

void transpose16(__m512 * r) {
    __m512 t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[i]), _mm512_castps_pd(t[i + 2])));
        r[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[i]), _mm512_castps_pd(t[i + 2])));
        r[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[i + 1]), _mm512_castps_pd(t[i + 3])));
        r[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[i + 1]), _mm512_castps_pd(t[i + 3])));
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

template <class Type> void pack_rows(const uint8_t * src, int64_t stride, int cols, int64_t k, float * out) {
    for (int h = 0; h < 2; h++) {
        for (int64_t i = 0; i < k; i += 16) {
            const __mmask16 lanes = first_lanes(k - i);
            __m512 r[16];
#pragma GCC unroll 16
            for (int n = 0; n < 16; n++) {
                const uint8_t * p = src + (16 * h + n) * stride + i * Type::size;
                r[n] = 16 * h + n < cols ? Type::load(p, lanes) : _mm512_setzero_ps();
            }
            transpose16(r);
            const int count = k - i < 16 ? static_cast<int>(k - i) : 16;
            for (int n = 0; n < count; n++)
                _mm512_storeu_ps(out + 32 * (i + n) + 16 * h, r[n]);
        }
    }
}

void pack(uint32_t type, const uint8_t * src, int64_t stride, int cols, int64_t k, float * out) {
    if (type == TB_F32) {
        pack_rows<f32>(src, stride, cols, k, out);
    } else if (type == TB_F16) {
        pack_rows<f16>(src, stride, cols, k, out);
    } else {
        pack_rows<bf16>(src, stride, cols, k, out);
    }
}

template <class Type, int rows, int cols> void dots(const gemm_dot_args & a) {
    __m512 acc[rows][cols];
#pragma GCC unroll 4
    for (int m = 0; m < rows; m++) {
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++)
            acc[m][c] = _mm512_setzero_ps();
    }
    int64_t k = 0;
    for (; k + 16 <= a.k; k += 16) {
        __m512 w[cols];
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++) {
            const uint8_t * p = a.w + c * a.stride + k * Type::size;
            w[c] = Type::load(p);
            // a row is about a page, too short for the hardware to follow: fetch the next columns' rows
            if (rows == 1) _mm_prefetch(reinterpret_cast<const char *>(p + cols * a.stride), _MM_HINT_T0);
        }
#pragma GCC unroll 4
        for (int m = 0; m < rows; m++) {
            const __m512 x = _mm512_loadu_ps(a.x[m] + k);
#pragma GCC unroll 4
            for (int c = 0; c < cols; c++)
                acc[m][c] = _mm512_fmadd_ps(x, w[c], acc[m][c]);
        }
    }
    if (k < a.k) {
        const __mmask16 lanes = first_lanes(a.k - k);
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++) {
            const __m512 w = Type::load(a.w + c * a.stride + k * Type::size, lanes);
#pragma GCC unroll 4
            for (int m = 0; m < rows; m++) {
                acc[m][c] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(lanes, a.x[m] + k), w, acc[m][c]);
            }
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < rows; m++) {
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++)
            a.out[m][c] = _mm512_reduce_add_ps(acc[m][c]);
    }
}

template <class Type, int rows> void dots_cols(const gemm_dot_args & a) {
    switch (a.cols) {
    case 1:
        return dots<Type, rows, 1>(a);
    case 2:
        return dots<Type, rows, 2>(a);
    case 3:
        return dots<Type, rows, 3>(a);
    default:
        return dots<Type, rows, 4>(a);
    }
}

template <class Type> void dots_rows(const gemm_dot_args & a) {
    switch (a.rows) {
    case 1:
        return dots_cols<Type, 1>(a);
    case 2:
        return dots_cols<Type, 2>(a);
    case 3:
        return dots_cols<Type, 3>(a);
    default:
        return dots_cols<Type, 4>(a);
    }
}

void dot(const gemm_dot_args & a) {
    if (a.type == TB_F32) {
        dots_rows<f32>(a);
    } else if (a.type == TB_F16) {
        dots_rows<f16>(a);
    } else {
        dots_rows<bf16>(a);
    }
}

} // namespace

void fill_gemm_avx512vnni_float(gemm_kernels & k) {
    k.f32 = {"gemm_f32_12x32_avx512vnni", max_rows, pick<max_rows>};
    k.dot = {"gemm_dot_4x4_avx512vnni", dot};
    k.pack = pack;
}

} // namespace tb::npu
