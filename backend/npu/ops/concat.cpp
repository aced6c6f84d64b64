// CONCAT: dst is src0 and, along one dimension, src1 behind it. Bytes are copied as they are.
#include "ops/ops.h"

#include <algorithm>

namespace tb::npu {
namespace {

// Elements [at, at + n) of a row of which the first ones are src0's.
void along_rows(const op_context & ctx, const run_item & run) {
    const view & a = ctx.src[0];
    const view & b = ctx.src[1];
    const auto [i, at, n] = run;
    uint8_t * row = ctx.dst.at<uint8_t>(i.i1, i.i2, i.i3);
    const int64_t from_a = std::min(n, std::max(int64_t{0}, a.ne(0) - at));
    if (from_a > 0) {
        copy_run(*ctx.kernels, a, a.at<const uint8_t>(i.i1, i.i2, i.i3), at, ctx.dst, row, at, from_a);
    }
    if (from_a < n) {
        copy_run(*ctx.kernels, b, b.at<const uint8_t>(i.i1, i.i2, i.i3), at + from_a - a.ne(0), ctx.dst, row,
                 at + from_a, n - from_a);
    }
}

void concat(const op_context & ctx) {
    const view & dst = ctx.dst;
    const int dim = ctx.param_i(0);
    for (const int64_t item : ctx.share_runs(dst)) {
        const run_item run = run_of(dst, item);
        if (dim == 0) {
            along_rows(ctx, run);
            continue;
        }
        const auto [i, at, n] = run;
        int64_t index[4] = {0, i.i1, i.i2, i.i3};
        const int64_t of_a = ctx.src[0].ne(dim);
        const bool is_b = index[dim] >= of_a;
        const view & src = ctx.src[is_b ? 1 : 0];
        index[dim] -= is_b ? of_a : 0;
        copy_run(*ctx.kernels, src, src.at<const uint8_t>(index[1], index[2], index[3]), at, dst,
                 dst.at<uint8_t>(i.i1, i.i2, i.i3), at, n);
    }
}

} // namespace

const op_entry concat_entry = {concat, nullptr, cut::runs};

} // namespace tb::npu
