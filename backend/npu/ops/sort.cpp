// ARGSORT and TOP_K: the order of a row's elements, as indices.
//
// An element and its index are packed into one 64-bit key whose unsigned order is the order asked for: the float's bits
// made monotonic, then the index, so that equal elements come in the order of their indices and the result is the same
// however the work was cut. A row with a NaN in it gets indices in range and no promise of their order.
#include "ops/ops.h"

#include <algorithm>
#include <cstring>

namespace tb::npu {
namespace {

// Monotonic in x: larger floats give larger words.
uint32_t rank_of(float x) {
    if (x != x) {
        return 0;
    }
    x += 0.0f; // -0 is equal to 0
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

uint64_t keys_bytes(int64_t n) { return align64(static_cast<uint64_t>(n) * sizeof(uint64_t)); }

// The first dst.ne(0) of each row of src0.
void sort_rows(const op_context & ctx, bool descending) {
    const view & x = ctx.src[0];
    const int64_t n = x.ne(0);
    const int64_t wanted = ctx.dst.ne(0);
    uint64_t * keys = reinterpret_cast<uint64_t *>(ctx.scratch + static_cast<size_t>(ctx.thread) * keys_bytes(n));
    for (const int64_t r : ctx.share(x.rows())) {
        const row_index i = row_of(x, r);
        const float * row = x.at<const float>(i.i1, i.i2, i.i3);
        for (int64_t j = 0; j < n; j++) {
            const uint32_t rank = rank_of(row[j]);
            keys[j] = static_cast<uint64_t>(descending ? ~rank : rank) << 32 | static_cast<uint32_t>(j);
        }
        if (wanted < n) {
            std::nth_element(keys, keys + wanted, keys + n);
        }
        std::sort(keys, keys + wanted);
        std::transform(keys, keys + wanted, ctx.dst.at<int32_t>(i.i1, i.i2, i.i3),
                       [](uint64_t key) { return static_cast<int32_t>(key); });
    }
}

void argsort(const op_context & ctx) { sort_rows(ctx, ctx.param_i(0) != 0); }

void top_k(const op_context & ctx) { sort_rows(ctx, true); }

uint64_t scratch_bytes(const tb_op & op, int n_threads, const kernel_table &) {
    return static_cast<uint64_t>(n_threads) * keys_bytes(op.src[0].ne[0]);
}

} // namespace

const op_entry argsort_entry = {argsort, scratch_bytes};
const op_entry top_k_entry = {top_k, scratch_bytes};

} // namespace tb::npu
