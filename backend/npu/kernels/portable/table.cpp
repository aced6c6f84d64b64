// The portable kernel set: complete, the base of all others.
#include "kernels/kernels.h"

namespace tb::npu {

void fill_portable(kernel_table & t) {
    t.isa = "portable";
    fill_gemm_portable(t.gemm);
    fill_attention_portable(t.attention);
    fill_vec_portable(t.vec);
}

} // namespace tb::npu
