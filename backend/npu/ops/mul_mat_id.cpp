// MUL_MAT_ID: each row names its matrix (its expert). Rows are sorted by matrix first; then the rows of each matrix go
// the way that as many rows of a MUL_MAT go, one matrix after the other.
//
// Scratch: what a MUL_MAT of all rows would convert, and its stages, then where each matrix's rows start, then the
// rows.
#include <algorithm>
#include <cstring>

#include "ops/mul_mat.h"

namespace tb::npu {

namespace {

uint64_t bytes_of(const mul_mat_plan & p, int n_threads) {
    return static_cast<uint64_t>(p.converted_bytes() + n_threads * p.stage);
}

uint64_t scratch_bytes_id(const tb_op & op, int n_threads, const kernel_table & kernels) {
    const uint64_t starts = (uint64_t{op.src[0].ne[2]} + 2) * sizeof(int64_t);
    return bytes_of(plan_mul_mat_id(op, n_threads, kernels), n_threads) + starts +
           static_cast<uint64_t>(picked_rows(op)) * sizeof(picked_row);
}

int32_t read_id(const view & ids, int64_t i, int64_t t) {
    int32_t id;
    std::memcpy(&id, ids.data + i * ids.nb(0) + t * ids.nb(1), sizeof id);
    return id;
}

// Sort the rows by matrix, stably. starts[e] is where matrix e's rows begin, starts[n] their number. The indices come
// from data that may change meanwhile, so each is read once and what was read decides. False: one names no matrix.
bool sort_rows(const view & ids, int64_t n, int64_t * starts, picked_row * rows, int64_t capacity) {
    std::fill(starts, starts + n + 2, 0);
    for (int64_t t = 0; t < ids.ne(1); t++) {
        for (int64_t i = 0; i < ids.ne(0); i++) {
            const int32_t id = read_id(ids, i, t);
            if (id < 0 || id >= n) return false;
            starts[id + 2]++;
        }
    }
    for (int64_t e = 0; e < n; e++)
        starts[e + 2] += starts[e + 1];
    int64_t placed = 0;
    for (int64_t t = 0; t < ids.ne(1); t++) {
        for (int64_t i = 0; i < ids.ne(0); i++) {
            const int32_t id = read_id(ids, i, t);
            if (id < 0 || id >= n || starts[id + 1] >= capacity) return false;
            rows[starts[id + 1]++] = {static_cast<uint32_t>(i), static_cast<uint32_t>(t)};
            placed++;
        }
    }
    return placed == capacity;
}

void run_id(const op_context & ctx) {
    const int64_t experts = ctx.src[0].ne(2), all = picked_rows(*ctx.op);
    uint8_t * after = ctx.scratch + bytes_of(plan_mul_mat_id(*ctx.op, ctx.n_threads, *ctx.kernels), ctx.n_threads);
    int64_t * starts = reinterpret_cast<int64_t *>(after);
    picked_row * rows = reinterpret_cast<picked_row *>(starts + experts + 2);
    if (ctx.thread == 0 && !sort_rows(ctx.src[2], experts, starts, rows, all)) {
        starts[0] = -1;
        ctx.fail(TB_E_BOUNDS, "MUL_MAT_ID: matrix index out of range");
    }
    ctx.barrier();
    if (starts[0] < 0) return;
    op_context one = ctx;
    one.prepared = ctx.scratch;
    for (int64_t e = 0; e < experts; e++) {
        const int64_t count = starts[e + 1] - starts[e];
        if (count == 0) continue;
        mul_mat_plan p = plan_mul_mat(*ctx.op, 1, count, ctx.n_threads, *ctx.kernels);
        p.expert = e;
        p.picked = rows + starts[e];
        if (converts_activations(*ctx.op, p)) {
            convert_activations(one, p);
            ctx.barrier();
        }
        multiply(one, p, ctx.scratch + p.converted_bytes());
        ctx.barrier(); // the next matrix's rows are converted into the same scratch
        if (ctx.thread == 0) ctx.reset_chunks();
        ctx.barrier();
    }
}

} // namespace

const op_entry mul_mat_id_entry = {run_id, scratch_bytes_id, cut::any, true, nullptr};

} // namespace tb::npu
