// What the integer GEMM of neon and i8mm share: weights as signed bytes, sdot behind the names that
// kernels/gemm_tiles.h uses, and most that kernels/gemm_k.h uses, activation quantization. Internal linkage, see
// vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_NEON_INT8_H
#define TILEBEAM_NPU_KERNELS_NEON_INT8_H

#include <arm_neon.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/gemm_tiles.h"

namespace tb::npu {
namespace {

struct unit {
    using ints = int32x4_t;
    using floats = float32x4_t;
    static constexpr int width = 4;
    static constexpr int rows = 4;                             // at a time
    static constexpr int32_t code_offset = 0, byte_offset = 0; // all weights are signed
    template <class> static constexpr int vectors(int) { return 4; }

    static ints load(const uint8_t * p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
    static void store(uint8_t * p, ints x) { vst1q_u8(p, vreinterpretq_u8_s32(x)); }
    static int8x16_t bytes(ints x) { return vreinterpretq_s8_s32(x); }
    static ints masked(ints x, int bits) {
        return vreinterpretq_s32_u8(vandq_u8(vreinterpretq_u8_s32(x), vdupq_n_u8(static_cast<uint8_t>(bits))));
    }
    static ints either(ints a, ints b) { return vorrq_s32(a, b); }
    static ints low_nibbles(ints x) { return masked(x, 15); }
    static ints high_nibbles(ints x) { return vreinterpretq_s32_u8(vshrq_n_u8(vreinterpretq_u8_s32(x), 4)); }
    // To the left, or right if negative, each byte by itself.
    static ints shifted(ints x, int by) {
        return vreinterpretq_s32_u8(vshlq_u8(vreinterpretq_u8_s32(x), vdupq_n_s8(static_cast<int8_t>(by))));
    }
    template <class... Byte> static ints table(Byte... bytes) {
        const uint8_t at[] = {static_cast<uint8_t>(bytes)...};
        return load(at);
    }
    static ints look_up(ints table, ints index) {
        return vreinterpretq_s32_u8(vqtbl1q_u8(vreinterpretq_u8_s32(table), vreinterpretq_u8_s32(index)));
    }

    static floats load_floats(const float * p) { return vld1q_f32(p); }
    static void store_floats(float * p, floats x) { vst1q_f32(p, x); }
    static floats zero() { return vdupq_n_f32(0); }
    static floats load_halves(const uint8_t * p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
    static uint8x8_t load_four(const uint8_t * p) {
        uint32_t four;
        std::memcpy(&four, p, sizeof(four));
        return vreinterpret_u8_u32(vdup_n_u32(four));
    }
    // Exponents of MXFP4's scales. A subnormal power is the larger of the two as an integer.
    static floats load_powers(const uint8_t * p) {
        const int32x4_t x = vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(load_four(p)))));
        const int32x4_t one = vdupq_n_s32(1);
        return vreinterpretq_f32_s32(vmaxq_s32(vshlq_n_s32(vsubq_s32(x, one), 23), vshlq_n_s32(vaddq_s32(x, one), 21)));
    }
    // UE4M3 scales of NVFP4, halves of them, as FP16 numbers times 128; the NaN counts as 0.
    static floats load_small(const uint8_t * p) {
        const uint8x8_t x = load_four(p), most = vdup_n_u8(0x7f);
        const uint8x8_t bits = vbic_u8(vand_u8(x, most), vceq_u8(x, most));
        const uint16x4_t halves_of_four = vshl_n_u16(vget_low_u16(vmovl_u8(bits)), 7);
        return vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(halves_of_four)), 128.0f);
    }

    template <class Format, class Source, int block_rows>
    static void block(const uint8_t * tile, int first, const tile_rows & at);
};

using format_q4 = tile_q4<unit>;
using format_q8 = tile_q8<unit>;
using format_iq4nl = tile_iq4nl<unit>;
using format_prepared = tile_prepared<unit>;
using format_mxfp4 = tile_mxfp4<unit>;
using format_nvfp4 = tile_nvfp4<unit>;
template <uint32_t type> using format_bits = tile_bits<unit, type>;
template <uint32_t type> using format_few_bits = tile_few_bits<unit, type>;

template <int lane> int32x4_t dot_lane(int32x4_t sum, int8x16_t w, int8x16_t a) {
    return vdotq_laneq_s32(sum, w, a, lane);
}

// A row's activations of four quads are the lanes of a register.
template <class Format, class Source, int block_rows>
__attribute__((noinline)) void unit::block(const uint8_t * tile, int first, const tile_rows & at) {
    constexpr int n = block_rows;
    int32x4_t sum[n][4];
#pragma GCC unroll 4
    for (int m = 0; m < n; m++) {
        const int32x4_t start = vld1q_dup_s32(reinterpret_cast<const int32_t *>(at.starts + 4 * m));
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            sum[m][i] = Format::offset && !Format::has_minima ? start : vdupq_n_s32(0);
    }
    // h: of formats with two scales the half of the tile that sums are of.
    const auto finish = [&](int h) __attribute__((always_inline)) {
        float32x4_t scale[4], least[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            scale[i] = Source::scales(tile, first + i);
            if constexpr (Format::has_minima || has_halves<Format>) least[i] = Source::minima(tile, first + i);
        }
#pragma GCC unroll 4
        for (int m = 0; m < n; m++) {
            const float32x4_t s = vld1q_dup_f32(reinterpret_cast<const float *>(at.scales + 4 * m));
            const float32x4_t start =
                vcvtq_f32_s32(vld1q_dup_s32(reinterpret_cast<const int32_t *>(at.starts + 4 * m)));
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                float * to = at.sums[m] + 4 * (first + i);
                const float32x4_t dot = vcvtq_f32_s32(sum[m][i]);
                if constexpr (Format::has_minima) {
                    const float32x4_t x = vfmaq_f32(vmulq_f32(least[i], start), dot, scale[i]);
                    vst1q_f32(to, vfmaq_f32(vld1q_f32(to), x, s));
                } else {
                    vst1q_f32(to, vfmaq_f32(vld1q_f32(to), dot, vmulq_f32(h == 0 ? scale[i] : least[i], s)));
                }
                if constexpr (has_halves<Format>) sum[m][i] = vdupq_n_s32(0);
            }
        }
    };
#pragma GCC unroll 1
    for (int part = 0; part < 2; part++) {
        const int c = 2 * part;
        int8x16_t a[n];
#pragma GCC unroll 4
        for (int m = 0; m < n; m++)
            a[m] = bytes(load(at.q + 32 * m + 16 * part));
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const int8x16_t w0 = bytes(Source::weights(tile, c, 0, first + i));
            const int8x16_t w1 = bytes(Source::weights(tile, c, 1, first + i));
            const int8x16_t w2 = bytes(Source::weights(tile, c + 1, 0, first + i));
            const int8x16_t w3 = bytes(Source::weights(tile, c + 1, 1, first + i));
#pragma GCC unroll 4
            for (int m = 0; m < n; m++) {
                sum[m][i] = dot_lane<1>(dot_lane<0>(sum[m][i], w0, a[m]), w1, a[m]);
                sum[m][i] = dot_lane<3>(dot_lane<2>(sum[m][i], w2, a[m]), w3, a[m]);
            }
        }
        if constexpr (has_halves<Format>) finish(part);
    }
    if constexpr (!has_halves<Format>) finish(0);
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
