// GEMM with types of 256 k on sdot: quants of at most six bits are signed bytes as they are, and so is the code book.
// Also the i8mm set's.
#include "kernels/gemm_k.h"

#include "kernels/neon/int8.h"

namespace tb::npu {

namespace {

struct k_unit : unit {
    static constexpr int vectors = 1; // of weights at once
    static constexpr bool signed_weights = true;
    static constexpr bool starts = true;

    static ints zeros() { return vdupq_n_s32(0); }
    static ints broadcast(int32_t x) { return vdupq_n_s32(x); }
    static ints less_bytes(ints x, int by) {
        return vreinterpretq_s32_u8(vsubq_u8(vreinterpretq_u8_s32(x), vdupq_n_u8(static_cast<uint8_t>(by))));
    }

    // Of bytes times `by`, modulo 256, the first digit to the base of 3 that follows the point: times 3, the carry.
    static ints top_digits(ints x, int by) {
        const uint8x16_t v = vmulq_u8(vreinterpretq_u8_s32(x), vdupq_n_u8(static_cast<uint8_t>(by)));
        return vreinterpretq_s32_u8(vshrq_n_u8(vhaddq_u8(v, vshrq_n_u8(v, 1)), 6)); // 3 v / 4 / 64
    }

    static ints load_sums(const int32_t * p) { return vld1q_s32(p); }
    static void store_sums(int32_t * p, ints x) { vst1q_s32(p, x); }
    // A byte per column to 16 bits.
    template <bool is_signed> static int16x4_t halves_of(const uint8_t * p) {
        const uint8x8_t v = vreinterpret_u8_s32(vdup_n_s32(read_k_int(p)));
        return is_signed ? vget_low_s16(vmovl_s8(vreinterpret_s8_u8(v)))
                         : vget_low_s16(vreinterpretq_s16_u16(vmovl_u8(v)));
    }
    // To 32 bits, and two rows of them, 32 bytes apart, to pairs of 16 bits.
    template <bool is_signed> static ints widened(const uint8_t * p) { return vmovl_s16(halves_of<is_signed>(p)); }
    template <bool is_signed> static ints byte_pairs(const uint8_t * p) {
        const int16x4x2_t both = vzip_s16(halves_of<is_signed>(p), halves_of<is_signed>(p + 32));
        return vreinterpretq_s32_s16(vcombine_s16(both.val[0], both.val[1]));
    }
    static ints add_pairs(ints sum, ints a, ints b) {
        const int16x8_t x = vreinterpretq_s16_s32(a), y = vreinterpretq_s16_s32(b);
        return vaddq_s32(sum, vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y)));
    }
    static ints add_product(ints sum, ints a, ints b) { return vmlaq_s32(sum, a, b); }
    // a - (b << by)
    template <int by> static ints less_shifted(ints a, ints b) { return vsubq_s32(a, vshlq_n_s32(b, by)); }

    static floats broadcast(float x) { return vdupq_n_f32(x); }
    static floats to_floats(ints x) { return vcvtq_f32_s32(x); }
    static floats mul(floats a, floats b) { return vmulq_f32(a, b); }
    static floats fma(floats a, floats b, floats c) { return vfmaq_f32(c, a, b); }
    static floats fms(floats a, floats b, floats c) { return vnegq_f32(vfmsq_f32(c, a, b)); }

    static void dot(ints & sum, ints w, ints x) { sum = vdotq_s32(sum, bytes(w), bytes(x)); }
    template <class Format>
    static void block(const uint8_t * panel, const uint8_t * scales, const k_record & r, int rows,
                      int32_t (*sums)[gemm_panel]) {
        k_block_of_dots<k_unit, Format>(panel, scales, r, rows, sums);
    }
};

} // namespace

void fill_gemm_neon_k(gemm_kernels & k) { fill_k_kernels<k_unit>(k, TILEBEAM_K_NAMES("32x4_neon")); }

} // namespace tb::npu
