// The matrix unit as the vector unit sees it: a scalar model with its tile semantics, in the place where a device build
// puts the instructions of the real one.
//
// Operands and results are tiles of 32 x 32 FP16 numbers in HMX order: each two rows interleaved, element (row, column)
// at (row >> 1) * 64 + 2 * column + (row & 1). A product runs over any number of tile pairs into one accumulator of
// float32 that stays inside the unit; FP16 comes out once, at the end, rounded to nearest even.
#ifndef TILEBEAM_NPU_KERNELS_HVX_HMX_MODEL_H
#define TILEBEAM_NPU_KERNELS_HVX_HMX_MODEL_H

#include <cstdint>

#include "half.h"

namespace tb::npu::hmx {

constexpr int side = 32;
constexpr int tile_halves = side * side;

constexpr int element(int row, int column) { return (row >> 1) * 2 * side + 2 * column + (row & 1); }

struct accumulator {
    float at[side][side]; // [row][column]
};

inline void clear(accumulator & a) { a = accumulator{}; }

// a(m, n) += sum over k of x(m, k) * w(k, n), k ascending; the first `rows` rows of the activations only (what a real
// unit does to the others nobody reads). A product of two FP16 numbers is exact in float32.
inline void multiply(accumulator & a, int rows, const uint16_t * x, const uint16_t * w, int64_t tiles) {
    for (; tiles != 0; tiles--, x += tile_halves, w += tile_halves) {
        for (int k = 0; k < side; k++) {
            float weight[side];
            for (int n = 0; n < side; n++)
                weight[n] = tb_half_to_float(w[element(k, n)]);
            for (int m = 0; m < rows; m++) {
                const float v = tb_half_to_float(x[element(m, k)]);
                for (int n = 0; n < side; n++)
                    a.at[m][n] += v * weight[n];
            }
        }
    }
}

// The accumulator as an FP16 tile.
inline void store(const accumulator & a, int rows, uint16_t * out) {
    for (int m = 0; m < rows; m++) {
        for (int n = 0; n < side; n++)
            out[element(m, n)] = tb_float_to_half(a.at[m][n]);
    }
}

} // namespace tb::npu::hmx

#endif // TILEBEAM_NPU_KERNELS_HVX_HMX_MODEL_H
