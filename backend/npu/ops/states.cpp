// See states.h.
#include "ops/states.h"

#include <algorithm>

namespace tb::npu {

sequence_states::sequence_states(const op_context & of, int states, int counted, int which, int64_t n_sequences)
    : ctx(of), operand(states), dim(counted), sequences(n_sequences), first(of.param_i(1) - 1),
      numbers(of.src[which] ? of.src[which].at<const int32_t>(0) : nullptr), shape(*of.src[states].t),
      now(of.src[states]), stride(now.nb(counted) / static_cast<int64_t>(sizeof(float))) {}

bool sequence_states::begin(float * aside) {
    const int64_t n_states = now.ne(dim);
    bool collides = false;
    for (int64_t s = 0; s < sequences; s++) {
        const int64_t i = index(s);
        if (i < 0 || i >= n_states) {
            ctx.fail(TB_E_BOUNDS, dim == 2       ? "SSM_CONV: index of a state out of range"
                                  : operand == 0 ? "SSM_SCAN: index of a state out of range"
                                                 : "GATED_DELTA_NET: index of a state out of range");
            return false;
        }
        collides = collides || (in_place() && i >= first && i < first + sequences && i != first + s);
    }
    if (collides) {
        put_aside(aside);
    }
    return true;
}

void sequence_states::put_aside(float * aside) {
    const int64_t n = now.ne(0);
    const int64_t planes = dim == 3 ? now.ne(2) : 1;
    const int64_t rows = now.ne(1) * planes;
    for (const int64_t item : ctx.share(rows * sequences)) {
        const int64_t row = item % rows;
        std::copy_n(from(row % now.ne(1), row / now.ne(1), item / rows), n, aside + item * n);
    }
    ctx.barrier();
    now.data = reinterpret_cast<uint8_t *>(aside);
    now.t = &shape;
    shape.nb[1] = static_cast<uint64_t>(n) * sizeof(float);
    shape.nb[2] = shape.nb[1] * shape.ne[1];
    stride = n * rows;
    numbers = nullptr;
}

} // namespace tb::npu
