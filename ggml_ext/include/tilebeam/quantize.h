// Quantizing float weights straight into tiles: round to nearest as ggml does, or a search for better scales.
//
// 32 weights share an FP16 scale d: one column's 32 k (`column` grouping) or a 2(k) x 16(n) block (`tile` grouping).
// Each is stored as d * q, q from the type's code book: -8..7 (Q4_0, so that the sign of d matters), -127..127 (Q8_0),
// or IQ4_NL's sixteen values. Round to nearest takes d from the largest weight. The search takes the d (and the q that
// are nearest for it) with the smallest sum of (x - d*q)^2 that it finds, over both signs of d, with d as FP16 rounds
// it; it is never worse than round to nearest on any group of 32.
#ifndef TILEBEAM_QUANTIZE_H
#define TILEBEAM_QUANTIZE_H

#include <stdint.h>

#include "tilebeam/types.h"

#ifdef __cplusplus
extern "C" {
#endif

// cffi: begin
// Sums over weights x stored as y.
struct tb_quantize_error {
    double squared; // (x - y)^2
    double energy;  // x^2
};

// Whether floats can be quantized to a type, plain or tiled: Q4_0, Q8_0 and IQ4_NL. Blocks of other types become tiles
// as they are.
int tb_has_quantizer(uint32_t type);

// Quantize n float rows, row-major [n][K], into a matrix of a tiled type that has a quantizer: tb_tiled_bytes(type, k,
// n) bytes; rows past n count as zero. `search` is 0 (round to nearest), 1, or 4, 8 or 16: with vectors of so many
// groups, where the CPU has them; the result is the same. `error`, unless NULL, is added to. TB_E_UNSUPPORTED if the
// type is no such one, the vectors are too long, or a value is not finite or needs a scale beyond FP16.
int tb_quantize(uint32_t type, uint64_t k, uint64_t n, const float * src, int search, void * tiles,
                struct tb_quantize_error * error);
// cffi: end

#ifdef __cplusplus
}
#endif

#endif // TILEBEAM_QUANTIZE_H
