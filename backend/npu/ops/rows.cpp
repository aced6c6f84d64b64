// GET_ROWS and SET_ROWS: rows picked from, or put into, a tensor by index. ADD_ID: each row plus the bias of the expert
// that made it. Indices come from the data, so each one is checked here; a bad one fails the op and touches nothing.
#include "ops/ops.h"

#include <cstring>

namespace tb::npu {
namespace {

int64_t read_index(const view & indices, int64_t i0, int64_t i1, int64_t i2) {
    const uint8_t * p = indices.data + i0 * indices.nb(0) + i1 * indices.nb(1) + i2 * indices.nb(2);
    if (indices.type() == TB_I64) {
        int64_t index;
        std::memcpy(&index, p, sizeof(index));
        return index;
    }
    int32_t index;
    std::memcpy(&index, p, sizeof(index));
    return index;
}

// dst[:, i10, i11, i12] = src0[:, indices[i10, i11, i12], i11, i12]
void get_rows(const op_context & ctx) {
    const view & src = ctx.src[0];
    const view & indices = ctx.src[1];
    const view & dst = ctx.dst;
    for (const int64_t r : ctx.share(dst.rows())) {
        const row_index i = row_of(dst, r);
        const int64_t index = read_index(indices, i.i1, i.i2, i.i3);
        if (index < 0 || index >= src.ne(1)) {
            ctx.fail(TB_E_BOUNDS, "GET_ROWS: row index out of range");
            return;
        }
        copy_run(*ctx.kernels, src, src.at<uint8_t>(index, i.i2, i.i3), 0, dst, dst.at<uint8_t>(i.i1, i.i2, i.i3), 0,
                 src.ne(0));
    }
}

// dst[:, indices[i1, i2 % ., i3 % .], i2, i3] = src0[:, i1, i2, i3]
void set_rows(const op_context & ctx) {
    const view & src = ctx.src[0];
    const view & indices = ctx.src[1];
    const view & dst = ctx.dst;
    // Rows of one number, as many as a vocabulary has where a draft head's logits are put in place.
    const bool numbers = src.ne(0) == 1 && src.type() == TB_F32 && dst.type() == TB_F32;
    for (const int64_t r : ctx.share(src.rows())) {
        const row_index i = row_of(src, r);
        const int64_t index = read_index(indices, i.i1, i.i2 % indices.ne(1), i.i3 % indices.ne(2));
        if (index < 0 || index >= dst.ne(1)) {
            ctx.fail(TB_E_BOUNDS, "SET_ROWS: row index out of range");
            return;
        }
        if (numbers) {
            *dst.at<float>(index, i.i2, i.i3) = *src.at<float>(i.i1, i.i2, i.i3);
            continue;
        }
        copy_run(*ctx.kernels, src, src.at<uint8_t>(i.i1, i.i2, i.i3), 0, dst, dst.at<uint8_t>(index, i.i2, i.i3), 0,
                 src.ne(0));
    }
}

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

const op_entry get_rows_entry = {get_rows, nullptr};
const op_entry set_rows_entry = {set_rows, nullptr};
const op_entry add_id_entry = {add_id, nullptr}; // not cut::rows: its biases are those of any row

} // namespace tb::npu
