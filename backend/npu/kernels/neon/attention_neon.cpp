// NEON attention kernels: the shared ones over 4 lanes. Mask bits stay portable.
#include "kernels/neon/simd.h"

#include "kernels/attention.h"
#include "kernels/attention_simd.h"

namespace tb::npu {

void fill_attention_neon(attention_kernels & k) {
    fill_attention_simd(k);
    k.name = "attention_f16_6x16_neon";
}

} // namespace tb::npu
