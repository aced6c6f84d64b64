// How a FLASH_ATTN is cut into items, groups and splits, and where its memory lies. See attention_plan.h.
#include "ops/attention_plan.h"

#include <algorithm>
#include <numeric>

#include "ops/attention_any_order.h"
#include "ops/ops.h"

namespace tb::npu {
namespace {

constexpr uint64_t alignment = 128;    // of a matrix unit's operands
constexpr int64_t min_split_words = 4; // splitting finer than this costs more in merging than it brings
constexpr int64_t parts_per_thread = 4;
constexpr int64_t few_rows = 12;           // items of fewer rows spend more on reading K and V than on arithmetic
constexpr int64_t most_item_rows = 512;    // whose sums stay in a CPU's second cache
constexpr int64_t most_scores = 512 << 10; // of an item's rows, where they are kept for all cells

// Items, groups and splits, once the heads of an item are known.
void divide(attention_plan & p, int n_threads) {
    // As many tokens as fit and no fewer items than threads: K and V are read and converted once per item.
    const int64_t wanted = n_threads > 1 ? parts_per_thread * n_threads : 1;
    const int64_t most_splits = std::max<int64_t>(1, p.words / min_split_words);
    const int64_t planes = p.streams * p.groups() * p.blocks_per_group;
    p.token_blocks = divide_up(p.tokens, std::max<int64_t>(1, attention_tile_rows / p.item_heads));
    p.item_tokens = divide_up(p.tokens, p.token_blocks);
    while (planes * p.token_blocks * most_splits < n_threads && p.item_tokens > 1 && p.group_rows() > few_rows) {
        p.token_blocks++;
        p.item_tokens = divide_up(p.tokens, p.token_blocks);
    }
    p.token_blocks = divide_up(p.tokens, p.item_tokens);
    // Groups together where one block has all tokens (decoding) and there is enough to do for all threads without.
    p.item_groups = 1;
    if (p.token_blocks == 1 && p.blocks_per_group == 1 && p.mask_heads <= 1) {
        const int64_t most = std::max<int64_t>(1, most_item_rows / p.group_rows());
        p.item_groups = divide_up(p.groups(), divide_up(p.groups(), most));
        while (p.item_groups > 1 && p.streams * divide_up(p.groups(), p.item_groups) * most_splits < wanted) {
            p.item_groups = divide_up(p.item_groups, 2);
        }
    }
    p.group_blocks = divide_up(p.groups(), p.item_groups);
    p.items = p.streams * p.group_blocks * p.blocks_per_group * p.token_blocks;
    p.splits = p.items < wanted ? std::min(divide_up(wanted, p.items), most_splits) : 1;
}

// Where results depend on nothing but rows and what they see, items are cut as finely as it takes.
void divide_any_order(attention_plan & p, int n_threads) {
    const int64_t rows = std::clamp<int64_t>(most_scores / std::max<int64_t>(1, p.n_kv), 1, attention_tile_rows);
    p.item_tokens = std::clamp<int64_t>(rows / p.item_heads, 1, p.tokens);
    const int64_t wanted = n_threads > 1 ? parts_per_thread * n_threads : 1;
    const auto items = [&p] {
        return p.streams * p.groups() * p.blocks_per_group * divide_up(p.tokens, p.item_tokens);
    };
    while (items() < wanted && p.item_tokens > 1 && p.group_rows() > few_rows) {
        p.item_tokens = divide_up(p.item_tokens, 2);
    }
    while (items() < n_threads && p.item_heads > 1) {
        p.item_heads = divide_up(p.item_heads, 2);
        p.blocks_per_group = divide_up(p.group, p.item_heads);
    }
    p.token_blocks = divide_up(p.tokens, p.item_tokens);
    p.item_groups = 1;
    p.group_blocks = p.groups();
    p.items = items();
    p.splits = 1;
}

// Offsets within scratch memory.
void lay_out(attention_plan & p, int n_threads) {
    uint64_t at = 0;
    const auto take = [&at](uint64_t bytes) {
        const uint64_t start = at;
        at += (bytes + alignment - 1) / alignment * alignment;
        return start;
    };
    p.partials_at =
        take(p.splits > 1 ? static_cast<uint64_t>(p.items * p.splits * p.partial_floats()) * sizeof(float) : 0);
    p.workspace_at = at;

    at = 0;
    const uint64_t cells = attention_tile_cells;
    const uint64_t rows = static_cast<uint64_t>(p.item_rows());
    const uint64_t tile_rows = static_cast<uint64_t>(p.group_rows());
    p.scores_at = take(tile_rows * cells * sizeof(float)) / sizeof(float);
    p.tile_at =
        take(static_cast<uint64_t>(attention_scratch_floats(std::max(p.dk, p.dv))) * sizeof(float)) / sizeof(float);
    p.k_at = take(p.convert ? static_cast<uint64_t>(p.dk) * cells * sizeof(float) : 0) / sizeof(float);
    p.v_at = take(p.convert ? static_cast<uint64_t>(p.dv) * cells * sizeof(float) : 0) / sizeof(float);
    p.output_at = take(rows * static_cast<uint64_t>(p.dv) * sizeof(float)) / sizeof(float);
    p.max_at = take(rows * sizeof(float)) / sizeof(float);
    p.sums_at = take(rows * attention_sum_parts * sizeof(float)) / sizeof(float);
    p.own_at = take(tile_rows * cells * sizeof(int32_t)) / sizeof(int32_t);
    const uint64_t rounded_rows = p.fp16 ? tile_rows : 0;
    p.queries_at = take(rounded_rows * static_cast<uint64_t>(p.dk) * sizeof(float)) / sizeof(float);
    p.values_at = take(rounded_rows * static_cast<uint64_t>(p.dv) * sizeof(float)) / sizeof(float);
    p.any_order_at = take(p.any_order ? any_order_rows::bytes(p.item_rows(), p.n_kv, p.dv) : 0) / sizeof(float);
    p.workspace_bytes = at;
    p.total = p.workspace_at + p.workspace_bytes * static_cast<uint64_t>(n_threads);
}

} // namespace

bool attention_reads(uint32_t type, bool fp16) {
    return type == TB_F16 || (!fp16 && (type == TB_F32 || type == TB_Q8_0));
}

attention_plan make_attention_plan(const tb_op & op, int n_threads) {
    attention_plan p = {};
    const tb_tensor & q = op.src[0];
    const tb_tensor & k = op.src[1];
    const tb_tensor & v = op.src[2];
    const bool masked = op.n_src > 3 && op.src[3].buffer != TB_NO_BUFFER;
    p.dk = q.ne[0];
    p.dv = v.ne[0];
    p.n_kv = k.ne[1];
    p.tokens = q.ne[1];
    p.heads = q.ne[2];
    p.streams = q.ne[3];
    p.group = std::gcd(p.heads / k.ne[2], p.heads / v.ne[2]);
    p.blocks_per_group = divide_up(p.group, attention_tile_rows);
    p.item_heads = divide_up(p.group, p.blocks_per_group);
    p.words = divide_up(p.n_kv, word_cells);
    p.mask_heads = masked ? op.src[3].ne[2] : 0;
    p.mask_streams = masked ? op.src[3].ne[3] : 0;
    p.fp16 = (op.flags & TB_FLAG_FP16) != 0;
    p.any_order = (op.flags & TB_FLAG_DETERMINISTIC) != 0;
    p.convert = !attention_reads(k.type, p.fp16) || !attention_reads(v.type, p.fp16);
    p.biased_at = align64(static_cast<uint64_t>(p.mask_lines() * p.words) * sizeof(uint64_t));
    p.mask_bytes = p.biased_at + static_cast<uint64_t>(p.mask_lines() * p.words);
    p.any_order ? divide_any_order(p, n_threads) : divide(p, n_threads);
    lay_out(p, n_threads);
    return p;
}

} // namespace tb::npu
