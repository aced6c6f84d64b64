// AVX-512 attention kernels.
#include "kernels/attention.h"

namespace tb::npu {

void fill_attention_avx512vnni(attention_kernels & k) { k.name = "attention_f16_1x1_portable"; }

} // namespace tb::npu
