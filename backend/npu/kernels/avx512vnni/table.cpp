// The avx512vnni kernel set: which families it fills.
#include "kernels/kernels.h"

namespace tb::npu {

// Every CPU with AVX-512 VNNI has AVX2, so what this set lacks comes from there.
void fill_avx512vnni(kernel_table & t) {
    fill_avx2(t);
    t.isa = "avx512vnni";
    fill_gemm_avx512vnni(t.gemm);
    fill_attention_avx512vnni(t.attention);
    fill_vec_avx512vnni(t.vec);
}

} // namespace tb::npu
