// REPEAT: dst is src0, repeated in every dimension as often as it fits. Bytes are copied as they are.
#include "ops/ops.h"

#include <algorithm>

namespace tb::npu {
namespace {

// Rows of one element: the same element everywhere, which is a row with no way from one element to the next.
void spread(const kernel_table & k, const view & x, const uint8_t * from, const view & dst, uint8_t * row, int64_t at,
            int64_t n) {
    tb_tensor still = *x.t;
    still.ne[0] = dst.t->ne[0];
    still.nb[0] = 0;
    view v;
    v.t = &still;
    copy_run(k, v, from, 0, dst, row, at, n);
}

void repeat(const op_context & ctx) {
    const view & x = ctx.src[0];
    const view & dst = ctx.dst;
    const kernel_table & k = *ctx.kernels;
    const int64_t period = x.ne(0);
    for (const int64_t item : ctx.share_runs(dst)) {
        const auto [i, at, n] = run_of(dst, item);
        const uint8_t * from = x.at<const uint8_t>(i.i1 % x.ne(1), i.i2 % x.ne(2), i.i3 % x.ne(3));
        uint8_t * row = dst.at<uint8_t>(i.i1, i.i2, i.i3);
        if (period == 1) {
            spread(k, x, from, dst, row, at, n);
            continue;
        }
        for (int64_t done = 0; done < n;) {
            const int64_t start = (at + done) % period;
            const int64_t m = std::min(n - done, period - start);
            copy_run(k, x, from, start, dst, row, at + done, m);
            done += m;
        }
    }
}

} // namespace

const op_entry repeat_entry = {repeat, nullptr, cut::runs};

} // namespace tb::npu
