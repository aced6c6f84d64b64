// Op descriptors: what the CPU side asks the NPU side to compute. Fixed width, no pointers.
//
// Semantics are ggml's, of the pinned version, for the op of the same name; `params` are the first 64 bytes of the ggml
// tensor's op_params, so nothing is translated twice. ne and nb are ggml's too: ne[0] is the fastest dimension,
// nb[i] byte strides. A tiled matrix has ne = [K, N, ..]; its nb[0] and nb[1] are not used, nb[2] and nb[3] are the
// byte distances between matrices.
#ifndef TILEBEAM_OPS_H
#define TILEBEAM_OPS_H

#include <stddef.h>
#include <stdint.h>

#include "tilebeam/types.h"

#ifdef __cplusplus
extern "C" {
#endif

// cffi: begin
#define TB_MAX_SRC 8
#define TB_NO_BUFFER 0xffffffff
#define TB_UNARY_KINDS 22 // of ggml_unary_op

// Modes of ROPE, as ggml numbers them. The last three have four positions per token, all tokens' first ones first.
#define TB_ROPE_NORMAL 0
#define TB_ROPE_NEOX 2
#define TB_ROPE_MROPE 8
#define TB_ROPE_VISION 24
#define TB_ROPE_IMROPE 40

enum tb_op_code {
    TB_OP_NOP = 0,
    TB_OP_MUL_MAT = 1,    // src0 weights [K,N,..], src1 F32 [K,M,..], dst F32 [N,M,..]; src0 broadcasts over dims 2, 3
    TB_OP_FLASH_ATTN = 2, // src q, k, v, mask (F16, may be absent), sinks (F32, may be absent)
                          // params f32: [0] scale [1] max_bias [2] logit_softcap
    TB_OP_RMS_NORM = 3,   // params f32: [0] eps
    TB_OP_MUL = 4,        // src1 repeats into src0
    TB_OP_ADD = 5,
    TB_OP_ROPE = 6,      // src x, positions (I32), freq_factors (F32, may be absent); params: [1] n_dims [2] mode
                         // [4] n_ctx_orig, f32: [5] freq_base [6] freq_scale [7] ext_factor [8] attn_factor
                         // [9] beta_fast [10] beta_slow; [11] to [14] sections, [15] offset
    TB_OP_SET_ROWS = 7,  // src0 F32 rows, src1 indices (I64 or I32), dst the tensor written into
    TB_OP_GLU = 8,       // params: [0] kind (ggml_glu_op) [1] swapped, f32: [2] alpha [3] limit; src1 may be absent
    TB_OP_SCALE = 9,     // params f32: [0] scale [1] bias
    TB_OP_SOFT_MAX = 10, // src x, mask (F16 or F32, may be absent), sinks (may be absent); f32: [0] scale [1] max_bias
    TB_OP_GET_ROWS = 11, // src0 rows, src1 I32 indices
    TB_OP_CPY = 12,      // CPY, CONT and DUP: src0 to dst, converting
    // what sampling on the device needs, and activations that stand alone
    TB_OP_SUB = 13, // as MUL
    TB_OP_DIV = 14,
    TB_OP_UNARY = 15,   // params: [0] kind (ggml_unary_op); of XIELU also [1..4], floats
    TB_OP_LOG = 16,     // natural
    TB_OP_CLAMP = 17,   // params f32: [0] min [1] max
    TB_OP_FILL = 18,    // params f32: [0] value; src0 gives the shape only
    TB_OP_SUM = 19,     // all elements of src0 to one
    TB_OP_CUMSUM = 20,  // along rows
    TB_OP_ARGMAX = 21,  // src0 [n, m], dst I32 [m]: the first of the largest
    TB_OP_ARGSORT = 22, // params: [0] 0 ascending, 1 descending; dst I32. Equal elements in the order of their indices
    TB_OP_TOP_K = 23,   // dst I32 [k, ..]: the k largest of each row, largest first
    TB_OP_PAD = 24,     // params: [2d] before and [2d + 1] after src0 in dimension d, [8] 1 = wraps around
    // mixtures of experts
    TB_OP_MUL_MAT_ID = 25, // src0 weights [K,N,E], src1 F32 [K, n_used or a divisor of it, T], src2 I32 [n_used, T]:
                           // dst F32 [N, n_used, T], dst[:,i,t] = src0[:,:,src2[i,t]] * src1[:, i % .., t]
    TB_OP_SUM_ROWS = 26,   // src0 [n, ..], dst [1, ..]; params: [0] 1: their mean
    // shapes of other model families
    TB_OP_REPEAT = 27, // dst is src0 repeated in all dimensions
    TB_OP_NORM = 28,   // params f32: [0] eps
    TB_OP_SQR = 29,
    TB_OP_SQRT = 30,
    TB_OP_CONCAT = 31,  // params: [0] the dimension along which src1 follows on src0
    TB_OP_L2_NORM = 32, // params f32: [0] eps
    TB_OP_ADD_ID =
        33, // src0 [n, n_used, T] + src1 [n, E], src2 I32 [n_used, T]: dst[:,i,t] = src0[:,i,t] + src1[:,src2[i,t]]
    // Recurrent states. With params[1] = 1 + r the new states go where the old ones are: sequence s begins with the
    // state of its number, and its last one (K is 1) replaces number r + s. dst then holds the results, and room for
    // states.
    TB_OP_SSM_CONV = 34, // src0 [d - 1 + T, C, S], src1 [d, C]: dst[c,t,s] = sum_i src0[t+i,c,s] * src1[i,c].
                         // Or, always with params[1]: src0 [C,T,S] what is new, src2 states [d-1,C,R] what comes before
                         // it, src3 their numbers I32 [S]
    TB_OP_SSM_SCAN = 35, // src states [N,D,H,R], x [D,H,T,S], dt [H,T,S], A [1 or N,H], B and C [N,G,T,S], which of
                         // the states I32 [S]; params: [0] K. dst: results [D,H,T,S], then K states [N,D,H,S]: the
                         // last one, the one before it, ..
    TB_OP_GATED_DELTA_NET = 36, // src q and k [D,Hk,T,S], v [D,H,T,S], decay [1 or D,H,T,S] (its logarithm), beta
                                // [1,H,T,S], states [D,D,H,S], or with their numbers I32 [S] [D,D,H,R]; params:
                                // [0] K. dst [D*H,..]: results, then K states
    // sparse attention, residual streams
    TB_OP_LIGHTNING_INDEXER = 37, // src q [D,H,T,S], k [D,1,cells,S], weights [H,T,1,S], mask F16 [cells,T,1,divides
                                  // S]: dst [cells,T,1,S]: sum over heads of weight * max(q k, 0), plus mask
    TB_OP_DSV4_HC_PRE = 38,  // src x [n,streams,T], weights [streams,T], or with gates [n,streams,T]; params: f32 [0]
                             // scale, [1] 1 = gates, of which the sigmoid weighs. dst [n,T]
    TB_OP_DSV4_HC_POST = 39, // src x [n,T], residual [n,streams,T], post [streams,T], comb [streams,streams,T], may
                             // be absent; dst [n,streams,T]
    TB_OP_DSV4_HC_COMB = 40, // src mixes [24,T], scale [>= 3], base [24]; params: f32 [0] eps, [1] rounds. dst [4,4,T]
    TB_OP_ARANGE = 41,       // no operands; params f32: [0] start [2] step; dst [n]
    TB_OP_POOL_2D = 42,      // params: [0] 0 largest, 1 mean; sizes [1] [2], steps [3] [4], padding [5] [6] of
                             // dimensions 0 and 1
    TB_OP_ROPE_BACK = 43,    // ROPE the other way round
    // More recurrent states: r or q, k, v and the rest [D,H,T,S], states [D,D,H,S], or with their numbers I32 [S]
    // [D,D,H,R]. dst [D*H,..]: results, then a state for each sequence
    TB_OP_RWKV_WKV6 = 44,         // src k, v, r, first [D,H], decay, states [of v,of k,H,R], numbers
    TB_OP_RWKV_WKV7 = 45,         // src r, decay, k, v, a, b, states [of k,of v,H,R], numbers
    TB_OP_GATED_LINEAR_ATTN = 46, // src k, v, q, decay, states as of RWKV_WKV6, numbers; params: f32 [0] scale
    TB_OP_COUNT = 47,
};

// tb_op.flags
#define TB_FLAG_FP16 1      // MUL_MAT, MUL_MAT_ID, FLASH_ATTN: the matrix unit's own numerics (docs/accuracy.md)
#define TB_FLAG_EXACT_EXP 2 // FLASH_ATTN, without TB_FLAG_FP16: float32 exponentials instead of the FP16 table
// MUL_MAT, MUL_MAT_ID, FLASH_ATTN, without any other: a row's result is the same bits whatever other rows there are,
// and wherever the cells that it sees lie (docs/accuracy.md)
// SSM_SCAN, GATED_DELTA_NET, RWKV_WKV7: .. the same bits however many tokens are read at once
#define TB_FLAG_DETERMINISTIC 16

typedef struct tb_tensor {
    uint32_t buffer; // TB_NO_BUFFER: this operand is absent
    uint32_t type;   // enum tb_type
    uint64_t offset; // bytes from the start of the buffer to element (0,0,0,0)
    uint32_t ne[4];
    uint64_t nb[4];
} tb_tensor;

typedef struct tb_op {
    uint32_t code; // enum tb_op_code
    uint32_t flags;
    uint32_t n_src; // operands in src; absent ones in the middle have buffer == TB_NO_BUFFER
    uint32_t tag;   // the caller's own number for this op, returned in failure reports
    int32_t params[16];
    tb_tensor dst;
    tb_tensor src[TB_MAX_SRC];
    char name[48]; // for reports and traces only; NUL-terminated
} tb_op;

// What is known of a mapped buffer when a descriptor is checked.
typedef struct tb_extent {
    uint64_t size;
    uint32_t mapped;
    uint32_t writable;
} tb_extent;

const char * tb_op_name(unsigned code);

// The operand that has an op's recurrent states; that of their numbers follows it, or is SSM_SCAN's last. -1: none.
int tb_op_states(unsigned code);

// The operand that the op writes besides dst: states that new ones replace. -1: none.
int tb_op_written(const tb_op * op);

// Does the executor have this op for these types, shapes, strides and params? Looks at no buffer, so the plugin's
// supports_op asks the same question before anything is allocated. `why` (may be NULL) gets a static string.
int tb_op_check_shape(const tb_op * op, const char ** why);

// Does every operand lie inside its mapped buffer, is dst writable and not overlapping an operand in a way that the
// op cannot bear? extents[i] describes buffer i. Call after tb_op_check_shape.
int tb_op_check_bounds(const tb_op * op, const tb_extent * extents, uint32_t n_extents, const char ** why);

// Bytes from offset to one past the last byte touched; 0 on overflow or unknown type. Empty tensors span 0 bytes and
// set *empty.
uint64_t tb_tensor_span(const tb_tensor * t, int * empty);
// cffi: end

#ifdef __cplusplus
}
#endif

#endif // TILEBEAM_OPS_H
