// Attention's products of many rows in BF16 on bfdot: the shared ones over 4 lanes.
#include "kernels/neon/simd.h"

namespace tb::npu {
namespace {

struct bf16 {
    using vec = bfloat16x8_t;

    static vec round(simd::vec low, simd::vec high) { return vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high); }
    static vec alternate(simd::vec low, simd::vec high) { return round(vzip1q_f32(low, high), vzip2q_f32(low, high)); }
    static vec load(const uint32_t * pairs) { return vreinterpretq_bf16_u32(vld1q_u32(pairs)); }
    static vec all(const uint32_t * pair) { return vreinterpretq_bf16_u32(vld1q_dup_u32(pair)); }
    static void store(uint32_t * pairs, vec x) { vst1q_u32(pairs, vreinterpretq_u32_bf16(x)); }
    static simd::vec as_floats(vec x) { return vreinterpretq_f32_bf16(x); }
    static simd::vec add(simd::vec sum, vec a, vec b) { return vbfdotq_f32(sum, a, b); }
};

} // namespace
} // namespace tb::npu

#include "kernels/attention_bf16_simd.h"

namespace tb::npu {

void fill_attention_i8mm(attention_kernels & k) {
    k.name = "attention_f16_6x16_bf16";
    k.bf16 = {{scores_bf16, accumulate_bf16}, fewest_rows};
}

} // namespace tb::npu
