// Vector kernels of this set: the shared ones compiled for it.
#include "kernels/neon/simd.h"

#include "kernels/vec.h"
#include "kernels/vec_loops.h"
#include "kernels/vec_simd.h"

namespace tb::npu {

void fill_vec_neon(vec_kernels & k) {
    fill_vec_loops(k);
    fill_vec_simd(k);
}

} // namespace tb::npu
