// Element types and status codes that both sides of the channel, the packer and Python share. What there is to know of
// a type is in the table here, one line a type: names, sizes and groupings are stated nowhere else.
#ifndef TILEBEAM_TYPES_H
#define TILEBEAM_TYPES_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// cffi: begin
#define TB_TILE_K 32
#define TB_TILE_N 32

// Values are part of the protocol and of repacked files' metadata: append, never renumber.
enum tb_type {
    TB_F32 = 0,
    TB_F16 = 1,
    TB_BF16 = 2,
    TB_I32 = 3,
    TB_I64 = 4,
    // plain ggml blocks, rows of K/32 blocks
    TB_Q4_0 = 5,
    TB_Q8_0 = 6,
    TB_IQ4_NL = 7,
    // tiles, `column` grouping
    TB_Q4_0_COL = 8,
    TB_Q8_0_COL = 9,
    TB_IQ4_NL_COL = 10,
    // tiles, `tile` (2x16) grouping
    TB_Q4_0_TILE = 11,
    TB_Q8_0_TILE = 12,
    TB_IQ4_NL_TILE = 13,
    // plain ggml super-blocks of 256 k
    TB_Q4_K = 14,
    TB_Q5_K = 15,
    TB_Q6_K = 16,
    // block panels of 32 columns x 256 k (k_panels.h)
    TB_Q4_K_COL = 17,
    TB_Q5_K_COL = 18,
    TB_Q6_K_COL = 19,
    // and of smaller ones
    TB_Q2_K = 20,
    TB_Q3_K = 21,
    TB_Q2_K_COL = 22,
    TB_Q3_K_COL = 23,
    TB_IQ4_XS = 24,
    TB_IQ4_XS_COL = 25,
    TB_TQ2_0 = 26,
    TB_TQ2_0_COL = 27,
    TB_TQ1_0 = 28,
    TB_TQ1_0_COL = 29,
    // plain ggml blocks with a fifth bit, a minimum, or both
    TB_Q5_0 = 30,
    TB_Q4_1 = 31,
    TB_Q5_1 = 32,
    // tiles, `column` grouping
    TB_Q5_0_COL = 33,
    TB_Q4_1_COL = 34,
    TB_Q5_1_COL = 35,
    // a code book of 4 bits, scales that are powers of two
    TB_MXFP4 = 36,
    TB_MXFP4_COL = 37,
    // plain ggml super-blocks of grid points
    TB_IQ2_XXS = 38,
    TB_IQ2_XS = 39,
    TB_IQ2_S = 40,
    TB_IQ3_XXS = 41,
    TB_IQ3_S = 42,
    TB_IQ1_S = 43,
    TB_IQ1_M = 44,
    // their weights one by one in block panels, larger than the blocks
    TB_IQ2_XXS_COL = 45,
    TB_IQ2_XS_COL = 46,
    TB_IQ2_S_COL = 47,
    TB_IQ3_XXS_COL = 48,
    TB_IQ3_S_COL = 49,
    TB_IQ1_S_COL = 50,
    TB_IQ1_M_COL = 51,
    // plain ggml blocks of one and two bits a weight, of 128 and 64 k
    TB_Q1_0 = 52,
    TB_Q2_0 = 53,
    // tiles, `column` grouping: a block's scale in each of its tiles
    TB_Q1_0_COL = 54,
    TB_Q2_0_COL = 55,
    // the code book of MXFP4 in blocks of 64 k, scales of 8 bits for each 16
    TB_NVFP4 = 56,
    TB_NVFP4_COL = 57,
    TB_TYPE_COUNT = 58,
};

enum tb_status {
    TB_OK = 0,
    TB_E_UNSUPPORTED = 1, // the op, or this type or shape of it, is not one the executor has
    TB_E_SHAPE = 2,       // operands do not fit together, or a dimension overflows
    TB_E_BOUNDS = 3,      // a tensor, or an index read from one, lies outside its buffer
    TB_E_BUFFER = 4,      // no such buffer, or it is read-only
    TB_E_NOMEM = 5,       // allocation or mapping failed, or the session's memory limit is reached
    TB_E_PROTOCOL = 6,    // malformed message
    TB_E_VERSION = 7,     // the peer speaks another protocol or layout version
    TB_E_DEAD = 8,        // the peer is gone
    TB_E_DEADLINE = 9,    // the peer did not answer in time
    TB_E_INTERNAL = 10,   // a bug on the side that reports it
};

// How the scales of a tile are grouped (layout.h).
enum tb_grouping {
    TB_NO_TILES = 0,
    TB_COLUMN = 1,
    TB_TILE = 2,
};

// How the device multiplies by weights of a plain type.
enum tb_weights {
    TB_NEVER = 0,
    TB_AS_THEY_ARE = 1,
    TB_IN_TILES = 2, // plain blocks become tiles while a model loads
};

typedef struct tb_type_info {
    const char * name;    // lower case, for people
    uint32_t ggml;        // ggml's number of the plain type; a tiled type has that of its source
    uint32_t source;      // of a tiled type: the plain type whose values it holds; else TB_TYPE_COUNT
    uint32_t grouping;    // enum tb_grouping
    uint32_t weights;     // enum tb_weights; tiles are TB_IN_TILES
    uint32_t block;       // elements of a block, 1 without blocks; 0 of a tiled type
    uint32_t block_bytes; // of a block, or of an element; 0 of a tiled type
    uint32_t quant_bytes; // of a tile, before its scales; 0 of a plain type, as the next
    uint32_t tile_bytes;
} tb_type_info;

// NULL for an unknown type.
const tb_type_info * tb_type_of(uint32_t type);

// Its parts. Size of one element (or of one block) in bytes, and elements per block; 0 for tiled or unknown types.
unsigned tb_type_size(unsigned type);
unsigned tb_type_block(unsigned type);
int tb_type_is_tiled(unsigned type);
const char * tb_type_name(unsigned type);

// Bytes of one tile (quants and scales); 0 for a type that is not tiled.
size_t tb_tile_bytes(uint32_t type);

// k of the smallest piece that a tiled type is cut into, which is that of its blocks: 32, 64 or 128, or 256
// (k_panels.h; their tb_tile_bytes is an eighth of a block panel); 0 for a type that is not tiled.
uint32_t tb_tile_k(uint32_t type);

// The plain type (TB_Q4_0, ..) whose blocks a tiled type holds, and the other way round by grouping; TB_TYPE_COUNT if
// there is none.
uint32_t tb_tiled_source(uint32_t type);
uint32_t tb_tiled_column(uint32_t plain);
uint32_t tb_tiled_tile(uint32_t plain);

const char * tb_status_name(int status);
// cffi: end

// X(NAME, LABEL, ggml's number, elements of a block, its bytes, enum tb_weights), in the order of enum tb_type.
#define TB_PLAIN_TYPES(X)                                                                                              \
    X(F32, "f32", 0, 1, 4, TB_AS_THEY_ARE)                                                                             \
    X(F16, "f16", 1, 1, 2, TB_AS_THEY_ARE)                                                                             \
    X(BF16, "bf16", 30, 1, 2, TB_AS_THEY_ARE)                                                                          \
    X(I32, "i32", 26, 1, 4, TB_NEVER)                                                                                  \
    X(I64, "i64", 27, 1, 8, TB_NEVER)                                                                                  \
    X(Q4_0, "q4_0", 2, 32, 18, TB_IN_TILES)                                                                            \
    X(Q8_0, "q8_0", 8, 32, 34, TB_IN_TILES)                                                                            \
    X(IQ4_NL, "iq4_nl", 20, 32, 18, TB_IN_TILES)                                                                       \
    X(Q4_K, "q4_k", 12, 256, 144, TB_IN_TILES)                                                                         \
    X(Q5_K, "q5_k", 13, 256, 176, TB_IN_TILES)                                                                         \
    X(Q6_K, "q6_k", 14, 256, 210, TB_IN_TILES)                                                                         \
    X(Q2_K, "q2_k", 10, 256, 84, TB_IN_TILES)                                                                          \
    X(Q3_K, "q3_k", 11, 256, 110, TB_IN_TILES)                                                                         \
    X(IQ4_XS, "iq4_xs", 23, 256, 136, TB_IN_TILES)                                                                     \
    X(TQ2_0, "tq2_0", 35, 256, 66, TB_IN_TILES)                                                                        \
    X(TQ1_0, "tq1_0", 34, 256, 54, TB_IN_TILES)                                                                        \
    X(Q5_0, "q5_0", 6, 32, 22, TB_IN_TILES)                                                                            \
    X(Q4_1, "q4_1", 3, 32, 20, TB_IN_TILES)                                                                            \
    X(Q5_1, "q5_1", 7, 32, 24, TB_IN_TILES)                                                                            \
    X(MXFP4, "mxfp4", 39, 32, 17, TB_IN_TILES)                                                                         \
    X(IQ2_XXS, "iq2_xxs", 16, 256, 66, TB_IN_TILES)                                                                    \
    X(IQ2_XS, "iq2_xs", 17, 256, 74, TB_IN_TILES)                                                                      \
    X(IQ2_S, "iq2_s", 22, 256, 82, TB_IN_TILES)                                                                        \
    X(IQ3_XXS, "iq3_xxs", 18, 256, 98, TB_IN_TILES)                                                                    \
    X(IQ3_S, "iq3_s", 21, 256, 110, TB_IN_TILES)                                                                       \
    X(IQ1_S, "iq1_s", 19, 256, 50, TB_IN_TILES)                                                                        \
    X(IQ1_M, "iq1_m", 29, 256, 56, TB_IN_TILES)                                                                        \
    X(Q1_0, "q1_0", 41, 128, 18, TB_IN_TILES)                                                                          \
    X(Q2_0, "q2_0", 42, 64, 18, TB_IN_TILES)                                                                           \
    X(NVFP4, "nvfp4", 40, 64, 36, TB_IN_TILES)

// X(NAME, LABEL, SOURCE, bytes of a tile's quants, bytes of its scales), by grouping.
#define TB_COLUMN_TYPES(X)                                                                                             \
    X(Q4_0_COL, "q4_0_col", Q4_0, TB_QUANTS(4), TB_HALF_SCALES)                                                        \
    X(Q8_0_COL, "q8_0_col", Q8_0, TB_QUANTS(8), TB_HALF_SCALES)                                                        \
    X(IQ4_NL_COL, "iq4_nl_col", IQ4_NL, TB_QUANTS(4), TB_HALF_SCALES)                                                  \
    X(Q5_0_COL, "q5_0_col", Q5_0, TB_QUANTS(5), TB_HALF_SCALES)                                                        \
    X(Q4_1_COL, "q4_1_col", Q4_1, TB_QUANTS(4), 2 * TB_HALF_SCALES)                                                    \
    X(Q5_1_COL, "q5_1_col", Q5_1, TB_QUANTS(5), 2 * TB_HALF_SCALES)                                                    \
    X(MXFP4_COL, "mxfp4_col", MXFP4, TB_QUANTS(4), TB_POWER_SCALES)                                                    \
    X(Q1_0_COL, "q1_0_col", Q1_0, TB_QUANTS(1), TB_HALF_SCALES)                                                        \
    X(Q2_0_COL, "q2_0_col", Q2_0, TB_QUANTS(2), TB_HALF_SCALES)                                                        \
    X(NVFP4_COL, "nvfp4_col", NVFP4, TB_QUANTS(4), TB_SMALL_SCALES)
#define TB_TILE_TYPES(X)                                                                                               \
    X(Q4_0_TILE, "q4_0_tile", Q4_0, TB_QUANTS(4), TB_HALF_SCALES)                                                      \
    X(Q8_0_TILE, "q8_0_tile", Q8_0, TB_QUANTS(8), TB_HALF_SCALES)                                                      \
    X(IQ4_NL_TILE, "iq4_nl_tile", IQ4_NL, TB_QUANTS(4), TB_HALF_SCALES)
// Blocks of 256 k, grouped by column too: an eighth of a block panel.
#define TB_K_TYPES(X)                                                                                                  \
    X(Q4_K_COL, "q4_k_col", Q4_K, TB_QUANTS(4), 64)                                                                    \
    X(Q5_K_COL, "q5_k_col", Q5_K, TB_QUANTS(5), 64)                                                                    \
    X(Q6_K_COL, "q6_k_col", Q6_K, TB_QUANTS(6), 72)                                                                    \
    X(Q2_K_COL, "q2_k_col", Q2_K, TB_QUANTS(2), 80)                                                                    \
    X(Q3_K_COL, "q3_k_col", Q3_K, TB_QUANTS(3), 56)                                                                    \
    X(IQ4_XS_COL, "iq4_xs_col", IQ4_XS, TB_QUANTS(4), 32)                                                              \
    X(TQ2_0_COL, "tq2_0_col", TQ2_0, TB_QUANTS(2), 8)                                                                  \
    X(TQ1_0_COL, "tq1_0_col", TQ1_0, 208, 8)                                                                           \
    X(IQ2_XXS_COL, "iq2_xxs_col", IQ2_XXS, TB_QUANTS(3), 24)                                                           \
    X(IQ2_XS_COL, "iq2_xs_col", IQ2_XS, TB_QUANTS(3), 40)                                                              \
    X(IQ2_S_COL, "iq2_s_col", IQ2_S, TB_QUANTS(3), 40)                                                                 \
    X(IQ3_XXS_COL, "iq3_xxs_col", IQ3_XXS, TB_QUANTS(4), 24)                                                           \
    X(IQ3_S_COL, "iq3_s_col", IQ3_S, TB_QUANTS(4), 24)                                                                 \
    X(IQ1_S_COL, "iq1_s_col", IQ1_S, TB_QUANTS(2), 24)                                                                 \
    X(IQ1_M_COL, "iq1_m_col", IQ1_M, TB_QUANTS(3), 40)
#define TB_TILED_TYPES(X) TB_COLUMN_TYPES(X) TB_TILE_TYPES(X) TB_K_TYPES(X)

#define TB_QUANTS(bits) (TB_TILE_K * TB_TILE_N * (bits) / 8)
#define TB_HALF_SCALES (TB_TILE_N * 2)  // 32 FP16 numbers
#define TB_POWER_SCALES TB_TILE_N       // 32 exponents: x stands for 2^(x - 128)
#define TB_SMALL_SCALES (2 * TB_TILE_N) // 32 UE4M3 numbers of k 0 to 15, then of k 16 to 31; halves of them are meant

// The code book of IQ4_NL and IQ4_XS, each value plus `offset`.
#define TB_IQ4_NL_VALUES(offset)                                                                                       \
    (offset) - 127, (offset) - 104, (offset) - 83, (offset) - 65, (offset) - 49, (offset) - 35, (offset) - 22,         \
        (offset) - 10, (offset) + 1, (offset) + 13, (offset) + 25, (offset) + 38, (offset) + 53, (offset) + 69,        \
        (offset) + 89, (offset) + 113

// The code book of MXFP4 and NVFP4: twice the values of E2M1, as ggml has them with half of the E8M0 or UE4M3 scale.
#define TB_MXFP4_VALUES(offset)                                                                                        \
    (offset) + 0, (offset) + 1, (offset) + 2, (offset) + 3, (offset) + 4, (offset) + 6, (offset) + 8, (offset) + 12,   \
        (offset) - 0, (offset) - 1, (offset) - 2, (offset) - 3, (offset) - 4, (offset) - 6, (offset) - 8,              \
        (offset) - 12

// Code books of grid types' panels (k_panels.h), by quant, and what part of the super-block's scale is 1 of them.
#define TB_IQ1_PARTS 8 // of 8 (-1, 0 or 1), plus or minus 1
#define TB_IQ1_VALUES -7, 1, 9, 0, -9, -1, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0
#define TB_IQ2_PARTS 8
#define TB_IQ2_VALUES 8, 25, 43, 0, -8, -25, -43, 0, 0, 0, 0, 0, 0, 0, 0, 0
#define TB_IQ3_XXS_PARTS 4
#define TB_IQ3_XXS_VALUES 4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62
#define TB_IQ3_S_PARTS 1
#define TB_IQ3_S_VALUES 1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15

#ifdef __cplusplus
}
#endif

#endif // TILEBEAM_TYPES_H
