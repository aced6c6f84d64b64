// SCALE: dst = x * scale + bias.
#include "ops/ops.h"

namespace tb::npu {
namespace {

void scale(const op_context & ctx) {
    const view & x = ctx.src[0];
    const view & dst = ctx.dst;
    const kernel_table & k = *ctx.kernels;
    int64_t first = 0;
    int64_t last = 0;
    ctx.share(dst.rows() * runs_per_row(dst), 1, &first, &last);
    float buffer[run_elements];
    for (int64_t item = first; item < last; item++) {
        const auto [i, at, n] = run_of(dst, item);
        const float * src = load_run(k, x, x.at<uint8_t>(i.i1, i.i2, i.i3), at, n, buffer);
        uint8_t * row = dst.at<uint8_t>(i.i1, i.i2, i.i3);
        float * out = run_target(dst, row, at, buffer);
        k.vec.scale(n, src, ctx.param_f(0), ctx.param_f(1), out);
        store_run(k, dst, row, at, n, out);
    }
}

} // namespace

const op_entry scale_entry = {scale, nullptr};

} // namespace tb::npu
