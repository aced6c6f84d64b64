// Float GEMM: 6 rows x 16 columns in 12 accumulators, and what feeds it from F32, F16 and BF16 rows (an 8 x 8 transpose
// in registers); plus the dot kernel for few rows.
#include "kernels/gemm.h"

#include <cstring>
#include <immintrin.h>

namespace tb::npu {

namespace {

constexpr int max_rows = 6;

template <int rows> void block(const gemm_float_args & a, int half) {
    __m256 acc[rows][2];
#pragma GCC unroll 6
    for (int m = 0; m < rows; m++) {
        acc[m][0] = a.add ? _mm256_loadu_ps(a.out[m] + 16 * half) : _mm256_setzero_ps();
        acc[m][1] = a.add ? _mm256_loadu_ps(a.out[m] + 16 * half + 8) : _mm256_setzero_ps();
    }
    const float * w = a.panel + 16 * half;
    const float * x = a.group;
    for (int64_t k = 0; k < a.k; k++, w += 32, x += rows) {
        const __m256 w0 = _mm256_loadu_ps(w), w1 = _mm256_loadu_ps(w + 8);
#pragma GCC unroll 6
        for (int m = 0; m < rows; m++) {
            const __m256 v = _mm256_broadcast_ss(x + m);
            acc[m][0] = _mm256_fmadd_ps(v, w0, acc[m][0]);
            acc[m][1] = _mm256_fmadd_ps(v, w1, acc[m][1]);
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < rows; m++) {
        _mm256_storeu_ps(a.out[m] + 16 * half, acc[m][0]);
        _mm256_storeu_ps(a.out[m] + 16 * half + 8, acc[m][1]);
    }
}

template <int rows> void pick(const gemm_float_args & a) {
    if (a.rows == rows) {
        block<rows>(a, 0);
        block<rows>(a, 1);
    } else if constexpr (rows > 1) {
        pick<rows - 1>(a);
    }
}

struct f32 {
    static constexpr int size = 4;
    static __m256 load(const uint8_t * p) { return _mm256_loadu_ps(reinterpret_cast<const float *>(p)); }
};

struct f16 {
    static constexpr int size = 2;
    static __m256 load(const uint8_t * p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    }
};

struct bf16 {
    static constexpr int size = 2;
    static __m256 load(const uint8_t * p) {
        const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
    }
};

// Fewer than 8 elements, zeros after them.
template <class Type> __m256 load_tail(const uint8_t * p, int64_t n) {
    uint8_t buffer[32] = {};
    std::memcpy(buffer, p, static_cast<size_t>(n) * Type::size);
    return Type::load(buffer);
}

void transpose8(__m256 * r) {
    __m256 t[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x20);
        t[i + 4] = _mm256_permute2f128_ps(r[i], r[i + 4], 0x31);
    }
    for (int i = 0; i < 8; i++)
        r[i] = t[i];
}

template <class Type> void pack_rows(const uint8_t * src, int64_t stride, int cols, int64_t k, float * out) {
    for (int g = 0; g < 4; g++) {
        for (int64_t i = 0; i < k; i += 8) {
            const int64_t count = k - i < 8 ? k - i : 8;
            __m256 r[8];
            for (int n = 0; n < 8; n++) {
                const uint8_t * p = src + (8 * g + n) * stride + i * Type::size;
                r[n] = 8 * g + n >= cols ? _mm256_setzero_ps() : count == 8 ? Type::load(p) : load_tail<Type>(p, count);
            }
            transpose8(r);
            for (int64_t n = 0; n < count; n++)
                _mm256_storeu_ps(out + 32 * (i + n) + 8 * g, r[n]);
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

float total(__m256 v) {
    __m128 r = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    r = _mm_add_ps(r, _mm_movehl_ps(r, r));
    return _mm_cvtss_f32(_mm_add_ss(r, _mm_movehdup_ps(r)));
}

// Rows m to m + rows - 1 against all columns.
template <class Type, int rows, int cols> void dots(const gemm_dot_args & a, int first) {
    __m256 acc[rows][cols];
    for (int m = 0; m < rows; m++) {
        for (int c = 0; c < cols; c++)
            acc[m][c] = _mm256_setzero_ps();
    }
    int64_t k = 0;
    for (; k + 8 <= a.k; k += 8) {
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++) {
            const __m256 w = Type::load(a.w + c * a.stride + k * Type::size);
#pragma GCC unroll 2
            for (int m = 0; m < rows; m++) {
                acc[m][c] = _mm256_fmadd_ps(_mm256_loadu_ps(a.x[first + m] + k), w, acc[m][c]);
            }
        }
    }
    if (k < a.k) {
        for (int c = 0; c < cols; c++) {
            const __m256 w = load_tail<Type>(a.w + c * a.stride + k * Type::size, a.k - k);
            for (int m = 0; m < rows; m++) {
                const __m256 x = load_tail<f32>(reinterpret_cast<const uint8_t *>(a.x[first + m] + k), a.k - k);
                acc[m][c] = _mm256_fmadd_ps(x, w, acc[m][c]);
            }
        }
    }
    for (int m = 0; m < rows; m++) {
        for (int c = 0; c < cols; c++)
            a.out[first + m][c] = total(acc[m][c]);
    }
}

template <class Type, int cols> void dots_rows(const gemm_dot_args & a) {
    int m = 0;
    for (; m + 2 <= a.rows; m += 2)
        dots<Type, 2, cols>(a, m);
    if (m < a.rows) dots<Type, 1, cols>(a, m);
}

template <class Type> void dots_cols(const gemm_dot_args & a) {
    switch (a.cols) {
    case 1:
        return dots_rows<Type, 1>(a);
    case 2:
        return dots_rows<Type, 2>(a);
    case 3:
        return dots_rows<Type, 3>(a);
    default:
        return dots_rows<Type, 4>(a);
    }
}

void dot(const gemm_dot_args & a) {
    if (a.type == TB_F32) {
        dots_cols<f32>(a);
    } else if (a.type == TB_F16) {
        dots_cols<f16>(a);
    } else {
        dots_cols<bf16>(a);
    }
}

} // namespace

void fill_gemm_avx2_float(gemm_kernels & k) {
    k.f32 = {"gemm_f32_6x16_avx2", max_rows, pick<max_rows>};
    k.dot = {"gemm_dot_2x4_avx2", dot};
    k.pack = pack;
}

} // namespace tb::npu
