// How FLASH_ATTN is cut into work items, and where everything lies in its scratch memory. Depends on the descriptor and
// the number of threads only.
#ifndef TILEBEAM_NPU_OPS_ATTENTION_PLAN_H
#define TILEBEAM_NPU_OPS_ATTENTION_PLAN_H

#include <cstdint>

#include "kernels/attention.h"
#include "tilebeam/ops.h"

namespace tb::npu {

constexpr int64_t word_cells = attention_tile_cells; // cells of a mask word, a bit each

// An item is a block of tokens x the heads of one or several groups, a group being the query heads that share one K
// head and one V head. Heads of one cell lie side by side in memory: an item with few rows takes as many groups as it
// can, so that cells are read in the order in which they lie.
struct attention_plan {
    int64_t dk, dv, n_kv, tokens, heads, streams;
    int64_t group;      // heads of a group
    int64_t item_heads; // heads of a group in one item: all of them, or a part of a large group
    int64_t blocks_per_group;
    int64_t item_groups; // 1 if a group is in parts
    int64_t group_blocks;
    int64_t item_tokens;
    int64_t token_blocks;
    int64_t items;
    int64_t words;
    int64_t splits;                   // parts of an item, each over its share of the words
    int64_t mask_heads, mask_streams; // 0 without a mask
    bool fp16;                        // the numerics of ops/attention_fp16.h
    bool any_order;                   // ops/attention_any_order.h; then an item has one group, and no splits
    bool convert;                     // K or V is of a type that the kernels do not read
    // prepared: the mask's bits, and a byte for each word that tells whether a visible value in it is not 0
    uint64_t biased_at, mask_bytes;
    // scratch; sizes may exceed a 32-bit address space, which the executor refuses
    uint64_t partials_at, workspace_at;
    uint64_t workspace_bytes, total;
    // workspace of one thread, in floats and (own) 32-bit integers
    uint64_t scores_at, tile_at, k_at, v_at, output_at, max_at, sums_at, own_at, queries_at, values_at;
    uint64_t any_order_at;

    int64_t groups() const { return heads / group; }
    int64_t group_rows() const { return item_heads * item_tokens; }
    int64_t item_rows() const { return item_groups * group_rows(); }
    int64_t partial_floats() const { return item_rows() * (dv + 2); }
    int64_t mask_lines() const { return tokens * mask_heads * mask_streams; }
};

// Can the kernels read cells of this type as they are? Those of the FP16 numerics must hold FP16 numbers.
bool attention_reads(uint32_t type, bool fp16);

attention_plan make_attention_plan(const tb_op & op, int n_threads);

} // namespace tb::npu

#endif // TILEBEAM_NPU_OPS_ATTENTION_PLAN_H
