// See states.h.
#include "ops/states.h"

#include <algorithm>
#include <cstdio>

namespace tb::npu {

sequence_states::sequence_states(const op_context & of, int states, int counted, int which, int64_t n_sequences)
    : ctx(of), operand(states), dim(counted), sequences(n_sequences), first(of.param_i(1) - 1),
      numbers(of.src[which] ? of.src[which].at<const int32_t>(0) : nullptr), shape(*of.src[states].t),
      now(of.src[states]), stride(now.nb(counted) / static_cast<int64_t>(sizeof(float))) {}

bool sequence_states::begin(float * aside, uint8_t * copy) {
    verdict found = fine;
    if (numbers) {
        auto * const read = reinterpret_cast<int32_t *>(copy);
        if (ctx.thread == 0) {
            std::copy_n(numbers, sequences, read);
            numbers = read;
            read[sequences] = look();
        }
        ctx.barrier();
        numbers = read;
        found = static_cast<verdict>(read[sequences]);
    } else {
        found = look();
    }
    if (found == out_of_range) {
        char why[64];
        std::snprintf(why, sizeof why, "%s: index of a state out of range", tb_op_name(ctx.op->code));
        ctx.fail(TB_E_BOUNDS, why);
        return false;
    }
    if (found == collide) {
        put_aside(aside);
    }
    return true;
}

sequence_states::verdict sequence_states::look() const {
    verdict found = fine;
    for (int64_t s = 0; s < sequences; s++) {
        const int64_t i = index(s);
        if (i < 0 || i >= now.ne(dim)) {
            return out_of_range;
        }
        if (in_place() && i >= first && i < first + sequences && i != first + s) {
            found = collide;
        }
    }
    return found;
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
