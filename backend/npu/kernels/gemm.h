// GEMM kernels: one panel of 32 weight columns against one group of activation rows.
//
// Activations are rearranged once per MUL_MAT into groups of at most `rows` rows (gemm_int8.rows, gemm_float.rows):
// whatever a kernel reads of a group lies at constant distances from one pointer, in the order in which it is used.
//
//   int8 group   for each 32 k one record: int8 q[rows][32], float scale[rows], int32 start[rows]
//                q in the quad order of the tiles (k 0, 2, 1, 3 of each four), scale = absolute maximum / 127,
//                start = -offset * sum(q): weights enter the dot product as unsigned numbers, their true value plus
//                gemm_int8.offset, and the start value takes that back out. Formats with minima (w = d q + m) have
//                offset -1: their start is sum(q), which the minima are multiplied with. A set with
//                gemm_kernels.row_pairs has two rows' q side by side: eight k of the first, eight of the second; an
//                odd last row by itself
//   K group      for each 256 k one record, for types of 256 k: kernels/gemm_k.h
//   float group  float x[k][rows]
//
// Every kernel writes all 32 columns of every row through `out`; the caller hands it a buffer where a panel has fewer.
// Sums run over k in order, so splitting k over several calls (add = true) changes no bit.
#ifndef TILEBEAM_NPU_KERNELS_GEMM_H
#define TILEBEAM_NPU_KERNELS_GEMM_H

#include <cstddef>
#include <cstdint>

#include "kernels/tiles.h"
#include "tilebeam/k_panels.h"
#include "tilebeam/types.h"

namespace tb::npu {

constexpr int gemm_panel = 32;               // columns of a panel, and k of a tile
constexpr int gemm_max_rows = 32;            // rows of a group at most,
constexpr int gemm_most_rows = 128;          // and of AMX, which makes a panel's weights once for all of them
constexpr float gemm_least_amax = 0x1p-110f; // a block of activations smaller than this counts as zero

// Bytes of the record of one 32 k of an int8 group.
constexpr size_t gemm_record_bytes(int rows) { return static_cast<size_t>(rows) * 40; }

// How weights reach an integer kernel: tiles with a scale per column; or `prepared`, what `tile` grouping is turned
// into: the 8-bit quants of a Q8_0 tile, then 32 float scales.
enum gemm_format {
    gemm_q4,
    gemm_q8,
    gemm_iq4nl,
    gemm_prepared,
    gemm_q5_0,
    gemm_q4_1,
    gemm_q5_1,
    gemm_mxfp4,
    gemm_q1_0,
    gemm_q2_0,
    gemm_nvfp4,
    gemm_q4_k, // block panels (tilebeam/k_panels.h) against K groups
    gemm_q5_k,
    gemm_q6_k,
    gemm_q2_k,
    gemm_q3_k,
    gemm_iq4_xs,
    gemm_tq2_0,
    gemm_tq1_0,
    gemm_iq2_xxs,
    gemm_iq2_xs, // and IQ2_S, whose panels are the same
    gemm_iq3_xxs,
    gemm_iq3_s,
    gemm_iq1_s,
    gemm_iq1_m,
    gemm_format_count
};
constexpr int32_t gemm_minima_offset = -1;
constexpr size_t gemm_prepared_quants = TB_QUANTS(8);
constexpr size_t gemm_prepared_bytes = gemm_prepared_quants + gemm_panel * sizeof(float);

// The requantization of `tile` grouping, in fixed point so that every ISA gives the same bits: a block's scale is
// R = round(scale / common scale * 2^shift), its quants become (q * 2^(15 - shift) * R + 2^14) >> 15. Q4_0: the common
// scale is the largest * 8 / 127 (a grid 16 times finer than the quants' own). Q8_0 and IQ4_NL, whose values reach 127
// already: the largest itself, so that its blocks keep their values.
constexpr int gemm_requantize_shift_q4 = 11;
constexpr int gemm_requantize_shift_q8 = 14;

// A record of a K group: int8 q[rows][256], float scale[rows], int16 sums[rows][16] of 16 k each and sums[rows][8] of
// 32 k each. Of one row:
constexpr size_t gemm_k_sums16 = 16 * sizeof(int16_t);
constexpr size_t gemm_k_sums32 = 8 * sizeof(int16_t);
constexpr size_t gemm_k_record_bytes(int rows) {
    return static_cast<size_t>(rows) * (TB_K_BLOCK + sizeof(float) + gemm_k_sums16 + gemm_k_sums32);
}

constexpr int gemm_k_tiles = TB_K_BLOCK / gemm_panel;

// Tiles that are staged at a time, so that activations stay in L1 beside them.
constexpr int gemm_piece_tiles = 16;

struct gemm_int8_args {
    const uint8_t * panel; // k_tiles tiles
    const uint8_t * group; // k_tiles records
    int64_t k_tiles;
    int rows;            // of the group
    bool add;            // out += instead of out =
    float * const * out; // [rows], 32 floats each
};

struct gemm_int8 {
    const char * name; // e.g. "gemm_q4c_32x32_avx512vnni"
    int rows;          // rows per group at most
    int32_t offset;    // of the unsigned weights
    void (*run)(const gemm_int8_args & a);
};

struct gemm_float_args {
    const float * panel; // [k][32]
    const float * group; // [k][rows]
    int64_t k;
    int rows;
    bool add;
    float * const * out;
};

struct gemm_float {
    const char * name;
    int rows;
    void (*run)(const gemm_float_args & a);
};

// Dot products straight from plain weight rows, out[r][c] = sum_k x[r][k] * w[c][k].
enum gemm_float_type { gemm_f32, gemm_f16, gemm_bf16, gemm_float_type_count };

struct gemm_dot_args {
    const uint8_t * w; // row c at w + c * stride
    int64_t stride;    // bytes
    int cols, rows;    // 1 or more
    int64_t k;
    const float * const * x; // [rows]
    float * const * out;     // [rows], `cols` floats each
    void * scratch;          // gemm_dot_scratch(rows, k) bytes, 64-byte aligned
};

// Activations in a kernel's own order, of whole vectors.
constexpr int64_t gemm_dot_scratch(int64_t rows, int64_t k) {
    return rows * ((k + gemm_panel - 1) / gemm_panel * gemm_panel) * 4;
}

struct gemm_dot {
    const char * name;
    int rows; // for more, panels of `pack` pay for themselves
    void (*run)(const gemm_dot_args & a);
};

// The FP16 numerics on a matrix unit: operands are tiles of 32 x 32 FP16 numbers in HMX order (layout.h), 128-byte
// aligned; sums are float32 over all of k, and results FP16.
constexpr int64_t gemm_fp16_tile_bytes = 2048;

struct gemm_fp16_args {
    const uint16_t * panel; // k_tiles tiles of weights, [k][column]
    const uint16_t * group; // k_tiles tiles of activations, [row][k]; what rows past `rows` hold has no effect
    int64_t k_tiles;
    int rows;            // 1..32
    float * const * out; // [rows], 32 floats each, that are FP16 numbers
};

struct gemm_fp16 {
    const char * name; // nullptr: the set has no matrix unit; `dequantize`, `f32` and `round_fp16` do the same
    int rows;
    // A panel of any tiled type to k_tiles tiles.
    void (*dequantize)(uint32_t type, const uint8_t * panel, int64_t k_tiles, uint16_t * tiles);
    // One row's k_tiles * 32 floats, rounded to FP16, into its place in k_tiles tiles.
    void (*activations)(const float * x, int64_t k_tiles, uint16_t * tiles, int row);
    void (*run)(const gemm_fp16_args & a);
};

struct gemm_kernels {
    gemm_int8 int8[gemm_format_count];
    bool row_pairs; // of int8 groups
    gemm_float f32;
    gemm_fp16 fp16;
    gemm_dot dot[gemm_float_type_count];
    // One row's k_tiles * 32 floats into place `row` of a group of `rows`. A block of 32 with a NaN or infinity in it
    // gets q = 0 and scale = NaN, so the row's results are NaN. The same bits from every ISA, but for row_pairs.
    void (*quantize)(const float * x, int64_t k_tiles, int32_t offset, uint8_t * group, int rows, int row);
    // The same for a K group: n * 8 tiles of activations.
    void (*quantize_k)(const float * x, int64_t k_tiles, uint8_t * group, int rows, int row);
    // `tile`-grouped tiles (TB_Q4_0_TILE, TB_Q8_0_TILE, TB_IQ4_NL_TILE) to gemm_prepared: int8 against one scale per
    // column and 32 k.
    void (*prepare)(uint32_t type, const uint8_t * panel, int64_t k_tiles, uint8_t * out);
    // Any tiled type to float [k][32], each value rounded to FP16.
    void (*dequantize)(uint32_t type, const uint8_t * panel, int64_t k_tiles, float * out);
    // `cols` (1..32) plain rows (TB_F32, TB_F16, TB_BF16) of k elements, `stride` bytes apart, to float [k][32];
    // missing columns are 0.
    void (*pack)(uint32_t type, const uint8_t * src, int64_t stride, int cols, int64_t k, float * out);
    // x[i] = x[i] rounded to FP16 (to nearest even, to infinity where it overflows)
    void (*round_fp16)(int64_t n, float * x);
};

} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_GEMM_H
