// ADD_ID: each row plus the bias of the expert that made it. Indices come from the data, so each one is checked here.
#include "ops/ops.h"

namespace tb::npu {
namespace {

void add_id(const op_context & ctx) {
    const view & x = ctx.src[0];
    const view & biases = ctx.src[1];
    const view & ids = ctx.src[2];
    for (const int64_t r : ctx.share(x.rows())) {
        const row_index i = row_of(x, r);
        const int32_t id = ids.at<const int32_t>(i.i2)[i.i1];
        if (id < 0 || id >= biases.ne(1)) {
            ctx.fail(TB_E_BOUNDS, "ADD_ID: index out of range");
            return;
        }
        ctx.kernels->vec.add(x.ne(0), x.at<const float>(i.i1, i.i2, i.i3), biases.at<const float>(id),
                             ctx.dst.at<float>(i.i1, i.i2, i.i3));
    }
}

} // namespace

const op_entry add_id_entry = {add_id, nullptr, cut::rows};

} // namespace tb::npu
