// What the integer GEMM of neon and i8mm share: weights as signed bytes, sdot over up to 4 rows, activation
// quantization. Internal linkage, see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_NEON_INT8_H
#define TILEBEAM_NPU_KERNELS_NEON_INT8_H

#include <arm_neon.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/gemm.h"

namespace tb::npu {
namespace {

int8x16_t load(const uint8_t * p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }

// Quad j of the 4 columns from 4 * g on, as nibbles.
int8x16_t nibbles(const uint8_t * tile, int j, int g) {
    const uint8x16_t v = vld1q_u8(tile + 128 * (j / 2) + 16 * g);
    return vreinterpretq_s8_u8(j & 1 ? vshrq_n_u8(v, 4) : vandq_u8(v, vdupq_n_u8(15)));
}

float32x4_t half_scales(const uint8_t * p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }

struct format_q4 {
    static constexpr size_t bytes = 576;
    static constexpr int32_t offset = 8;
    static int8x16_t weights(const uint8_t * tile, int j, int g) { return nibbles(tile, j, g); }
    static float32x4_t scales(const uint8_t * tile, int g) { return half_scales(tile + 512 + 8 * g); }
};

struct format_iq4nl {
    static constexpr size_t bytes = 576;
    static constexpr int32_t offset = 0;
    static int8x16_t weights(const uint8_t * tile, int j, int g) {
        static constexpr int8_t values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
        return vqtbl1q_s8(vld1q_s8(values), vreinterpretq_u8_s8(nibbles(tile, j, g)));
    }
    static float32x4_t scales(const uint8_t * tile, int g) { return half_scales(tile + 512 + 8 * g); }
};

struct format_q8 {
    static constexpr size_t bytes = 1088;
    static constexpr int32_t offset = 0;
    static int8x16_t weights(const uint8_t * tile, int j, int g) { return load(tile + 128 * j + 16 * g); }
    static float32x4_t scales(const uint8_t * tile, int g) { return half_scales(tile + 1024 + 8 * g); }
};

struct format_prepared {
    static constexpr size_t bytes = gemm_prepared_bytes;
    static constexpr int32_t offset = 0;
    static int8x16_t weights(const uint8_t * tile, int j, int g) { return load(tile + 128 * j + 16 * g); }
    static float32x4_t scales(const uint8_t * tile, int g) {
        return vreinterpretq_f32_u8(vld1q_u8(tile + 1024 + 16 * g));
    }
};

template <int lane> int32x4_t dot_lane(int32x4_t sum, int8x16_t w, int8x16_t a) {
    return vdotq_laneq_s32(sum, w, a, lane);
}

// Columns 16 * h to 16 * h + 15 of one tile, added to acc[row][4 * h] to acc[row][4 * h + 3].
template <class Format, int rows>
void tile_half(const uint8_t * tile, const uint8_t * record, int h, float32x4_t (*acc)[8]) {
    int32x4_t sum[rows][4];
#pragma GCC unroll 4
    for (int m = 0; m < rows; m++) {
        int32_t start;
        std::memcpy(&start, record + 36 * rows + 4 * m, 4);
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++)
            sum[m][g] = vdupq_n_s32(Format::offset ? start : 0);
    }
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++) {
        int8x16_t a[rows];
#pragma GCC unroll 4
        for (int m = 0; m < rows; m++)
            a[m] = load(record + 32 * m + 16 * part);
        const int j = 4 * part;
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++) {
            const int8x16_t w0 = Format::weights(tile, j, 4 * h + g), w1 = Format::weights(tile, j + 1, 4 * h + g);
            const int8x16_t w2 = Format::weights(tile, j + 2, 4 * h + g), w3 = Format::weights(tile, j + 3, 4 * h + g);
#pragma GCC unroll 4
            for (int m = 0; m < rows; m++) {
                sum[m][g] = dot_lane<1>(dot_lane<0>(sum[m][g], w0, a[m]), w1, a[m]);
                sum[m][g] = dot_lane<3>(dot_lane<2>(sum[m][g], w2, a[m]), w3, a[m]);
            }
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < rows; m++) {
        float scale;
        std::memcpy(&scale, record + 32 * rows + 4 * m, 4);
#pragma GCC unroll 4
        for (int g = 0; g < 4; g++) {
            const float32x4_t s = vmulq_n_f32(Format::scales(tile, 4 * h + g), scale);
            acc[m][4 * h + g] = vfmaq_f32(acc[m][4 * h + g], vcvtq_f32_s32(sum[m][g]), s);
        }
    }
}

// Up to 4 rows.
template <class Format, int rows> void block(const gemm_int8_args & a) {
    float32x4_t acc[rows][8];
    for (int m = 0; m < rows; m++) {
        for (int g = 0; g < 8; g++)
            acc[m][g] = a.add ? vld1q_f32(a.out[m] + 4 * g) : vdupq_n_f32(0);
    }
    const uint8_t * tile = a.panel;
    const uint8_t * record = a.group;
    for (int64_t t = 0; t < a.k_tiles; t++, tile += Format::bytes, record += gemm_record_bytes(rows)) {
        tile_half<Format, rows>(tile, record, 0, acc);
        tile_half<Format, rows>(tile, record, 1, acc);
    }
    for (int m = 0; m < rows; m++) {
        for (int g = 0; g < 8; g++)
            vst1q_f32(a.out[m] + 4 * g, acc[m][g]);
    }
}

// gemm_kernels.quantize; place(record, rows, row, q0, q1) stores a row's 32 k.
template <class Place>
void quantize_row(const float * x, int64_t k_tiles, int32_t offset, uint8_t * group, int rows, int row, Place place) {
    static constexpr uint8_t quad[16] = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};
    const uint8x16_t order = vld1q_u8(quad);
    for (int64_t t = 0; t < k_tiles; t++, x += 32) {
        uint8_t * record = group + t * gemm_record_bytes(rows);
        float32x4_t v[8], max = vdupq_n_f32(0);
        uint32x4_t finite = vdupq_n_u32(0xffffffff);
        for (int i = 0; i < 8; i++) {
            v[i] = vld1q_f32(x + 4 * i);
            const float32x4_t magnitude = vabsq_f32(v[i]);
            max = vmaxq_f32(max, magnitude);
            finite = vandq_u32(finite, vcltq_f32(magnitude, vdupq_n_f32(INFINITY)));
        }
        int8x16_t q0 = vdupq_n_s8(0), q1 = q0;
        float scale = NAN;
        int32_t sum = 0;
        if (vminvq_u32(finite) != 0) {
            const float amax = vmaxvq_f32(max);
            scale = 0;
            if (amax >= gemm_least_amax) {
                scale = amax / 127.0f;
                const float inverse = 127.0f / amax;
                int16x8_t half[4];
                for (int i = 0; i < 4; i++) {
                    const int32x4_t low = vcvtnq_s32_f32(vmulq_n_f32(v[2 * i], inverse));
                    const int32x4_t high = vcvtnq_s32_f32(vmulq_n_f32(v[2 * i + 1], inverse));
                    half[i] = vcombine_s16(vmovn_s32(low), vmovn_s32(high));
                }
                q0 = vqtbl1q_s8(vcombine_s8(vmovn_s16(half[0]), vmovn_s16(half[1])), order);
                q1 = vqtbl1q_s8(vcombine_s8(vmovn_s16(half[2]), vmovn_s16(half[3])), order);
                sum = vaddvq_s16(vaddq_s16(vaddq_s16(half[0], half[1]), vaddq_s16(half[2], half[3])));
            }
        }
        const int32_t start = -offset * sum;
        place(record, rows, row, vreinterpretq_u8_s8(q0), vreinterpretq_u8_s8(q1));
        std::memcpy(record + 32 * rows + 4 * row, &scale, 4);
        std::memcpy(record + 36 * rows + 4 * row, &start, 4);
    }
}

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_NEON_INT8_H
