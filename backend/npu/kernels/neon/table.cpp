// The neon kernel set: which families it fills.
#include "kernels/kernels.h"

namespace tb::npu {

void fill_neon(kernel_table & t) {
    t.isa = "neon";
    fill_gemm_neon(t.gemm);
    fill_attention_neon(t.attention);
    fill_vec_neon(t.vec);
}

} // namespace tb::npu
