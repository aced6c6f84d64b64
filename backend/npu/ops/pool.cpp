// POOL_2D: each element of dst is the largest, or the mean, of a rectangle of src0. What is outside of src0 counts as
// nothing; a mean is over the whole rectangle even so.
#include "ops/ops.h"

#include <algorithm>
#include <limits>

namespace tb::npu {
namespace {

// Elements of a dimension that a rectangle covers.
range covered(const op_context & ctx, int d, int64_t i) {
    const int64_t start = i * ctx.param_i(3 + d) - ctx.param_i(5 + d);
    return {std::max(int64_t{0}, start), std::min(ctx.src[0].ne(d), start + ctx.param_i(1 + d))};
}

// Goes on with `result` over elements of a row.
float pool_row(const op_context & ctx, const uint8_t * row, range x, bool is_max, float result) {
    float buffer[run_elements];
    for (int64_t at = x.first; at < x.last; at += run_elements) {
        const int64_t n = std::min(run_elements, x.last - at);
        const float * values = load_run(*ctx.kernels, ctx.src[0], row, at, n, buffer);
        for (int64_t i = 0; i < n; i++) {
            result = is_max ? std::max(values[i], result) : result + values[i];
        }
    }
    return result;
}

void pool_2d(const op_context & ctx) {
    const view & x = ctx.src[0];
    const bool is_max = ctx.param_i(0) == 0;
    const float area = static_cast<float>(int64_t{ctx.param_i(1)} * ctx.param_i(2));
    for (const int64_t r : ctx.share(ctx.dst.rows())) {
        const row_index i = row_of(ctx.dst, r);
        const range rows = covered(ctx, 1, i.i1);
        float * out = ctx.dst.at<float>(i.i1, i.i2, i.i3);
        for (int64_t j = 0; j < ctx.dst.ne(0); j++) {
            float result = is_max ? -std::numeric_limits<float>::max() : 0.0f;
            for (const int64_t y : rows) {
                result = pool_row(ctx, x.at<const uint8_t>(y, i.i2, i.i3), covered(ctx, 0, j), is_max, result);
            }
            out[j] = is_max ? result : result / area;
        }
    }
}

} // namespace

const op_entry pool_2d_entry = {pool_2d, nullptr};

} // namespace tb::npu
