// CPY, CONT and DUP: all elements of src0 in order into dst, whatever the two shapes, strides and types. CONCAT and
// REPEAT: the same bytes in a larger tensor.
#include "ops/ops.h"

#include <algorithm>

namespace tb::npu {
namespace {

// Rows of the same shape on both sides, split over threads in runs.
void copy_rows(const op_context & ctx, const view & src, const view & dst) {
    for (const int64_t item : ctx.share(dst.rows() * runs_per_row(dst))) {
        const auto [i, at, n] = run_of(dst, item);
        copy_run(*ctx.kernels, src, src.at<uint8_t>(i.i1, i.i2, i.i3), at, dst, dst.at<uint8_t>(i.i1, i.i2, i.i3), at,
                 n);
    }
}

// Rows that lie crosswise (a transpose), or are short: squares of both sides stay in the cache.
constexpr int64_t square = 64;
constexpr int64_t short_row = 16;

template <class T> void transpose(const op_context & ctx, const view & src, const view & dst) {
    const int64_t squares0 = (dst.ne(0) + square - 1) / square;
    const int64_t squares1 = (dst.ne(1) + square - 1) / square;
    for (const int64_t item : ctx.share(squares0 * squares1 * dst.ne(2) * dst.ne(3))) {
        const int64_t plane = item / (squares0 * squares1);
        const int64_t i0 = item % squares0 * square;
        const int64_t i1 = item / squares0 % squares1 * square;
        const int64_t n0 = std::min(square, dst.ne(0) - i0);
        const int64_t n1 = std::min(square, dst.ne(1) - i1);
        const uint8_t * from = src.at<uint8_t>(i1, plane % dst.ne(2), plane / dst.ne(2)) + i0 * src.nb(0);
        uint8_t * to = dst.at<uint8_t>(i1, plane % dst.ne(2), plane / dst.ne(2)) + i0 * dst.nb(0);
        for (int64_t y = 0; y < n1; y++) {
            for (int64_t x = 0; x < n0; x++) {
                *reinterpret_cast<T *>(to + y * dst.nb(1) + x * dst.nb(0)) =
                    *reinterpret_cast<const T *>(from + y * src.nb(1) + x * src.nb(0));
            }
        }
    }
}

// All elements of src to those of dst, which has its shape, by all threads of an op.
void copy_same_shape(const op_context & ctx, const view & src, const view & dst) {
    const bool crosswise = !dense_rows(src) || !dense_rows(dst) || dst.ne(0) < short_row;
    if (!crosswise || src.type() != dst.type() || tb_type_block(src.type()) != 1) {
        return copy_rows(ctx, src, dst);
    }
    tb_type_size(src.type()) == 2 ? transpose<uint16_t>(ctx, src, dst) : transpose<uint32_t>(ctx, src, dst);
}

// Different shapes: each row of dst is filled from as many pieces of src rows as it spans.
void cpy_reshape(const op_context & ctx) {
    const view & src = ctx.src[0];
    const view & dst = ctx.dst;
    for (const int64_t r : ctx.share(dst.rows())) {
        const row_index to = row_of(dst, r);
        uint8_t * row = dst.at<uint8_t>(to.i1, to.i2, to.i3);
        const int64_t start = r * dst.ne(0);
        for (int64_t done = 0; done < dst.ne(0);) {
            const row_index from = row_of(src, (start + done) / src.ne(0));
            const int64_t at = (start + done) % src.ne(0);
            const int64_t n = std::min(dst.ne(0) - done, src.ne(0) - at);
            copy_run(*ctx.kernels, src, src.at<uint8_t>(from.i1, from.i2, from.i3), at, dst, row, done, n);
            done += n;
        }
    }
}

bool is_contiguous(const view & v) {
    uint64_t bytes = tb_type_size(v.type());
    for (int i = 0; i < 4; i++) {
        if (v.ne(i) > 1 && v.t->nb[i] != bytes) {
            return false;
        }
        bytes *= static_cast<uint64_t>(v.ne(i));
    }
    return tb_type_block(v.type()) == 1;
}

// The elements of v, which has no gaps, in another shape.
view shaped_as(const view & v, const view & other, tb_tensor & room) {
    room = *v.t;
    uint64_t bytes = tb_type_size(v.type());
    for (int i = 0; i < 4; i++) {
        room.ne[i] = other.t->ne[i];
        room.nb[i] = bytes;
        bytes *= room.ne[i];
    }
    view out = v;
    out.t = &room;
    return out;
}

void cpy(const op_context & ctx) {
    view src = ctx.src[0];
    view dst = ctx.dst;
    tb_tensor room;
    if (!std::equal(src.t->ne, src.t->ne + 4, dst.t->ne)) {
        if (is_contiguous(dst)) {
            dst = shaped_as(dst, src, room);
        } else if (is_contiguous(src)) {
            src = shaped_as(src, dst, room);
        } else {
            cpy_reshape(ctx);
            return;
        }
    }
    copy_same_shape(ctx, src, dst);
}

// dst is src0 and, along one dimension, src1 behind it. Bytes are copied as they are.
void concat(const op_context & ctx) {
    const int dim = ctx.param_i(0);
    int64_t at = 0;
    for (int i = 0; i < 2; i++) {
        const view & src = ctx.src[i];
        tb_tensor part = *ctx.dst.t; // of dst
        std::copy_n(src.t->ne, 4, part.ne);
        view dst;
        dst.t = &part;
        dst.data = ctx.dst.data + at * ctx.dst.nb(dim);
        if (src.ne(0) * src.rows() != 0) {
            copy_same_shape(ctx, src, dst);
        }
        at += src.ne(dim);
    }
}

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

// dst is src0, repeated in every dimension as often as it fits. Bytes are copied as they are.
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

const op_entry cpy_entry = {cpy, nullptr};
const op_entry concat_entry = {concat, nullptr};
const op_entry repeat_entry = {repeat, nullptr, cut::runs};

} // namespace tb::npu
