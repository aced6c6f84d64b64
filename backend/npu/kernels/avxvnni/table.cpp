// The avxvnni kernel set: AVX2's but for the integer GEMM.
#include "kernels/kernels.h"

namespace tb::npu {

void fill_avxvnni(kernel_table & t) {
    fill_avx2(t);
    t.isa = "avxvnni";
    fill_gemm_avxvnni(t.gemm);
}

} // namespace tb::npu
