// How many rows and vectors of columns a GEMM kernel keeps in registers: the shape with the fewest loads per dot
// product among those that fit (the MNN-AECS paper's search, done by the compiler).
//
// A tile of r rows and v vectors loads r activations and v vectors of weights for r * v dot products. Its sums take
// `sums` registers for each of the r * v; beside them live the v vectors of weights, one activation, and `spare`
// registers for what the end of a block computes.
#ifndef TILEBEAM_NPU_KERNELS_GEMM_SHAPE_H
#define TILEBEAM_NPU_KERNELS_GEMM_SHAPE_H

namespace tb::npu {

struct gemm_shape {
    int rows, vectors;
};

// `vectors` divides `panel_vectors`, the vectors of a panel's 32 columns. Of equal shapes the one with more vectors.
constexpr gemm_shape solve_gemm_shape(int registers, int panel_vectors, int sums, int spare, int most_rows) {
    gemm_shape best{1, 1};
    for (int v = 1; v <= panel_vectors; v++) {
        if (panel_vectors % v != 0) continue;
        for (int r = 1; r <= most_rows; r++) {
            if (r * v * sums + v + 1 + spare > registers) break;
            // (r + v) / (r * v) against the best one's, without fractions
            if ((r + v) * best.rows * best.vectors <= (best.rows + best.vectors) * r * v) best = {r, v};
        }
    }
    return best;
}

} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_GEMM_SHAPE_H
