// Softmax of FlashAttention on HVX: the exponent by vgather, and FP16 <-> float around it. Scores and accumulation in
// float32 are the portable ones: v66 has no HVX floating point. Those of the FP16 numerics are attention_fp16.cpp's.
#include "kernels/attention.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/hvx/exponent.h"

namespace tb::npu {

namespace hvx {

void exp2_vectors(const uint16_t * table, const uint16_t * x, uint32_t n, uint16_t * out) {
    for (; n != 0; n--, x += 64, out += 64)
        exp2_gather(table, load_aligned(x), out);
}

} // namespace hvx

namespace {

using namespace hvx;

constexpr float log2e = 1.4426950408889634f;

const attention_kernels & portable() {
    static const attention_kernels set = [] {
        attention_kernels k{};
        fill_attention_portable(k);
        return k;
    }();
    return set;
}

// The same values in the same order as the portable kernel, so the same bits.
void softmax_row(const attention_softmax_args & a, int row) {
    const float inf = std::numeric_limits<float>::infinity();
    float * scores = a.s + row * attention_tile_cells;
    const float old_max = a.max[row];
    float max = old_max;
    alignas(128) float s[attention_tile_cells];
    for (int c = 0; c < attention_tile_cells; c++)
        s[c] = -inf;
    for (int c = 0; c < a.cells; c++) {
        if ((a.visible >> c) & 1) {
            float v = scores[c] * a.scale;
            if (a.softcap != 0.0f) v = a.softcap * std::tanh(v / a.softcap);
            if (a.bias != nullptr) v += a.bias[c];
            s[c] = v;
            max = v > max ? v : max;
        }
    }
    const float base = std::max(max, attention_least_base);
    for (float & v : s)
        v = (v - base) * log2e;
    const HVX_Vector low = float_to_half(load_aligned(s)), high = float_to_half(load_aligned(s + 32));
    alignas(128) uint16_t p[attention_tile_cells];
    exp2_gather(attention_exp2_table(), Q6_Vh_vpacke_VwVw(high, low), p);
    const HVX_VectorPair words = Q6_Wuw_vunpack_Vuh(load_aligned(p));
    store_aligned(s, half_to_float(Q6_V_lo_W(words)));
    store_aligned(s + 32, half_to_float(Q6_V_hi_W(words)));
    float sum = 0.0f;
    for (int c = 0; c < a.cells; c++) {
        scores[c] = s[c];
        sum += s[c];
    }
    a.alpha[row] = std::exp2((old_max - base) * log2e);
    a.max[row] = max;
    float * sums = a.sum + row * attention_sum_parts; // only the first part is used, as in the portable kernel
    *sums = *sums * a.alpha[row] + sum;
}

// Float32 exponentials are left to the portable kernel.
void softmax(const attention_softmax_args & a) {
    if (a.exact) return portable().softmax(a);
    for (int r = 0; r < a.rows; r++)
        softmax_row(a, r);
}

// Positive inputs count as 0; a positive NaN is one.
void exp2_fp16(const uint16_t * in, uint16_t * out, size_t n) {
    const uint16_t * table = attention_exp2_table();
    alignas(128) uint16_t x[64] = {};
    alignas(128) uint16_t y[64];
    for (size_t i = 0; i < n; i += 64) {
        const size_t bytes = (n - i < 64 ? n - i : 64) * sizeof(uint16_t);
        std::memcpy(x, in + i, bytes);
        const HVX_Vector v = load_aligned(x);
        const HVX_VectorPred above = Q6_Q_vcmp_gt_VhVh(v, halves(0));
        const HVX_VectorPred positive = Q6_Q_and_QQn(above, Q6_Q_vcmp_gt_VhVh(v, halves(0x7c00)));
        exp2_gather(table, Q6_V_vmux_QVV(positive, halves(0), v), y);
        std::memcpy(out + i, y, bytes);
    }
}

} // namespace

void fill_attention_hvx_fp16(attention_kernels & k);

void fill_attention_hvx(attention_kernels & k) {
    k.name = "attention_f16_1x64_hvx";
    k.softmax = softmax;
    k.exp2_fp16 = exp2_fp16;
    fill_attention_hvx_fp16(k);
}

} // namespace tb::npu
