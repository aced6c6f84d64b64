// SOFT_MAX: dst = softmax(x * scale + slope * mask) along rows, with an optional sink per head in the denominator.
#include "ops/ops.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tb::npu {
namespace {

void soft_max(const op_context & ctx) {
    const view & x = ctx.src[0];
    const view & mask = ctx.src[1];
    const view & sinks = ctx.src[2];
    const view & dst = ctx.dst;
    const kernel_table & k = *ctx.kernels;
    const float scale = ctx.param_f(0);
    const float max_bias = ctx.param_f(1);
    const int64_t n = x.ne(0);
    float buffer[run_elements];
    float bias[run_elements];
    for (const int64_t r : ctx.share(x.rows())) {
        const row_index i = row_of(x, r);
        const float * src = x.at<const float>(i.i1, i.i2, i.i3);
        float * out = dst.at<float>(i.i1, i.i2, i.i3);
        if (mask) {
            const float slope = alibi_slope(max_bias, i.i2, x.ne(2));
            const uint8_t * mask_row = mask.at<uint8_t>(i.i1, i.i2 % mask.ne(2), i.i3 % mask.ne(3));
            // Both operands of a run are read before it is written: dst may take the place of either.
            for (int64_t at = 0; at < n; at += run_elements) {
                const int64_t m = std::min(n - at, run_elements);
                k.vec.scale(m, load_run(k, mask, mask_row, at, m, buffer), slope, 0.0f, bias);
                k.vec.scale(m, src + at, scale, 0.0f, out + at);
                k.vec.add(m, out + at, bias, out + at);
            }
        } else {
            k.vec.scale(n, src, scale, 0.0f, out);
        }
        float max = k.vec.max(n, out);
        const float sink = sinks ? sinks.at<const float>(0)[i.i2] : -std::numeric_limits<float>::infinity();
        max = std::max(max, sink);
        if (max == -std::numeric_limits<float>::infinity()) {
            // Nothing to attend to; or no numbers, which the maximum passes over, and of which somebody must hear.
            const bool masked = std::none_of(out, out + n, [](float v) { return std::isnan(v); });
            std::fill(out, out + n, masked ? 0.0f : std::numeric_limits<float>::quiet_NaN());
            continue;
        }
        float sum = k.vec.exp_sum(n, out, max);
        if (sinks) {
            sum += std::exp(sink - max);
        }
        k.vec.scale(n, out, 1.0f / sum, 0.0f, out);
    }
}

} // namespace

const op_entry soft_max_entry = {soft_max, nullptr, cut::rows};

} // namespace tb::npu
