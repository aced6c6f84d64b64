// RMS_NORM: dst = x / sqrt(mean(x^2) + eps), row by row. Rows may be strided (one per head of a larger tensor). The
// executor's schedule may give it a second operand, which dst is multiplied by and of which rows repeat.
#include "ops/ops.h"

#include <cmath>

namespace tb::npu {
namespace {

void rms_norm(const op_context & ctx) {
    const view & x = ctx.src[0];
    const view & weights = ctx.src[1];
    const float eps = ctx.param_f(0);
    const int64_t n = x.ne(0);
    const vec_kernels & vec = ctx.kernels->vec;
    int64_t first = 0;
    int64_t last = 0;
    ctx.share(x.rows(), 1, &first, &last);
    for (int64_t r = first; r < last; r++) {
        const row_index i = row_of(x, r);
        const float * src = x.at<const float>(i.i1, i.i2, i.i3);
        const float mean = vec.sum_squares(n, src) / static_cast<float>(n);
        float * dst = ctx.dst.at<float>(i.i1, i.i2, i.i3);
        vec.scale(n, src, 1.0f / std::sqrt(mean + eps), 0.0f, dst);
        if (weights) {
            vec.mul(n, dst, weights.at<const float>(i.i1 % weights.ne(1), i.i2 % weights.ne(2), i.i3 % weights.ne(3)),
                    dst);
        }
    }
}

} // namespace

const op_entry rms_norm_entry = {rms_norm, nullptr, cut::rows};

} // namespace tb::npu
