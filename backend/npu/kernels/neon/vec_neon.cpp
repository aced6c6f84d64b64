// Vector kernels of this set: the portable loops compiled for it.
#include "kernels/vec.h"
#include "kernels/vec_loops.h"

namespace tb::npu {

void fill_vec_neon(vec_kernels & k) { fill_vec_loops(k); }

} // namespace tb::npu
