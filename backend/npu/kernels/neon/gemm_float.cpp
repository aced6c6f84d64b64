// Float GEMM and conversion of tiles on NEON: the shared kernels over 4 lanes.
#include "kernels/neon/simd.h"

#include "kernels/gemm_convert_simd.h"
#include "kernels/gemm_float_simd.h"

namespace tb::npu {

namespace {

struct unit : simd {
    static vec load_bf16(const uint8_t * p) {
        return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
    }

    using bytes = int8x16_t;
    static bytes load_bytes(const uint8_t * p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
    static void store_bytes(uint8_t * p, bytes v) { vst1q_u8(p, vreinterpretq_u8_s8(v)); }
    static bytes low_nibbles(bytes v) { return vandq_s8(v, vdupq_n_s8(15)); }
    static bytes high_nibbles(bytes v) { return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(v), 4)); }
    static bytes table(const int8_t (&v)[16]) { return vld1q_s8(v); }
    static bytes look_up(bytes table, bytes index) { return vqtbl1q_s8(table, vreinterpretq_u8_s8(index)); }
    // Byte `position` of each 32-bit lane, sign extended.
    template <int position> static vec signed_byte(bytes v) {
        return vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(vreinterpretq_s32_s8(v), 24 - 8 * position), 24));
    }
    // A table of 16 values times a ratio, in fixed point.
    static bytes requantized(const int16_t (&v)[16], int16_t ratio) {
        return vcombine_s8(vqmovn_s16(vqrdmulhq_n_s16(vld1q_s16(v), ratio)),
                           vqmovn_s16(vqrdmulhq_n_s16(vld1q_s16(v + 8), ratio)));
    }
    // Even bytes times one ratio, odd ones times the other: each becomes twice its value in 16 bits.
    static bytes requantized(bytes v, int16_t even, int16_t odd) {
        const int16x8_t pairs = vreinterpretq_s16_s8(v);
        const int16x8_t low = vshrq_n_s16(vshlq_n_s16(pairs, 8), 7);
        const int16x8_t high = vshrq_n_s16(vandq_s16(pairs, vdupq_n_s16(-256)), 7);
        return even_odd(vreinterpretq_s8_s16(vqrdmulhq_n_s16(low, even)),
                        vreinterpretq_s8_s16(vshlq_n_s16(vqrdmulhq_n_s16(high, odd), 8)));
    }
    static bytes even_odd(bytes even, bytes odd) {
        return vbslq_s8(vreinterpretq_u8_s16(vdupq_n_s16(-256)), odd, even);
    }
};

constexpr int rows = panel_shape<unit>.rows;
static_assert(rows == 6 && panel_shape<unit>.vectors * unit::width == 16, "the kernel's name");

} // namespace

void fill_gemm_neon_float(gemm_kernels & k) {
    k.f32 = {"gemm_f32_6x16_neon", rows, float_panel<unit, rows>};
    k.dot[gemm_f32] = {"gemm_f32d_6x4_neon", 32, dot<unit, element_f32<unit>>};
    k.dot[gemm_f16] = {"gemm_f16d_6x4_neon", 48, dot<unit, element_f16<unit>>};
    k.dot[gemm_bf16] = {"gemm_bf16d_6x4_neon", 48, dot<unit, element_bf16<unit>>};
    k.pack = pack<unit>;
    k.prepare = prepare<unit>;
    k.dequantize = dequantize<unit>;
    k.round_fp16 = round_fp16<unit>;
}

} // namespace tb::npu
