// The hvx kernel set: which families it fills.
#include "kernels/kernels.h"

namespace tb::npu {

void fill_hvx(kernel_table & t) {
    t.isa = "hvx";
    fill_gemm_hvx(t.gemm);
    fill_attention_hvx(t.attention);
    fill_vec_hvx(t.vec);
}

} // namespace tb::npu
