// The avx2 kernel set: which families it fills.
#include "kernels/kernels.h"

namespace tb::npu {

void fill_avx2(kernel_table & t) {
    t.isa = "avx2";
    fill_gemm_avx2(t.gemm);
    fill_attention_avx2(t.attention);
    fill_vec_avx2(t.vec);
}

} // namespace tb::npu
