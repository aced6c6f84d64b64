// The avx512bf16 kernel set: avx512vnni's but for products with BF16 weights and attention of many rows.
#include "kernels/kernels.h"

namespace tb::npu {

void fill_avx512bf16(kernel_table & t) {
    fill_avx512vnni(t);
    t.isa = "avx512bf16";
    fill_gemm_avx512bf16(t.gemm);
    fill_attention_avx512bf16(t.attention);
}

} // namespace tb::npu
