// AVX-512 attention kernels: the shared ones over 16 lanes.
#include "kernels/avx512vnni/simd.h"

#include "kernels/attention.h"
#include "kernels/attention_simd.h"

namespace tb::npu {

void fill_attention_avx512vnni(attention_kernels & k) {
    fill_attention_simd(k);
    k.name = "attention_f16_6x64_avx512";
}

} // namespace tb::npu
