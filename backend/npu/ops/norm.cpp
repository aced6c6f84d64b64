// Norms of rows. RMS_NORM: dst = x / sqrt(mean(x^2) + eps). NORM: the same of x - mean(x). L2_NORM: dst = x /
// max(|x|, eps). Rows may be strided (one per head of a larger tensor). The executor's schedule may give a norm more
// operands, of which rows repeat: src[1], which dst is multiplied by, and src[2], which is then added.
#include "ops/ops.h"

#include <algorithm>
#include <cmath>

namespace tb::npu {
namespace {

// In double, and in lanes, which compilers turn into vectors.
float mean_of(int64_t n, const float * x) {
    constexpr int64_t lanes = 8;
    double sums[lanes] = {};
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) {
        for (int64_t j = 0; j < lanes; j++) {
            sums[j] += static_cast<double>(x[i + j]);
        }
    }
    for (int64_t j = 0; i < n; i++, j++) {
        sums[j] += static_cast<double>(x[i]);
    }
    double sum = 0;
    for (const double s : sums) {
        sum += s;
    }
    return static_cast<float>(sum / static_cast<double>(n));
}

const float * repeated(const view & v, const row_index & i) {
    return v.at<const float>(i.i1 % v.ne(1), i.i2 % v.ne(2), i.i3 % v.ne(3));
}

// row(n, x, dst) for each row, then the operands that were fused.
template <class Row> void each_row(const op_context & ctx, const Row & row) {
    const view & x = ctx.src[0];
    const view & factors = ctx.src[1];
    const view & bias = ctx.src[2];
    const int64_t n = x.ne(0);
    const vec_kernels & vec = ctx.kernels->vec;
    for (const int64_t r : ctx.share(x.rows())) {
        const row_index i = row_of(x, r);
        float * dst = ctx.dst.at<float>(i.i1, i.i2, i.i3);
        row(n, x.at<const float>(i.i1, i.i2, i.i3), dst);
        if (factors) {
            vec.mul(n, dst, repeated(factors, i), dst);
        }
        if (bias) {
            vec.add(n, dst, repeated(bias, i), dst);
        }
    }
}

void rms_norm(const op_context & ctx) {
    const vec_kernels & vec = ctx.kernels->vec;
    const float eps = ctx.param_f(0);
    each_row(ctx, [&](int64_t n, const float * x, float * dst) {
        const float mean = vec.sum_squares(n, x) / static_cast<float>(n);
        vec.scale(n, x, 1.0f / std::sqrt(mean + eps), 0.0f, dst);
    });
}

void norm(const op_context & ctx) {
    const vec_kernels & vec = ctx.kernels->vec;
    const float eps = ctx.param_f(0);
    each_row(ctx, [&](int64_t n, const float * x, float * dst) {
        vec.scale(n, x, 1.0f, -mean_of(n, x), dst);
        const float variance = vec.sum_squares(n, dst) / static_cast<float>(n);
        vec.scale(n, dst, 1.0f / std::sqrt(variance + eps), 0.0f, dst);
    });
}

void l2_norm(const op_context & ctx) {
    const vec_kernels & vec = ctx.kernels->vec;
    const float eps = ctx.param_f(0);
    each_row(ctx, [&](int64_t n, const float * x, float * dst) {
        vec.scale(n, x, 1.0f / std::max(std::sqrt(vec.sum_squares(n, x)), eps), 0.0f, dst);
    });
}

} // namespace

const op_entry rms_norm_entry = {rms_norm, nullptr, cut::rows};
const op_entry norm_entry = {norm, nullptr, cut::rows};
const op_entry l2_norm_entry = {l2_norm, nullptr, cut::rows};

} // namespace tb::npu
