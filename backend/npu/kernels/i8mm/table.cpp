// The i8mm kernel set: NEON's but for the integer GEMM.
#include "kernels/kernels.h"

namespace tb::npu {

void fill_i8mm(kernel_table & t) {
    fill_neon(t);
    t.isa = "i8mm";
    fill_gemm_i8mm(t.gemm);
}

} // namespace tb::npu
