// MUL, ADD, SUB and DIV: dst = src0 op src1, src1 repeated into src0's shape. Any mix of F32, F16 and BF16, any
// strides.
#include "ops/ops.h"

namespace tb::npu {
namespace {

using binary_kernel = void (*)(int64_t n, const float * a, const float * b, float * dst);

// src1's part of a run: element j of the run is element (first + j) % ne[0] of its row.
const float * load_repeated(const kernel_table & k, const view & b, const uint8_t * row, int64_t first, int64_t n,
                            float * buffer) {
    const int64_t period = b.ne(0);
    int64_t at = first % period;
    if (at + n <= period) {
        return load_run(k, b, row, at, n, buffer);
    }
    if (period == 1) {
        const float x = *load_run(k, b, row, 0, 1, buffer);
        for (int64_t j = 0; j < n; j++) {
            buffer[j] = x;
        }
        return buffer;
    }
    for (int64_t j = 0; j < n;) {
        const int64_t m = n - j < period - at ? n - j : period - at;
        const float * x = load_run(k, b, row, at, m, buffer + j);
        if (x != buffer + j) {
            k.vec.to_f32[TB_F32](m, x, buffer + j);
        }
        j += m;
        at = 0;
    }
    return buffer;
}

void binary(const op_context & ctx, binary_kernel kernel) {
    const view & a = ctx.src[0];
    const view & b = ctx.src[1];
    const view & dst = ctx.dst;
    const kernel_table & k = *ctx.kernels;
    float buffer_a[run_elements];
    float buffer_b[run_elements];
    float buffer_dst[run_elements];
    for (const int64_t item : ctx.share_runs(dst)) {
        const auto [i, at, n] = run_of(dst, item);
        const float * x = load_run(k, a, a.at<uint8_t>(i.i1, i.i2, i.i3), at, n, buffer_a);
        const uint8_t * row_b = b.at<uint8_t>(i.i1 % b.ne(1), i.i2 % b.ne(2), i.i3 % b.ne(3));
        const float * y = load_repeated(k, b, row_b, at, n, buffer_b);
        uint8_t * row = dst.at<uint8_t>(i.i1, i.i2, i.i3);
        float * z = run_target(dst, row, at, buffer_dst);
        kernel(n, x, y, z);
        store_run(k, dst, row, at, n, z);
    }
}

void mul(const op_context & ctx) { binary(ctx, ctx.kernels->vec.mul); }
void add(const op_context & ctx) { binary(ctx, ctx.kernels->vec.add); }

// On no hot path: the compiler's own vectors will do.
void sub_run(int64_t n, const float * a, const float * b, float * dst) {
    for (int64_t i = 0; i < n; i++) {
        dst[i] = a[i] - b[i];
    }
}

void div_run(int64_t n, const float * a, const float * b, float * dst) {
    for (int64_t i = 0; i < n; i++) {
        dst[i] = a[i] / b[i];
    }
}

void sub(const op_context & ctx) { binary(ctx, sub_run); }
void div(const op_context & ctx) { binary(ctx, div_run); }

} // namespace

const op_entry mul_entry = {mul, nullptr, cut::runs};
const op_entry add_entry = {add, nullptr, cut::runs};
const op_entry sub_entry = {sub, nullptr, cut::runs};
const op_entry div_entry = {div, nullptr, cut::runs};

} // namespace tb::npu
