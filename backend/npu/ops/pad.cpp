// PAD: dst holds src0 with zeros around it, or src0 repeated around it as on a torus.
#include "ops/ops.h"

#include <algorithm>

namespace tb::npu {
namespace {

// Where dimension d's element i of dst comes from; -1: a zero.
int64_t source_of(const op_context & ctx, int d, int64_t i) {
    const int64_t n = ctx.src[0].ne(d);
    const int64_t at = i - ctx.param_i(2 * d);
    if (ctx.param_i(8) != 0) {
        return (at % n + n) % n;
    }
    return at >= 0 && at < n ? at : -1;
}

void pad(const op_context & ctx) {
    const view & x = ctx.src[0];
    const view & dst = ctx.dst;
    const int64_t n = dst.ne(0);
    for (const int64_t r : ctx.share(dst.rows())) {
        const row_index i = row_of(dst, r);
        float * out = dst.at<float>(i.i1, i.i2, i.i3);
        const int64_t i1 = source_of(ctx, 1, i.i1);
        const int64_t i2 = source_of(ctx, 2, i.i2);
        const int64_t i3 = source_of(ctx, 3, i.i3);
        if (i1 < 0 || i2 < 0 || i3 < 0) {
            std::fill(out, out + n, 0.0f);
            continue;
        }
        const float * row = x.at<const float>(i1, i2, i3);
        for (int64_t j = 0; j < n; j++) {
            const int64_t i0 = source_of(ctx, 0, j);
            out[j] = i0 < 0 ? 0.0f : row[i0];
        }
    }
}

} // namespace

const op_entry pad_entry = {pad, nullptr};

} // namespace tb::npu
