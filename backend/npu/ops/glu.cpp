// GLU: dst = act(gate) * up. Gate and up are two tensors, or the two halves of each row of one (up first if swapped).
#include "ops/ops.h"

namespace tb::npu {
namespace {

void glu(const op_context & ctx) {
    const view & a = ctx.src[0];
    const view & b = ctx.src[1];
    const view & dst = ctx.dst;
    const kernel_table & k = *ctx.kernels;
    const auto act = k.vec.glu[ctx.param_i(0)];
    const int64_t half = dst.ne(0);
    const int64_t gate_at = !b && ctx.param_i(1) != 0 ? half : 0;
    const int64_t up_at = b || gate_at != 0 ? 0 : half;
    const view & up = b ? b : a;
    float gate_buffer[run_elements];
    float up_buffer[run_elements];
    for (const int64_t item : ctx.share_runs(dst)) {
        const auto [i, at, n] = run_of(dst, item);
        const float * x = load_run(k, a, a.at<uint8_t>(i.i1, i.i2, i.i3), gate_at + at, n, gate_buffer);
        const float * y = load_run(k, up, up.at<uint8_t>(i.i1, i.i2, i.i3), up_at + at, n, up_buffer);
        uint8_t * row = dst.at<uint8_t>(i.i1, i.i2, i.i3);
        float * out = run_target(dst, row, at, gate_buffer);
        act(n, x, y, ctx.param_f(2), ctx.param_f(3), out);
        store_run(k, dst, row, at, n, out);
    }
}

} // namespace

const op_entry glu_entry = {glu, nullptr, cut::runs};

} // namespace tb::npu
