// Float GEMM: 6 rows x 16 columns in 24 accumulators, and the dot kernel for few rows. Packing and dequantizing are the
// portable set's.
#include "kernels/gemm.h"

#include <arm_neon.h>
#include <cstring>

namespace tb::npu {

namespace {

constexpr int max_rows = 6;

template <int rows> void block(const gemm_float_args & a, int half) {
    float32x4_t acc[rows][4];
#pragma GCC unroll 6
    for (int m = 0; m < rows; m++) {
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++)
            acc[m][g] = a.add ? vld1q_f32(a.out[m] + 16 * half + 4 * g) : vdupq_n_f32(0);
    }
    const float * w = a.panel + 16 * half;
    const float * x = a.group;
    for (int64_t k = 0; k < a.k; k++, w += 32, x += rows) {
        float32x4_t v[4];
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++)
            v[g] = vld1q_f32(w + 4 * g);
#pragma GCC unroll 6
        for (int m = 0; m < rows; m++) {
#pragma GCC unroll 4
            for (int g = 0; g < 4; g++)
                acc[m][g] = vfmaq_n_f32(acc[m][g], v[g], x[m]);
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < rows; m++) {
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++)
            vst1q_f32(a.out[m] + 16 * half + 4 * g, acc[m][g]);
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
    static float32x4_t load(const uint8_t * p) { return vreinterpretq_f32_u8(vld1q_u8(p)); }
};

struct f16 {
    static constexpr int size = 2;
    static float32x4_t load(const uint8_t * p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
};

struct bf16 {
    static constexpr int size = 2;
    static float32x4_t load(const uint8_t * p) {
        return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
    }
};

// Fewer than 4 elements, zeros after them.
template <class Type> float32x4_t load_tail(const uint8_t * p, int64_t n) {
    uint8_t buffer[16] = {};
    std::memcpy(buffer, p, static_cast<size_t>(n) * Type::size);
    return Type::load(buffer);
}

template <class Type, int cols> void dots(const gemm_dot_args & a) {
    for (int m = 0; m < a.rows; m++) {
        float32x4_t acc[cols];
        for (int c = 0; c < cols; c++)
            acc[c] = vdupq_n_f32(0);
        int64_t k = 0;
        for (; k + 4 <= a.k; k += 4) {
            const float32x4_t x = vld1q_f32(a.x[m] + k);
#pragma GCC unroll 4
            for (int c = 0; c < cols; c++) {
                acc[c] = vfmaq_f32(acc[c], x, Type::load(a.w + c * a.stride + k * Type::size));
            }
        }
        if (k < a.k) {
            const float32x4_t x = load_tail<f32>(reinterpret_cast<const uint8_t *>(a.x[m] + k), a.k - k);
            for (int c = 0; c < cols; c++) {
                acc[c] = vfmaq_f32(acc[c], x, load_tail<Type>(a.w + c * a.stride + k * Type::size, a.k - k));
            }
        }
        for (int c = 0; c < cols; c++)
            a.out[m][c] = vaddvq_f32(acc[c]);
    }
}

template <class Type> void dots_cols(const gemm_dot_args & a) {
    switch (a.cols) {
    case 1:
        return dots<Type, 1>(a);
    case 2:
        return dots<Type, 2>(a);
    case 3:
        return dots<Type, 3>(a);
    default:
        return dots<Type, 4>(a);
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

void fill_gemm_neon_float(gemm_kernels & k) {
    k.f32 = {"gemm_f32_6x16_neon", max_rows, pick<max_rows>};
    k.dot = {"gemm_dot_1x4_neon", dot};
}

} // namespace tb::npu
