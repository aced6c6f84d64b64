// The avx512bf16 kernel set: avx512vnni's but for products with BF16 weights.
#include "kernels/kernels.h"

namespace tb::npu {

void fill_avx512bf16(kernel_table & t) {
    fill_avx512vnni(t);
    t.isa = "avx512bf16";
    fill_gemm_avx512bf16(t.gemm);
}

} // namespace tb::npu
