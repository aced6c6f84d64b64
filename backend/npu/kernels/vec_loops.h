// Row loops that a compiler vectorizes well on its own. Included by each ISA folder's vec file, in internal linkage,
// so that every folder gets them compiled with its own flags; without contraction and reordering (see CMakeLists.txt)
// all of them give the same bits.
#ifndef TILEBEAM_NPU_KERNELS_VEC_LOOPS_H
#define TILEBEAM_NPU_KERNELS_VEC_LOOPS_H

#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"
#include "kernels/vec.h"

namespace tb::npu {
namespace {

void add_loop(int64_t n, const float * a, const float * b, float * dst) {
    for (int64_t i = 0; i < n; i++) {
        dst[i] = a[i] + b[i];
    }
}

void mul_loop(int64_t n, const float * a, const float * b, float * dst) {
    for (int64_t i = 0; i < n; i++) {
        dst[i] = a[i] * b[i];
    }
}

void scale_loop(int64_t n, const float * x, float scale, float bias, float * dst) {
    for (int64_t i = 0; i < n; i++) {
        dst[i] = x[i] * scale + bias;
    }
}

void reglu_loop(int64_t n, const float * gate, const float * up, float, float, float * dst) {
    for (int64_t i = 0; i < n; i++) {
        dst[i] = gate[i] > 0.0f ? gate[i] * up[i] : 0.0f;
    }
}

void rope_normal_loop(int64_t n, const float * x, const float * cos, const float * sin, float * dst) {
    for (int64_t i = 0; i < n; i++) {
        const float a = x[2 * i];
        const float b = x[2 * i + 1];
        dst[2 * i] = a * cos[i] - b * sin[i];
        dst[2 * i + 1] = a * sin[i] + b * cos[i];
    }
}

void rope_neox_loop(int64_t n, int64_t half, const float * x, const float * cos, const float * sin, float * dst) {
    for (int64_t i = 0; i < n; i++) {
        const float a = x[i];
        const float b = x[half + i];
        dst[i] = a * cos[i] - b * sin[i];
        dst[half + i] = a * sin[i] + b * cos[i];
    }
}

void convolve_loop(int64_t n, int64_t n_taps, const float * const * rows, const float * const * taps, float * dst) {
    mul_loop(n, rows[0], taps[0], dst);
    for (int64_t t = 1; t < n_taps; t++) {
        const float * x = rows[t];
        const float * w = taps[t];
        for (int64_t i = 0; i < n; i++) {
            dst[i] += x[i] * w[i];
        }
    }
}

void bf16_to_f32_loop(int64_t n, const void * src, float * dst) {
    const uint16_t * x = static_cast<const uint16_t *>(src);
    for (int64_t i = 0; i < n; i++) {
        dst[i] = tb_bf16_to_float(x[i]);
    }
}

// Round to nearest even; NaN stays NaN.
uint16_t float_to_bf16(float x) {
    const uint32_t u = tb_float_bits(x);
    if ((u & 0x7fffffff) > 0x7f800000) {
        return static_cast<uint16_t>((u >> 16) | 0x40);
    }
    return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

void f32_to_bf16_loop(int64_t n, const float * src, void * dst) {
    uint16_t * y = static_cast<uint16_t *>(dst);
    for (int64_t i = 0; i < n; i++) {
        y[i] = float_to_bf16(src[i]);
    }
}

void i32_to_f32_loop(int64_t n, const void * src, float * dst) {
    const int32_t * x = static_cast<const int32_t *>(src);
    for (int64_t i = 0; i < n; i++) {
        dst[i] = static_cast<float>(x[i]);
    }
}

[[maybe_unused]] void fill_vec_loops(vec_kernels & k) {
    k.add = add_loop;
    k.mul = mul_loop;
    k.scale = scale_loop;
    k.glu[glu_reglu] = reglu_loop;
    k.rope_normal = rope_normal_loop;
    k.rope_neox = rope_neox_loop;
    k.convolve = convolve_loop;
    k.to_f32[TB_BF16] = bf16_to_f32_loop;
    k.to_f32[TB_I32] = i32_to_f32_loop;
    k.from_f32[TB_BF16] = f32_to_bf16_loop;
}

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_VEC_LOOPS_H
