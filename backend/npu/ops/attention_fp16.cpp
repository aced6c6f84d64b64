// The FP16 numerics of FLASH_ATTN, on a set's matrix unit or by rounding what its float32 kernels give.
#include "ops/attention_fp16.h"

#include <algorithm>

namespace tb::npu {

void fp16_products::scores(attention_scores_args a) const {
    const float * rounded[attention_tile_rows];
    for (int r = 0; r < a.rows; r++) {
        float * row = queries + static_cast<size_t>(r) * static_cast<size_t>(a.dim);
        kernels.vec.scale(a.dim, a.q[r], scale, 0.0f, row);
        rounded[r] = row;
    }
    kernels.gemm.round_fp16(static_cast<int64_t>(a.rows) * a.dim, queries);
    a.q = rounded;
    if (kernels.attention.fp16.name != nullptr) return kernels.attention.fp16.scores(a);
    kernels.attention.scores(a);
    for (int r = 0; r < a.rows; r++)
        kernels.gemm.round_fp16(a.cells, a.s + r * attention_tile_cells);
}

void fp16_products::accumulate(attention_accumulate_args a) const {
    float * const * sums = a.o;
    float * products[attention_tile_rows];
    float ones[attention_tile_rows];
    const int64_t all = static_cast<int64_t>(a.rows) * a.dim;
    for (int r = 0; r < a.rows; r++) {
        products[r] = values + static_cast<size_t>(r) * static_cast<size_t>(a.dim);
        ones[r] = 1.0f;
    }
    const float * alpha = a.alpha;
    a.o = products;
    a.alpha = ones;
    if (kernels.attention.fp16.name != nullptr) {
        kernels.attention.fp16.products(a);
    } else {
        std::fill_n(values, all, 0.0f);
        kernels.attention.accumulate(a);
        kernels.gemm.round_fp16(all, values);
    }
    for (int r = 0; r < a.rows; r++) {
        kernels.vec.scale(a.dim, sums[r], alpha[r], 0.0f, sums[r]);
        kernels.vec.add(a.dim, sums[r], products[r], sums[r]);
        kernels.gemm.round_fp16(a.dim, sums[r]);
    }
}

} // namespace tb::npu
