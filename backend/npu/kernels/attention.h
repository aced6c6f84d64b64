// Attention kernels: the three steps of one FlashAttention tile, rows x cells.
//
// A tile is a list of query rows (any heads of one GQA group, any tokens) against a list of at most
// attention_tile_cells KV cells, both given as pointers, so that K and V are read once for all rows and cells that a
// mask hides are never read at all. ops/flash_attn.cpp decides which rows meet which cells; the kernels do
//   scores      s[r][c] = sum_d q[r][d] * k[c][d]                                              float32 sums
//   softmax     t = (s - running max) * log2(e) rounded to FP16, p = exp2 table entry (FP16)     per row
//               (or, asked for exact ones, p = exp(s - running max) in float32)
//   accumulate  o[r][:] = o[r][:] * alpha[r] + sum_c p[r][c] * v[c][:]                         float32 sums
// exp2 of FP16 is defined by a table over the 32768 non-positive inputs; a set may evaluate it in registers if it
// returns the same bits for every one of them.
#ifndef TILEBEAM_NPU_KERNELS_ATTENTION_H
#define TILEBEAM_NPU_KERNELS_ATTENTION_H

#include <cstddef>
#include <cstdint>

namespace tb::npu {

constexpr int attention_tile_cells = 64; // cells per tile at most: one bit each in a uint64_t
constexpr int attention_tile_rows = 128; // query rows per tile at most
// Rows at a time for which a set sums a score's products in the same order, however many they are.
constexpr int attention_any_order_rows = 6;
constexpr int64_t attention_any_order_dim(int64_t dim) { return (dim + 31) / 32 * 32; } // room for a row of its sums
// Room for a tile's cells as floats, or, dim rounded up to the matrix unit's 32, for operands in FP16.
constexpr int64_t attention_scratch_floats(int64_t dim) { return (dim + 31) / 32 * 32 * attention_tile_cells; }
constexpr int attention_sum_parts = 16; // floats whose sum is a row's running sum: a vector's lanes

// K or V cells are rows of F16, of float or of Q8_0 blocks, contiguous inside a row.
enum class cell_type { f16, f32, q8_0 };

// Memory that is likely to be wanted soon: `rows` rows of a cache, `bytes` each, row i at base + cells[i] * stride. A
// kernel asks for it little by little while it computes: a CPU that is asked for many lines at once stops until most of
// them have come, and its own prefetchers do not follow the short pieces that one head's cells are. Or ignores it.
struct attention_fetch {
    const uint8_t * base;
    int64_t stride;
    const int32_t * cells;
    int rows, bytes;
};

struct attention_scores_args {
    int rows, cells, dim;
    const float * const * q; // [rows], each dim floats
    const void * const * k;  // [cells], each dim elements of `type`
    cell_type type;
    float * s;       // [rows][attention_tile_cells]
    float * scratch; // attention_scratch_floats(dim) floats, 128-byte aligned
    attention_fetch fetch;
};

// The least that scores are taken relative to: where nothing was seen, whose maximum is -inf, any finite number makes
// powers of 0. Scores that are NaN stay so.
constexpr float attention_least_base = -1e38f;

// What happens to the scores of rows that see the same cells in one tile. Hidden cells (bit c of `visible` is 0) get
// p = 0.
struct attention_softmax_args {
    int rows, cells;
    uint64_t visible;
    const float * bias; // [attention_tile_cells] added to the scaled (and capped) score; nullptr: none
    float scale;
    float softcap; // 0: none; else s = softcap * tanh(s * scale / softcap)
    float * s;     // [rows][attention_tile_cells] in: scores, out: p; past `cells`: scratch
    float * max;   // [rows] running maximum, -inf at first
    float * sum;   // [rows][attention_sum_parts] running sum of p, in parts, 0 at first
    float * alpha; // [rows] out: the factor by which what was accumulated before must be multiplied
    bool exact;    // float32 exponentials instead of the table
};

struct attention_accumulate_args {
    int rows, cells, dim;
    const float * p;     // [rows][attention_tile_cells]
    const float * alpha; // [rows]
    const void * const * v;
    cell_type type;
    float * const * o; // [rows], each dim floats
    float * scratch;   // as above
    attention_fetch fetch;
};

struct attention_any_order_args {
    int rows, cells, dim;
    const double * p; // [rows][attention_tile_cells], of floats from 0 to 1
    const void * const * v;
    cell_type type;
    double * const * o; // [rows], each attention_any_order_dim(dim) numbers
    float * scratch;    // as above
    attention_fetch fetch;
};

// The FP16 numerics (ops/attention_fp16.h) on a matrix unit: operands are FP16 numbers, whatever type they are in, sums
// float32, results FP16 numbers.
struct attention_fp16 {
    const char * name; // nullptr: the set has no matrix unit; its other kernels and rounding do the same
    void (*scores)(const attention_scores_args & a);
    // o[r][:] = sum_c p[r][c] * v[c][:]; what o held, and alpha, have no effect.
    void (*products)(const attention_accumulate_args & a);
};

// Sums that are the same bits in whatever order their terms come (TB_FLAG_DETERMINISTIC): every term is rounded to one
// grid, and sums of multiples of the grid are exact. The grid is the last bit of an `anchor`, a double from which the
// sum starts, and from which it stays closer than half of it: each addition then rounds to the grid. No term lies in
// the middle between two of its points, where a double would round to an even sum, and so by what came before.
struct attention_any_order {
    // x = exp(x - max) in place, elements alike wherever they stand; returns their sum. max: of x, finite.
    double (*powers)(int64_t n, float * x, float max);
    // o[r][:] += p[r][c] * v[c][:] for all cells.
    void (*accumulate)(const attention_any_order_args & a);
};

struct attention_kernels {
    const char * name; // e.g. "attention_f16_4x4_avx512vnni"
    void (*scores)(const attention_scores_args & a);
    void (*softmax)(const attention_softmax_args & a);
    void (*accumulate)(const attention_accumulate_args & a);
    // Of `cells` (at most 64) F16 mask values: bit c is set if cell c is not -inf. *biased gets the bits of those that
    // are not zero either.
    uint64_t (*visible)(const uint16_t * mask, int cells, uint64_t * biased);
    // out[i] = exp2(in[i]) for non-positive FP16 numbers (bits); positive inputs count as 0, NaN gives NaN.
    void (*exp2_fp16)(const uint16_t * in, uint16_t * out, size_t n);
    attention_fp16 fp16;
    attention_any_order any_order;
};

// The 64 KiB table, indexed by the low 15 bits of a non-positive FP16 number; built at first use.
const uint16_t * attention_exp2_table();

void fill_attention_portable(attention_kernels & k);
void fill_attention_avx2(attention_kernels & k);
void fill_attention_avx512vnni(attention_kernels & k);
void fill_attention_neon(attention_kernels & k);
void fill_attention_hvx(attention_kernels & k);

} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_ATTENTION_H
