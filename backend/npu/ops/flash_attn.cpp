// FLASH_ATTN: online softmax over the KV cells that the mask leaves visible, tile by tile.
//
// A work item (attention_plan.h) is a block of tokens x the heads of GQA groups; each K and V element that is loaded
// and converted serves all of a group's. The mask is turned into bits (64 cells a word), once for all layers that have
// the same one. An item then walks the words, and what its rows see becomes tiles (attention_walk.h). When there are
// fewer items than threads want, the words are split too, and the parts are merged at the end (flash-decoding).
// Under TB_FLAG_DETERMINISTIC an item walks its words twice, and is never split: ops/attention_any_order.h.
#include "ops/attention_any_order.h"
#include "ops/attention_fp16.h"
#include "ops/attention_plan.h"
#include "ops/attention_walk.h"
#include "ops/ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

namespace tb::npu {
namespace {

constexpr int64_t most_fetched = 16 << 20; // bytes; more would not stay in a cache until it is used
constexpr float infinity = std::numeric_limits<float>::infinity();

uint64_t scratch_bytes(const tb_op & op, int n_threads, const kernel_table &) {
    return make_attention_plan(op, n_threads).total;
}

// Runs items, one after the other, on one thread.
class item_runner {
  public:
    item_runner(const op_context & context, const attention_plan & plan)
        : ctx(context), p(plan), kernels(context.kernels->attention), q(context.src[0]), k(context.src[1]),
          v(context.src[2]), mask(context.src[3]), workspace(workspace_of(context, plan)),
          walk(*this, plan.n_kv, reinterpret_cast<int32_t *>(workspace) + plan.own_at),
          fp16{*context.kernels, 0.0f, nullptr, nullptr},
          any_order(*context.kernels, workspace + plan.any_order_at, plan.item_rows(), plan.n_kv, plan.dv) {
        scores = workspace + p.scores_at;
        tile = workspace + p.tile_at;
        k_floats = workspace + p.k_at;
        v_floats = workspace + p.v_at;
        output = workspace + p.output_at;
        max = workspace + p.max_at;
        sums = workspace + p.sums_at;
        scale = ctx.param_f(0);
        if (p.fp16) {
            fp16.queries = workspace + p.queries_at;
            fp16.values = workspace + p.values_at;
            fp16.scale = scale;
            scale = 1.0f;
        }
        max_bias = ctx.param_f(1);
        softcap = ctx.param_f(2);
        k_bytes = p.dk / tb_type_block(k.type()) * tb_type_size(k.type());
        v_bytes = p.dv / tb_type_block(v.type()) * tb_type_size(v.type());
        exact = (ctx.op->flags & TB_FLAG_EXACT_EXP) != 0;
    }

    void run(int64_t item, int64_t split) {
        if (p.any_order) return run_twice(item);
        place(item);
        const int64_t rows = n_groups * group_rows;
        const int64_t first = p.words * split / p.splits, last = p.words * (split + 1) / p.splits;
        clear(0, rows);
        walk.run(first, last);
        // What is no number may come from a cell of a shared tile that the line does not see: alone it meets its own.
        for (int line = 0; line < n_lines && n_lines > 1; line++) {
            if (is_finite(line)) continue;
            for (int64_t group = 0; group < n_groups; group++) {
                clear(group * group_rows + line * heads_per_line, heads_per_line);
            }
            walk.run(first, last, line);
        }
        if (p.splits == 1) {
            for (int64_t row = 0; row < rows; row++) {
                finish_row(row, output + row * p.dv, max[row], sum(row));
            }
        } else {
            save_partial(item, split);
        }
    }

    // Joins the parts of an item's rows [first, last) and stores them.
    void merge(int64_t item, int64_t first, int64_t last) {
        place(item);
        last = std::min(last, n_groups * group_rows);
        for (int64_t row = first; row < last; row++) {
            merge_row(item, row);
        }
    }

    // A tile of `walk`: `lines` of all groups against `cells`.
    void run_tile(const int * lines, int n, const int32_t * cell, int cells, const uint64_t * visible,
                  const wanted_cells & next) {
        for (int64_t group = 0; group < n_groups; group++) {
            run_group(group, lines, n, cell, cells, visible, next);
        }
    }

  private:
    static float * workspace_of(const op_context & ctx, const attention_plan & p) {
        return reinterpret_cast<float *>(ctx.scratch + p.workspace_at +
                                         p.workspace_bytes * static_cast<size_t>(ctx.thread));
    }

    const op_context & ctx;
    const attention_plan & p;
    const attention_kernels & kernels;
    const view & q;
    const view & k;
    const view & v;
    const view & mask;
    float * workspace;
    float * scores;
    float * tile;
    float * k_floats;
    float * v_floats;
    float * output; // [rows][dv]
    float * max;    // [rows]
    float * sums;   // [rows][attention_sum_parts]
    float scale, max_bias, softcap;
    int64_t k_bytes, v_bytes; // of a cell's row
    bool exact;
    cell_walk<item_runner> walk;
    fp16_products fp16;
    any_order_rows any_order;
    bool again = false; // the second walk of run_twice

    // The item: groups x tokens x n_heads of a group. A group's rows with the same mask form a line: a token with all
    // its heads, or (if the mask differs between heads) a single row. Lines are the same in all groups.
    int64_t stream = 0, token0 = 0, n_tokens = 0, head0 = 0, n_heads = 0, n_groups = 0;
    int64_t group_rows = 0;
    int n_lines = 0;
    int64_t heads_per_line = 1;
    const uint8_t * line_q[attention_tile_rows]; // of the first group's first head
    const uint16_t * line_mask[attention_tile_rows];
    bool line_biased[attention_tile_rows];

    void clear(int64_t row, int64_t rows) {
        std::fill_n(max + row, rows, -infinity);
        std::fill_n(sums + row * attention_sum_parts, rows * attention_sum_parts, 0.0f);
        std::fill_n(output + row * p.dv, rows * p.dv, 0.0f);
    }

    // Whether what a line's rows have come to are numbers, in all groups.
    bool is_finite(int line) const {
        for (int64_t group = 0; group < n_groups; group++) {
            const int64_t row = group * group_rows + line * heads_per_line;
            if (!all_finite(output + row * p.dv, heads_per_line * p.dv)) return false;
        }
        return true;
    }

    static bool all_finite(const float * x, int64_t n) {
        uint32_t wrong = 0; // in bits, which compilers make vectors of
        for (int64_t i = 0; i < n; i++) {
            uint32_t bits;
            std::memcpy(&bits, x + i, sizeof bits);
            wrong |= (bits & 0x7f800000u) == 0x7f800000u;
        }
        return wrong == 0;
    }

    float sum(int64_t row) const {
        const float * parts = sums + row * attention_sum_parts;
        return std::accumulate(parts, parts + attention_sum_parts, 0.0f);
    }

    // Row index = (group * n_tokens + token) * n_heads + head; with a mask per head, lines are rows in the same order.
    void place(int64_t item) {
        const int64_t token_block = item % p.token_blocks;
        int64_t rest = item / p.token_blocks;
        const int64_t part = rest % p.blocks_per_group;
        rest /= p.blocks_per_group;
        const int64_t first_group = rest % p.group_blocks * p.item_groups;
        stream = rest / p.group_blocks;
        n_groups = std::min(p.item_groups, p.groups() - first_group);
        token0 = token_block * p.item_tokens;
        n_tokens = std::min(p.item_tokens, p.tokens - token0);
        head0 = first_group * p.group + part * p.item_heads;
        n_heads = std::min(p.item_heads, p.group - part * p.item_heads);
        group_rows = n_tokens * n_heads;
        heads_per_line = p.mask_heads > 1 ? 1 : n_heads;
        n_lines = static_cast<int>(group_rows / heads_per_line);
        walk.open(n_lines);
        for (int line = 0; line < n_lines; line++) {
            line_q[line] = q.at<const uint8_t>(token_of(line * heads_per_line), head_of(line * heads_per_line), stream);
            if (!mask) {
                walk.bits[line] = nullptr;
                line_biased[line] = false;
                continue;
            }
            const int64_t token = token0 + (p.mask_heads > 1 ? line / n_heads : line);
            const int64_t head = p.mask_heads > 1 ? (head0 + line % n_heads) % p.mask_heads : 0;
            const int64_t from = stream % p.mask_streams;
            const int64_t index = (from * p.mask_heads + head) * p.tokens + token;
            walk.bits[line] = reinterpret_cast<const uint64_t *>(ctx.prepared) + index * p.words;
            line_mask[line] = mask.at<const uint16_t>(token, head, from);
            const uint8_t * flags = ctx.prepared + p.biased_at + index * p.words;
            line_biased[line] = std::any_of(flags, flags + p.words, [](uint8_t f) { return f != 0; });
        }
    }

    void run_twice(int64_t item) {
        place(item);
        any_order.open(group_rows);
        again = false;
        walk.run(0, p.words);
        for (int64_t row = 0; row < group_rows; row++) {
            any_order.weigh(row);
        }
        again = true;
        walk.run(0, p.words); // which left nothing behind the first time
        // As in `run`.
        for (int line = 0; line < n_lines && n_lines > 1; line++) {
            const int64_t first = line * heads_per_line, last = first + heads_per_line;
            for (int64_t row = first; row < last; row++) {
                any_order.close(row, p.dv, output + row * p.dv);
            }
            if (is_finite(line)) continue;
            for (int64_t row = first; row < last; row++) {
                any_order.begin_again(row);
            }
            walk.run(0, p.words, line);
        }
        for (int64_t row = 0; row < group_rows; row++) {
            const any_order_rows::result r = any_order.close(row, p.dv, output + row * p.dv);
            finish_row(row, output + row * p.dv, r.max, r.sum);
        }
    }

    int64_t head_of(int64_t row) const { return head0 + row / group_rows * p.group + row % n_heads; }
    int64_t token_of(int64_t row) const { return token0 + row % group_rows / n_heads; }

    // The cells of a group's K or V head.
    const uint8_t * cells_of(const view & t, int64_t group) const {
        return t.at<const uint8_t>(0, (head0 + group * p.group) / (p.heads / t.ne(2)), stream / (p.streams / t.ne(3)));
    }

    // Scores, softmax and accumulation.
    void run_group(int64_t group, const int * lines, int n, const int32_t * cell, int cells, const uint64_t * visible,
                   const wanted_cells & next) {
        if (p.any_order)
            return again ? weigh_values(lines, n, cell, cells, visible, next)
                         : score_keys(lines, n, cell, cells, visible, next);
        const uint8_t * k_base = cells_of(k, group);
        const uint8_t * v_base = cells_of(v, group);
        const void * k_rows[attention_tile_cells];
        const void * v_rows[attention_tile_cells];
        cell_rows(k, k_base, p.dk, cell, cells, k_floats, k_rows);
        cell_rows(v, v_base, p.dv, cell, cells, v_floats, v_rows);

        const float * q_rows[attention_tile_rows];
        float * o_rows[attention_tile_rows];
        float alpha[attention_tile_rows];
        int rows = 0;
        for (int i = 0; i < n; i++) {
            const uint8_t * at = line_q[lines[i]] + group * p.group * q.nb(2);
            float * o = output + (group * group_rows + lines[i] * heads_per_line) * p.dv;
            for (int64_t head = 0; head < heads_per_line; head++) {
                q_rows[rows] = reinterpret_cast<const float *>(at + head * q.nb(2));
                o_rows[rows++] = o + head * p.dv;
            }
        }
        const attention_scores_args qk = {rows,   cells,  static_cast<int>(p.dk),
                                          q_rows, k_rows, kernel_type(k.type()),
                                          scores, tile,   part_of(k, k_bytes, next, group)};
        const attention_accumulate_args pv = {
            rows,   cells, static_cast<int>(p.dv),          scores, alpha, v_rows, kernel_type(v.type()),
            o_rows, tile,  part_of(v, v_bytes, next, group)};
        p.fp16 ? fp16.scores(qk) : kernels.scores(qk);
        softmax(group * group_rows, lines, n, cell, cells, visible, alpha);
        p.fp16 ? fp16.accumulate(pv) : kernels.accumulate(pv);
    }

    // ---- attention_any_order: an item has one group

    uint64_t seen_by(int line, const uint64_t * visible) const {
        return visible != nullptr ? visible[line] : ~uint64_t{0};
    }

    void score_keys(const int * lines, int n, const int32_t * cell, int cells, const uint64_t * visible,
                    const wanted_cells & next) {
        const void * k_rows[attention_tile_cells];
        cell_rows(k, cells_of(k, 0), p.dk, cell, cells, k_floats, k_rows);
        float largest[attention_tile_cells];
        const bool bounded = v.type() == TB_F16 || v.type() == TB_Q8_0;
        if (!bounded) largest_values(cell, cells, largest);
        const int per_line = static_cast<int>(heads_per_line);
        const float * q_rows[attention_tile_rows];
        for (int i = 0; i < n * per_line; i++) {
            const uint8_t * at = line_q[lines[i / per_line]] + i % per_line * q.nb(2);
            q_rows[i] = reinterpret_cast<const float *>(at);
        }
        for (int i = 0; i < n * per_line; i += attention_any_order_rows) {
            const int rows = std::min(attention_any_order_rows, n * per_line - i);
            kernels.scores({rows, cells, static_cast<int>(p.dk), q_rows + i, k_rows, kernel_type(k.type()),
                            scores + i * attention_tile_cells, tile,
                            i == 0 ? part_of(k, k_bytes, next, 0) : attention_fetch{}});
        }
        float * s = scores;
        for (int i = 0; i < n; i++) {
            float mask_values[attention_tile_cells];
            if (line_biased[lines[i]]) read_bias(lines[i], cell, cells, mask_values);
            for (int head = 0; head < per_line; head++, s += attention_tile_cells) {
                const int64_t row = lines[i] * per_line + head;
                const float slope = max_bias > 0.0f ? alibi_slope(max_bias, head_of(row), p.heads) : 1.0f;
                for (int c = 0; c < cells; c++) {
                    float x = s[c] * scale;
                    if (softcap != 0.0f) x = softcap * std::tanh(x / softcap);
                    s[c] = line_biased[lines[i]] ? x + slope * mask_values[c] : x;
                }
                any_order.meet(row, cells, seen_by(lines[i], visible), s, bounded ? nullptr : largest,
                               v.type() == TB_F16 ? 65504.0f : 128 * 65504.0f);
            }
        }
    }

    void weigh_values(const int * lines, int n, const int32_t * cell, int cells, const uint64_t * visible,
                      const wanted_cells & next) {
        const void * v_rows[attention_tile_cells];
        cell_rows(v, cells_of(v, 0), p.dv, cell, cells, v_floats, v_rows);
        const int per_line = static_cast<int>(heads_per_line);
        double * o_rows[attention_tile_rows];
        for (int i = 0; i < n * per_line; i++) {
            const int line = lines[i / per_line];
            const int64_t row = line * per_line + i % per_line;
            any_order.meet_again(row, cells, seen_by(line, visible), any_order.weights() + i * attention_tile_cells);
            o_rows[i] = any_order.sums(row);
        }
        kernels.any_order.accumulate({n * per_line, cells, static_cast<int>(p.dv), any_order.weights(), v_rows,
                                      kernel_type(v.type()), o_rows, tile, part_of(v, v_bytes, next, 0)});
    }

    // The largest magnitudes in cells of V.
    void largest_values(const int32_t * cell, int cells, float * largest) const {
        const void * rows[attention_tile_cells];
        cell_rows(v, cells_of(v, 0), p.dv, cell, cells, v_floats, rows);
        for (int c = 0; c < cells; c++) {
            const float * x = static_cast<const float *>(rows[c]);
            largest[c] = std::accumulate(x, x + p.dv, 0.0f, [](float a, float b) { return std::max(a, std::fabs(b)); });
        }
    }

    void read_bias(int line, const int32_t * cell, int cells, float * values) const {
        uint16_t gathered[attention_tile_cells];
        for (int c = 0; c < cells; c++) {
            gathered[c] = line_mask[line][cell[c]];
        }
        ctx.kernels->vec.to_f32[TB_F16](cells, gathered, values);
    }

    // Rows that see the same and have no bias are given to the kernel together. row0: the first row of the group.
    void softmax(int64_t row0, const int * lines, int n, const int32_t * cell, int cells, const uint64_t * visible,
                 float * alpha) {
        attention_softmax_args args = {};
        args.cells = cells;
        args.scale = scale;
        args.softcap = softcap;
        args.exact = exact;
        args.s = scores;
        args.alpha = alpha;
        const int per_line = static_cast<int>(heads_per_line);
        const auto run = [&](int64_t row, int rows) {
            args.rows = rows;
            args.max = max + row;
            args.sum = sums + row * attention_sum_parts;
            kernels.softmax(args);
            args.s += rows * attention_tile_cells;
            args.alpha += rows;
        };
        for (int i = 0; i < n;) {
            const int line = lines[i];
            args.visible = seen_by(line, visible);
            args.bias = nullptr;
            int same = 1;
            if (!line_biased[line]) {
                while (i + same < n && lines[i + same] == line + same && !line_biased[line + same] &&
                       (visible == nullptr || visible[line + same] == args.visible)) {
                    same++;
                }
                run(row0 + line * heads_per_line, same * per_line);
                i += same;
                continue;
            }
            i++;
            float mask_values[attention_tile_cells];
            float bias[attention_tile_cells];
            read_bias(line, cell, cells, mask_values);
            if (max_bias <= 0.0f) {
                args.bias = mask_values;
                run(row0 + line * heads_per_line, per_line);
                continue;
            }
            args.bias = bias;
            for (int64_t head = 0; head < heads_per_line; head++) {
                const int64_t row = row0 + line * heads_per_line + head;
                const float slope = alibi_slope(max_bias, head_of(row), p.heads);
                ctx.kernels->vec.scale(cells, mask_values, slope, 0.0f, bias);
                run(row, 1);
            }
        }
    }

    cell_type kernel_type(uint32_t type) const {
        if (!attention_reads(type, p.fp16)) return cell_type::f32;
        return type == TB_F16 ? cell_type::f16 : type == TB_Q8_0 ? cell_type::q8_0 : cell_type::f32;
    }

    void cell_rows(const view & t, const uint8_t * base, int64_t dim, const int32_t * cell, int cells, float * floats,
                   const void ** rows) const {
        for (int c = 0; c < cells; c++) {
            const uint8_t * row = base + cell[c] * t.nb(1);
            rows[c] = row;
            if (!attention_reads(t.type(), p.fp16)) {
                ctx.kernels->vec.to_f32[t.type()](dim, row, floats + c * dim);
                if (p.fp16) ctx.kernels->gemm.round_fp16(dim, floats + c * dim);
                rows[c] = floats + c * dim;
            }
        }
    }

    // A group's part of the rows of K or V that will be wanted next: where the heads of a cell lie side by side, some
    // of the rows with the heads of all groups, so that memory is read in order; else this group's own.
    attention_fetch part_of(const view & t, int64_t bytes, const wanted_cells & next, int64_t group) const {
        const uint8_t * base = cells_of(t, 0);
        const int64_t span = cells_of(t, n_groups - 1) + bytes - base;
        if (bytes * n_groups * next.n > most_fetched) {
            return {};
        }
        if (span > n_groups * bytes) {
            return {cells_of(t, group), t.nb(1), next.cell, next.n, static_cast<int>(bytes)};
        }
        const int first = static_cast<int>(next.n * group / n_groups);
        const int last = static_cast<int>(next.n * (group + 1) / n_groups);
        if (last > first && span == t.nb(1) && next.cell[last - 1] - next.cell[first] == last - first - 1) {
            return {base, t.nb(1), next.cell + first, 1, static_cast<int>((last - first) * span)}; // without a gap
        }
        return {base, t.nb(1), next.cell + first, last - first, static_cast<int>(span)};
    }

    float * partial(int64_t item, int64_t split) const {
        return reinterpret_cast<float *>(ctx.scratch + p.partials_at) + (item * p.splits + split) * p.partial_floats();
    }

    void save_partial(int64_t item, int64_t split) {
        float * part = partial(item, split);
        for (int64_t r = 0; r < n_groups * group_rows; r++) {
            const float total = sum(r);
            part[2 * r] = std::isnan(total) ? total : max[r]; // of scores that are NaN the row's result is to tell
            if (part[2 * r] != -infinity) {                   // a row that saw nothing here weighs nothing
                part[2 * r + 1] = total;
                std::copy_n(output + r * p.dv, p.dv, part + 2 * p.item_rows() + r * p.dv);
            }
        }
    }

    void merge_row(int64_t item, int64_t row) {
        float top = -infinity;
        for (int64_t s = 0; s < p.splits; s++) {
            const float m = partial(item, s)[2 * row];
            if (m > top || std::isnan(m)) top = m;
        }
        float total = 0.0f;
        std::fill_n(output, p.dv, 0.0f);
        for (int64_t s = 0; s < p.splits && top != -infinity; s++) {
            const float * part = partial(item, s);
            const float weight = std::exp(part[2 * row] - top);
            if (weight == 0.0f) {
                continue;
            }
            total += weight * part[2 * row + 1];
            const float * x = part + 2 * p.item_rows() + row * p.dv;
            for (int64_t d = 0; d < p.dv; d++) {
                output[d] += weight * x[d];
            }
        }
        finish_row(row, output, top, total);
    }

    // Adds the sink, divides by the sum and stores a row.
    void finish_row(int64_t row, float * o, float top, float total) {
        const int64_t head = head_of(row);
        float factor = 1.0f;
        if (ctx.src[4]) {
            const float sink = ctx.src[4].at<const float>(0)[head];
            const float new_top = std::max(top, sink);
            if (new_top != -infinity) {
                factor = std::exp(top - new_top);
                total = total * factor + std::exp(sink - new_top);
            }
        }
        float * out = ctx.dst.at<float>(head, token_of(row), stream);
        const float inverse = total == 0.0f ? 0.0f : factor / total; // a row that sees nothing gives 0
        ctx.kernels->vec.scale(p.dv, o, inverse, 0.0f, out);
    }
};

void read_mask(const op_context & ctx) {
    const attention_plan p = make_attention_plan(*ctx.op, ctx.n_threads);
    const view & mask = ctx.src[3];
    uint64_t * bits = reinterpret_cast<uint64_t *>(ctx.prepared);
    uint8_t * biased = ctx.prepared + p.biased_at;
    for (const int64_t i : ctx.share(p.mask_lines() * p.words, 8)) {
        const int64_t line = i / p.words;
        const int64_t cell = i % p.words * word_cells;
        const int64_t token = line % p.tokens;
        const int64_t plane = line / p.tokens;
        const uint16_t * row = mask.at<const uint16_t>(token, plane % p.mask_heads, plane / p.mask_heads);
        uint64_t values = 0;
        bits[i] =
            ctx.kernels->attention.visible(row + cell, static_cast<int>(std::min(word_cells, p.n_kv - cell)), &values);
        biased[i] = values != 0;
    }
}

uint64_t mask_bytes(const tb_op & op, int n_threads, const kernel_table &) {
    return make_attention_plan(op, n_threads).mask_bytes;
}

// The mask is the same; it may have more lines than there are tokens.
bool same_mask(const tb_op & a, const tb_op & b, int, const kernel_table &) {
    return a.src[0].ne[1] == b.src[0].ne[1] && a.src[1].ne[1] == b.src[1].ne[1];
}

cut mask_cut(const tb_op &) { return cut::any; }

void flash_attn(const op_context & ctx) {
    const attention_plan p = make_attention_plan(*ctx.op, ctx.n_threads);
    item_runner runner(ctx, p);
    const int64_t parts = p.items * p.splits;
    for (int64_t i = ctx.next_chunk(); i < parts; i = ctx.next_chunk()) {
        runner.run(i / p.splits, i % p.splits);
    }
    if (p.splits > 1) {
        ctx.barrier();
        const auto [first, last] = ctx.share(p.items * p.item_rows());
        for (int64_t i = first; i < last;) {
            const int64_t item = i / p.item_rows();
            const int64_t end = std::min(last, (item + 1) * p.item_rows());
            runner.merge(item, i - item * p.item_rows(), end - item * p.item_rows());
            i = end;
        }
    }
}

} // namespace

const op_preparation flash_attn_mask = {read_mask, 3, mask_bytes, same_mask, mask_cut, true};
const op_entry flash_attn_entry = {flash_attn, scratch_bytes, cut::any, true, &flash_attn_mask, true};

} // namespace tb::npu
