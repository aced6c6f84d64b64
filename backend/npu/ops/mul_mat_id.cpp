// MUL_MAT_ID: each row names its matrix (its expert).
//
// Activations of integer products are converted before the op, each row once and as a group of its own; ops on the same
// rows (gate and up) share them. Each thread sorts the rows by matrix for itself, which takes less time than to wait
// for one that does. The list of all panels that meet rows, one matrix after the other, is handed out in chunks that
// shrink: with few rows the weights come from memory, where each begin of a stream is a wait, and large chunks have
// fewer. Of each matrix in its chunk a thread puts the rows together to groups, once, and multiplies them the way that
// as many rows of a MUL_MAT go.
#include <algorithm>
#include <cstring>

#include "ops/mul_mat.h"

namespace tb::npu {

namespace {

constexpr int64_t most_rows = 128;        // of an item
constexpr int64_t most_bytes = 512 << 10; // of its groups, if more than one: half of L2

// Rows of an item at most.
int64_t item_rows(const mul_mat_plan & all) {
    const int64_t groups = std::min(most_rows, most_bytes / all.row_bytes) / all.max_rows;
    return std::min(all.rows, std::max<int64_t>(1, groups) * all.max_rows);
}

// A matrix and some of its rows, which are multiplied together.
struct piece {
    int64_t expert;
    const picked_row * picked;
    int64_t rows;
};

// A thread's scratch.
struct layout {
    int64_t groups, starts, rows, pieces, ids, end; // the stage of a MUL_MAT is in front

    layout(const tb_op & op, const mul_mat_plan & all) {
        mul_mat_plan item = all;
        item.set_rows(item_rows(all), all.max_rows);
        groups = all.stage;
        starts = groups + item.converted_bytes();
        rows = starts + (int64_t{op.src[0].ne[2]} + 2) * static_cast<int64_t>(sizeof(int64_t));
        pieces = rows + all.rows * static_cast<int64_t>(sizeof(picked_row));
        ids = pieces + all.rows * static_cast<int64_t>(sizeof(piece));
        end = (ids + all.rows * static_cast<int64_t>(sizeof(int32_t)) + 127) / 128 * 128;
    }
};

uint64_t scratch_bytes_id(const tb_op & op, int n_threads, const kernel_table & kernels) {
    return static_cast<uint64_t>(n_threads * layout(op, plan_mul_mat_id(op, n_threads, kernels)).end);
}

// Sort the rows by matrix, stably. starts[e] is where matrix e's rows begin, starts[n] their number. The indices come
// from data that may change meanwhile, so each is read once, into `copy`. False: one names no matrix.
bool sort_rows(const view & ids, int64_t n, int64_t * starts, picked_row * rows, int32_t * copy) {
    std::fill(starts, starts + n + 2, 0);
    int32_t * id = copy;
    for (int64_t t = 0; t < ids.ne(1); t++) {
        for (int64_t i = 0; i < ids.ne(0); i++, id++) {
            std::memcpy(id, ids.data + i * ids.nb(0) + t * ids.nb(1), sizeof *id);
            if (*id < 0 || *id >= n) return false;
            starts[*id + 2]++;
        }
    }
    for (int64_t e = 0; e < n; e++)
        starts[e + 2] += starts[e + 1];
    id = copy;
    for (uint32_t t = 0; t < ids.ne(1); t++) {
        for (uint32_t i = 0; i < ids.ne(0); i++)
            rows[starts[*id++ + 1]++] = {i, t};
    }
    return true;
}

// The next bytes of each of some rows, one row after the other.
template <size_t bytes> void take(const uint8_t ** from, int rows, uint8_t *& to) {
    for (int m = 0; m < rows; m++, to += bytes) {
        std::memcpy(to, from[m], bytes);
        from[m] += bytes;
    }
}

// The same of 32 bytes, eight of a row beside eight of its neighbour.
void take_pairs(const uint8_t ** from, int rows, uint8_t *& to) {
    for (int m = 0; m + 1 < rows; m += 2) {
        for (int i = 0; i < 4; i++)
            take<8>(from + m, 2, to);
    }
    if (rows % 2 != 0) take<32>(from + rows - 1, 1, to);
}

// Rows that were converted one by one become groups at `out`, or stay where they are if it is one.
uint8_t * gather(const op_context & ctx, const mul_mat_plan & p, uint8_t * out) {
    const int64_t inputs = ctx.src[1].ne(1);
    const uint8_t * from[gemm_most_rows];
    for (int64_t g = 0; g < p.groups; g++) {
        const int rows = p.group_rows(g);
        for (int m = 0; m < rows; m++) {
            const picked_row & row = p.picked[p.group_start(g) + m];
            from[m] = ctx.prepared + (row.i2 * inputs + row.i1 % inputs) * p.row_bytes;
        }
        if (p.rows == 1) return const_cast<uint8_t *>(from[0]);
        uint8_t * to = out + p.group_offset(0, g);
        for (uint8_t * const end = to + rows * p.row_bytes; to < end;) {
            if (p.k_quant) {
                take<TB_K_BLOCK>(from, rows, to);
                take<sizeof(float)>(from, rows, to);
                take<gemm_k_sums16>(from, rows, to);
                take<gemm_k_sums32>(from, rows, to);
                continue;
            }
            ctx.kernels->gemm.row_pairs ? take_pairs(from, rows, to) : take<TB_TILE_K>(from, rows, to);
            take<sizeof(float)>(from, rows, to);
            take<sizeof(int32_t)>(from, rows, to);
        }
    }
    return out;
}

// All rows, sorted, in pieces of `most` rows or fewer.
int64_t cut_pieces(const int64_t * starts, int64_t experts, const picked_row * rows, int64_t most, piece * pieces) {
    int64_t n = 0;
    for (int64_t e = 0; e < experts; e++) {
        const int64_t count = starts[e + 1] - starts[e], parts = divide_up(count, most);
        for (int64_t i = 0; i < parts; i++) {
            const int64_t from = count * i / parts;
            pieces[n++] = {e, rows + starts[e] + from, count * (i + 1) / parts - from};
        }
    }
    return n;
}

// A column panel of a piece, in rows: with few of them it takes as long as its weights take from memory.
int64_t cost_of(const piece & p) { return std::max<int64_t>(4, p.rows); }

void run_id(const op_context & ctx) {
    const int64_t experts = ctx.src[0].ne(2);
    const mul_mat_plan all = plan_mul_mat_id(*ctx.op, ctx.n_threads, *ctx.kernels);
    const layout parts(*ctx.op, all);
    uint8_t * const stage = ctx.scratch + ctx.thread * parts.end;
    int64_t * starts = reinterpret_cast<int64_t *>(stage + parts.starts);
    picked_row * rows = reinterpret_cast<picked_row *>(stage + parts.rows);
    if (!sort_rows(ctx.src[2], experts, starts, rows, reinterpret_cast<int32_t *>(stage + parts.ids))) {
        return ctx.fail(TB_E_BOUNDS, "MUL_MAT_ID: matrix index out of range");
    }
    piece * const pieces = reinterpret_cast<piece *>(stage + parts.pieces);
    const int64_t most = item_rows(all), n = cut_pieces(starts, experts, rows, most, pieces);
    const int64_t block = plan_mul_mat(*ctx.op, n, most, ctx.n_threads, *ctx.kernels).panels_per_item;
    const int64_t least = 4 * plan_mul_mat(*ctx.op, 1, 1, ctx.n_threads, *ctx.kernels).panels_per_item;
    int64_t left = 0;
    for (int64_t i = 0; i < n; i++)
        left += all.panels * cost_of(pieces[i]);

    op_context one = ctx;
    int64_t chunk = 0, at = 0, panel = 0; // at: a piece
    for (;;) {
        const int64_t mine = ctx.next_chunk();
        for (; chunk <= mine && left > 0; chunk++) {
            for (int64_t share = std::max(least, left / (2 * ctx.n_threads)); share > 0 && at < n;) {
                const piece & now = pieces[at];
                const int64_t cost = cost_of(now);
                const int64_t last = std::min(all.panels, panel + divide_up(share, cost));
                share -= (last - panel) * cost;
                left -= (last - panel) * cost;
                if (chunk == mine) {
                    const int64_t count = starts[now.expert + 1] - starts[now.expert];
                    mul_mat_plan p = plan_mul_mat(*ctx.op, 1, count, ctx.n_threads, *ctx.kernels);
                    p.set_rows(now.rows, p.max_rows);
                    p.expert = now.expert;
                    p.picked = now.picked;
                    one.prepared = p.is_integer() ? gather(ctx, p, stage + parts.groups) : stage + parts.groups;
                    if (!p.is_integer() && converts_activations(*ctx.op, p)) convert_rows(one, p);
                    const int64_t steps = p.groups == 1 ? 1 : divide_up(last - panel, block);
                    const int64_t step = divide_up(last - panel, steps);
                    for (int64_t i = panel; i < last; i += step)
                        multiply(one, p, {0, i, std::min(last, i + step), 0, p.groups}, stage);
                }
                at += last == all.panels;
                panel = last % all.panels;
            }
        }
        if (chunk <= mine) return;
    }
}

// The conversion of all rows, one by one.
mul_mat_plan conversion_plan(const tb_op & op, int n_threads, const kernel_table & kernels) {
    const tb_tensor & x = op.src[1];
    mul_mat_plan p = plan_mul_mat(op, 1, int64_t{x.ne[1]} * x.ne[2], n_threads, kernels);
    p.set_rows(p.rows, 1);
    p.r2 = x.ne[2];
    p.r3 = 1;
    return p;
}

void run_conversion_id(const op_context & ctx) {
    convert_activations(ctx, conversion_plan(*ctx.op, ctx.n_threads, *ctx.kernels));
}

uint64_t conversion_bytes_id(const tb_op & op, int n_threads, const kernel_table & kernels) {
    const mul_mat_plan p = conversion_plan(op, n_threads, kernels);
    return p.is_integer() ? static_cast<uint64_t>(p.converted_bytes()) : 0;
}

bool same_conversion_id(const tb_op & a, const tb_op & b, int n_threads, const kernel_table & kernels) {
    return same_integers(conversion_plan(a, n_threads, kernels), conversion_plan(b, n_threads, kernels), kernels);
}

cut conversion_cut_id(const tb_op &) { return cut::runs; }

const op_preparation conversion = {run_conversion_id, 1, conversion_bytes_id, same_conversion_id, conversion_cut_id};

} // namespace

const op_entry mul_mat_id_entry = {run_id, scratch_bytes_id, cut::any, true, &conversion};

} // namespace tb::npu
