// FLASH_ATTN under TB_FLAG_FP16: Algorithm 1 of "Scaling LLM Test-Time Compute with Mobile NPU on Smartphones". What
// the two products read and give (Q, K, S; P, V, O) are FP16 numbers; sums inside a product and a row's sum of P are
// float32, and so are the running maximum and what O is multiplied with when it moves.
#ifndef TILEBEAM_NPU_OPS_ATTENTION_FP16_H
#define TILEBEAM_NPU_OPS_ATTENTION_FP16_H

#include "kernels/kernels.h"

namespace tb::npu {

// The products of one tile, in the places of attention_kernels.scores and .accumulate.
struct fp16_products {
    const kernel_table & kernels;
    float scale;     // of the scores; goes into Q, which keeps S within FP16's range
    float * queries; // rows * dk floats
    float * values;  // rows * dv floats

    // s[r][c] = FP16(FP16(q[r] * scale) . k[c]); K cells hold FP16 numbers.
    void scores(attention_scores_args a) const;
    // o[r] = FP16(alpha[r] * o[r] + FP16(sum_c p[r][c] * v[c])); p and V cells hold FP16 numbers.
    void accumulate(attention_accumulate_args a) const;
};

} // namespace tb::npu

#endif // TILEBEAM_NPU_OPS_ATTENTION_FP16_H
