// NEON attention kernels: the portable ones so far.
#include "kernels/attention.h"

namespace tb::npu {

void fill_attention_neon(attention_kernels & k) { k.name = "attention_f16_1x1_portable"; }

} // namespace tb::npu
