// What the executor accepts: one row of RULES per op (operands, types, strides) and one function for how its shapes
// fit together. Both sides ask here, so a descriptor that passes can be run without looking again.
//
// Common to all ops:
//   * offsets and strides are multiples of the element's alignment, nothing overflows, at most 2^40 elements;
//   * no two elements of dst share bytes (as far as their number tells), those of operands seldom;
//   * "rows dense" in the table means nb[0] is the type's own size; all other strides are free;
//   * tiled types appear only as MUL_MAT's src0; ne[0] of any block type is a multiple of 32;
//   * an op whose dst has no elements passes when its types do, and does nothing: the executor skips it. An op with a
//     dst but an empty operand is refused, but for CONCAT;
//   * no other operands than the table's: n_src may be smaller when the tail is optional, never larger.
#include "ops_check.h"

#include "tilebeam/layout.h"

// Sets of types: a bit each.
#define T(type) ((uint64_t)1 << (type))
_Static_assert(TB_TYPE_COUNT <= 64, "sets of types have 64 bits");
#define FLOATS (T(TB_F32) | T(TB_F16) | T(TB_BF16))
#define BLOCKS (T(TB_Q4_0) | T(TB_Q8_0) | T(TB_IQ4_NL)) // that other ops than products take, too
// What products take as weights, out of the table.
#define OR_PLAIN(NAME, LABEL, GGML, BLOCK, BYTES, WEIGHTS) | (WEIGHTS == TB_NEVER ? 0 : T(TB_##NAME))
#define OR_TILED(NAME, LABEL, SOURCE, QUANTS, SCALES) | T(TB_##NAME)
#define MULTIPLIED (0 TB_PLAIN_TYPES(OR_PLAIN) TB_TILED_TYPES(OR_TILED))

#define MAX_ELEMENTS ((uint64_t)1 << 40)
#define MAX_STRIDE ((uint64_t)1 << 48)
#define MOST_OVERLAP 256 // of an operand's elements, on average: enough for views that repeat rows
#define TILED_ALIGN 64   // where a tile's size allows it
#define MAX_ROTATED 65536
#define GLU_KINDS 7

// ---- one function per op: how shapes and params fit together. Types, presence and dense rows are checked before.

// src1.ne[2], [3] are multiples of src0's (src0 broadcasts). src1 F16 only with F16 weights. K % 32 for blocks.
static int mul_mat(const tb_op * op, const char ** why) {
    const tb_tensor *w = &op->src[0], *x = &op->src[1];
    if (x->type == TB_F16 && w->type != TB_F16) {
        return refuse(TB_E_UNSUPPORTED, "F16 activations go with F16 weights only", why);
    }
    if (w->ne[0] != x->ne[0]) return refuse(TB_E_SHAPE, "the inner dimensions differ", why);
    if (!repeats(w, x, 2)) return refuse(TB_E_SHAPE, "weights do not broadcast over dimensions 2 and 3", why);
    if (!has_shape(&op->dst, w->ne[1], x->ne[1], x->ne[2], x->ne[3])) {
        return refuse(TB_E_SHAPE, "dst is not [N, M, ..]", why);
    }
    return TB_OK;
}

// q [dk, n, H, S], k [dk, n_kv, divides H, divides S], v [dv, n_kv, divides H, divides S], mask [n_kv, >= n,
// divides H, divides S], sinks [H], dst [dv, H, n, S]. dk, dv up to MAX_HEAD.
static int flash_attn(const tb_op * op, const char ** why) {
    const tb_tensor *q = &op->src[0], *k = &op->src[1], *v = &op->src[2], *mask = &op->src[3], *sinks = &op->src[4];
    if (q->ne[0] > MAX_HEAD || v->ne[0] > MAX_HEAD) return refuse(TB_E_UNSUPPORTED, "head size above 576", why);
    if (k->ne[0] != q->ne[0]) return refuse(TB_E_SHAPE, "Q and K have different head sizes", why);
    if (k->ne[1] != v->ne[1] || !repeats(k, q, 2) || !repeats(v, q, 2)) {
        return refuse(TB_E_SHAPE, "Q, K and V do not fit together", why);
    }
    if (has(op, 3)) {
        if (mask->ne[0] != k->ne[1] || mask->ne[1] < q->ne[1] || !repeats(mask, q, 2)) {
            return refuse(TB_E_SHAPE, "the mask does not fit", why);
        }
    } else if (param_f(op, 1) > 0.0f) {
        return refuse(TB_E_SHAPE, "ALiBi needs a mask", why);
    }
    if (has(op, 4) && !has_shape(sinks, q->ne[2], 1, 1, 1)) return refuse(TB_E_SHAPE, "sinks are not [H]", why);
    if (!has_shape(&op->dst, v->ne[0], q->ne[2], q->ne[1], q->ne[3])) {
        return refuse(TB_E_SHAPE, "dst is not [dv, H, n, S]", why);
    }
    return TB_OK;
}

// RMS_NORM, SCALE and all that work element by element or row by row: dst as src0.
static int same_as_src0(const tb_op * op, const char ** why) {
    return same_shape(&op->dst, &op->src[0]) ? TB_OK : refuse(TB_E_SHAPE, "dst and src0 have different shapes", why);
}

// The kinds that ggml_unary_op numbers.
static int unary(const tb_op * op, const char ** why) {
    const int32_t kind = op->params[0];
    if (kind < 0 || kind >= TB_UNARY_KINDS) {
        return refuse(TB_E_UNSUPPORTED, "kind of unary op", why);
    }
    if (op->dst.type != op->src[0].type) return refuse(TB_E_UNSUPPORTED, "dst and src0 have different types", why);
    return same_as_src0(op, why);
}

// Weights [K, N, E], x [K, divides n_used, T], ids [n_used, T].
static int mul_mat_id(const tb_op * op, const char ** why) {
    const tb_tensor *w = &op->src[0], *x = &op->src[1], *ids = &op->src[2];
    if (w->ne[0] != x->ne[0]) return refuse(TB_E_SHAPE, "the inner dimensions differ", why);
    if (w->ne[3] != 1 || x->ne[3] != 1 || ids->ne[2] != 1 || ids->ne[3] != 1) {
        return refuse(TB_E_SHAPE, "too many dimensions", why);
    }
    if (ids->ne[1] != x->ne[2] || ids->ne[0] % x->ne[1] != 0) {
        return refuse(TB_E_SHAPE, "indices do not fit the rows", why);
    }
    if (!has_shape(&op->dst, w->ne[1], ids->ne[0], ids->ne[1], 1)) {
        return refuse(TB_E_SHAPE, "dst is not [N, n_used, T]", why);
    }
    return TB_OK;
}

static int sum_rows(const tb_op * op, const char ** why) {
    const tb_tensor * x = &op->src[0];
    if (op->params[0] != 0 && op->params[0] != 1) {
        return refuse(TB_E_UNSUPPORTED, "neither sums nor means", why);
    }
    return has_shape(&op->dst, 1, x->ne[1], x->ne[2], x->ne[3])
               ? TB_OK
               : refuse(TB_E_SHAPE, "dst does not have one element per row", why);
}

static int sum(const tb_op * op, const char ** why) {
    return has_shape(&op->dst, 1, 1, 1, 1) ? TB_OK : refuse(TB_E_SHAPE, "dst is not one element", why);
}

static int argmax(const tb_op * op, const char ** why) {
    const tb_tensor * x = &op->src[0];
    if (x->ne[2] != 1 || x->ne[3] != 1) return refuse(TB_E_SHAPE, "src0 is not a matrix", why);
    return has_shape(&op->dst, x->ne[1], 1, 1, 1) ? TB_OK : refuse(TB_E_SHAPE, "dst is not one index per row", why);
}

static int argsort(const tb_op * op, const char ** why) {
    if (op->params[0] != 0 && op->params[0] != 1) return refuse(TB_E_UNSUPPORTED, "sort order", why);
    return same_as_src0(op, why);
}

static int top_k(const tb_op * op, const char ** why) {
    const tb_tensor *x = &op->src[0], *dst = &op->dst;
    if (dst->ne[0] > x->ne[0]) return refuse(TB_E_SHAPE, "more than all elements", why);
    return has_shape(dst, dst->ne[0], x->ne[1], x->ne[2], x->ne[3])
               ? TB_OK
               : refuse(TB_E_SHAPE, "dst does not have src0's rows", why);
}

static int pad(const tb_op * op, const char ** why) {
    for (int d = 0; d < 4; d++) {
        const int64_t before = op->params[2 * d], after = op->params[2 * d + 1];
        if (before < 0 || after < 0) return refuse(TB_E_UNSUPPORTED, "negative padding", why);
        if (op->dst.ne[d] != op->src[0].ne[d] + before + after) return refuse(TB_E_SHAPE, "dst does not fit", why);
    }
    if (op->params[8] != 0 && op->params[8] != 1) return refuse(TB_E_UNSUPPORTED, "kind of padding", why);
    return TB_OK;
}

// Both of one type: bytes are copied.
static int repeat(const tb_op * op, const char ** why) {
    if (op->dst.type != op->src[0].type) return refuse(TB_E_UNSUPPORTED, "dst and src0 have different types", why);
    return repeats(&op->src[0], &op->dst, 0) ? TB_OK : refuse(TB_E_SHAPE, "src0 does not repeat into dst", why);
}

static int concat(const tb_op * op, const char ** why) {
    const tb_tensor *a = &op->src[0], *b = &op->src[1], *dst = &op->dst;
    if (dst->type != a->type || dst->type != b->type) return refuse(TB_E_UNSUPPORTED, "operands of several types", why);
    if (op->params[0] < 0 || op->params[0] > 3) return refuse(TB_E_SHAPE, "no such dimension", why);
    for (int d = 0; d < 4; d++) {
        const int fits = d == op->params[0] ? dst->ne[d] == (uint64_t)a->ne[d] + b->ne[d]
                                            : dst->ne[d] == a->ne[d] && dst->ne[d] == b->ne[d];
        if (!fits) return refuse(TB_E_SHAPE, "the operands do not fill dst", why);
    }
    return TB_OK;
}

// MUL, ADD, SUB, DIV: src1 repeats into src0 in all four dimensions, with any strides.
static int binary(const tb_op * op, const char ** why) {
    if (!repeats(&op->src[1], &op->src[0], 0)) return refuse(TB_E_SHAPE, "src1 does not repeat into src0", why);
    return same_as_src0(op, why);
}

// Sections count pairs; at least one of the first three has some.
static int check_sections(const tb_op * op, const char ** why) {
    const int32_t * s = &op->params[11];
    int64_t sum = 0;
    for (int i = 0; i < 4; i++) {
        if (s[i] < 0) return refuse(TB_E_SHAPE, "a negative section", why);
        sum += s[i];
    }
    return sum > s[3] && sum <= op->src[0].ne[0] ? TB_OK : refuse(TB_E_SHAPE, "sections do not fit", why);
}

// x [ne0, H, n, S], positions [n] or [4 n], freq_factors [>= pairs]. n_dims 0 copies. VISION rotates n_dims pairs,
// which are whole rows, all others n_dims / 2.
static int rope(const tb_op * op, const char ** why) {
    const tb_tensor * x = &op->src[0];
    const int64_t n_dims = op->params[1], offset = op->params[15];
    const int32_t mode = op->params[2];
    const int is_vision = mode == TB_ROPE_VISION;
    const int is_multi = mode == TB_ROPE_MROPE || mode == TB_ROPE_IMROPE || is_vision;
    if (mode != TB_ROPE_NORMAL && mode != TB_ROPE_NEOX && !is_multi) return refuse(TB_E_UNSUPPORTED, "ROPE mode", why);
    if (op->dst.type != x->type) return refuse(TB_E_UNSUPPORTED, "dst and src0 have different types", why);
    if (n_dims < 0 || n_dims % 2 != 0 || offset < 0 || offset % 2 != 0 || n_dims + offset > x->ne[0]) {
        return refuse(TB_E_SHAPE, "rotated dimensions do not fit", why);
    }
    if (n_dims > MAX_ROTATED) return refuse(TB_E_UNSUPPORTED, "too many rotated dimensions", why);
    if (is_vision && (n_dims != x->ne[0] / 2 || x->ne[0] % 2 != 0 || offset != 0)) {
        return refuse(TB_E_SHAPE, "rotated dimensions are not whole rows", why);
    }
    if (op->src[1].ne[0] != (uint64_t)x->ne[2] * (is_multi ? 4 : 1) ||
        !has_shape(&op->src[1], op->src[1].ne[0], 1, 1, 1)) {
        return refuse(TB_E_SHAPE, "positions do not fit the tokens", why);
    }
    const int64_t pairs = is_vision ? n_dims : n_dims / 2;
    if (has(op, 2) && (int64_t)op->src[2].ne[0] < pairs) return refuse(TB_E_SHAPE, "too few freq factors", why);
    const int st = is_multi ? check_sections(op, why) : TB_OK;
    return st == TB_OK ? same_as_src0(op, why) : st;
}

// Values [ne0, r, b2, b3], indices [r, divides b2, divides b3], dst [ne0, any, b2, b3].
static int set_rows(const tb_op * op, const char ** why) {
    const tb_tensor *x = &op->src[0], *rows = &op->src[1], *dst = &op->dst;
    if (dst->ne[0] != x->ne[0] || dst->ne[2] != x->ne[2] || dst->ne[3] != x->ne[3]) {
        return refuse(TB_E_SHAPE, "rows do not fit the tensor written into", why);
    }
    if (rows->ne[0] != x->ne[1] || x->ne[2] % rows->ne[1] != 0 || x->ne[3] % rows->ne[2] != 0 || rows->ne[3] != 1) {
        return refuse(TB_E_SHAPE, "indices do not fit the rows", why);
    }
    return TB_OK;
}

// REGLU, GEGLU, SWIGLU, SWIGLU_OAI, GEGLU_ERF, GEGLU_QUICK, SWIGLU_CLAMP. Split: src1 as src0 and dst. Else: the halves
// of src0 start at 0 and at its width / 2, rounded down.
static int glu(const tb_op * op, const char ** why) {
    const tb_tensor *a = &op->src[0], *dst = &op->dst;
    if (op->params[0] < 0 || op->params[0] >= GLU_KINDS) return refuse(TB_E_UNSUPPORTED, "GLU kind", why);
    if (dst->type != a->type) return refuse(TB_E_UNSUPPORTED, "dst and src0 have different types", why);
    if (has(op, 1)) {
        if (op->src[1].type != a->type) return refuse(TB_E_UNSUPPORTED, "halves have different types", why);
        if (!same_shape(&op->src[1], a)) return refuse(TB_E_SHAPE, "halves have different shapes", why);
        return same_as_src0(op, why);
    }
    if (!has_shape(dst, a->ne[0] / 2, a->ne[1], a->ne[2], a->ne[3])) {
        return refuse(TB_E_SHAPE, "src0 is not two halves of dst", why);
    }
    return TB_OK;
}

// x [n, m, H, S], mask [n, >= m, divides H, divides S], sinks [H].
static int soft_max(const tb_op * op, const char ** why) {
    const tb_tensor *x = &op->src[0], *mask = &op->src[1];
    if (has(op, 1)) {
        if (mask->ne[0] != x->ne[0] || mask->ne[1] < x->ne[1] || !repeats(mask, x, 2)) {
            return refuse(TB_E_SHAPE, "the mask does not fit", why);
        }
    } else if (param_f(op, 1) > 0.0f) {
        return refuse(TB_E_SHAPE, "ALiBi needs a mask", why);
    }
    if (has(op, 2) && !has_shape(&op->src[2], x->ne[2], 1, 1, 1)) return refuse(TB_E_SHAPE, "sinks are not [H]", why);
    return same_as_src0(op, why);
}

// src0 [ne0, rows, b2, b3], indices [r, b2, b3], dst [ne0, r, b2, b3]: F32, or I32 from I32.
static int get_rows(const tb_op * op, const char ** why) {
    const tb_tensor *x = &op->src[0], *rows = &op->src[1];
    if ((x->type == TB_I32) != (op->dst.type == TB_I32)) return refuse(TB_E_UNSUPPORTED, "type conversion", why);
    if (rows->ne[1] != x->ne[2] || rows->ne[2] != x->ne[3] || rows->ne[3] != 1) {
        return refuse(TB_E_SHAPE, "indices do not fit", why);
    }
    if (!has_shape(&op->dst, x->ne[0], rows->ne[0], rows->ne[1], rows->ne[2])) {
        return refuse(TB_E_SHAPE, "dst does not fit the indices", why);
    }
    return TB_OK;
}

// Elements in row-major order, shapes and strides may differ. Floats among themselves, I32 with itself and F32, floats
// to Q8_0 and Q4_0, blocks to floats and to the same type. Blocks have dense rows, and rows of the other side are whole
// blocks too.
static int cpy(const tb_op * op, const char ** why) {
    const tb_tensor *x = &op->src[0], *dst = &op->dst;
    if (is_in(x->type, BLOCKS) || is_in(dst->type, BLOCKS)) {
        if (x->type != dst->type && (is_in(x->type, BLOCKS) ? !is_in(dst->type, FLOATS) : !is_in(x->type, FLOATS))) {
            return refuse(TB_E_UNSUPPORTED, "type conversion", why);
        }
        if (x->type != dst->type && dst->type == TB_IQ4_NL) return refuse(TB_E_UNSUPPORTED, "type conversion", why);
        if ((is_in(x->type, BLOCKS) && !dense_rows(x)) || (is_in(dst->type, BLOCKS) && !dense_rows(dst))) {
            return refuse(TB_E_UNSUPPORTED, "rows of blocks are not dense", why);
        }
        if (x->ne[0] % 32 != 0 || dst->ne[0] % 32 != 0) return refuse(TB_E_SHAPE, "rows are not whole blocks", why);
    }
    if (x->type != dst->type && (x->type == TB_I32 || dst->type == TB_I32) &&
        (x->type == TB_I32 ? dst->type : x->type) != TB_F32) {
        return refuse(TB_E_UNSUPPORTED, "type conversion", why);
    }
    if (n_elements(x) != n_elements(dst)) return refuse(TB_E_SHAPE, "different numbers of elements", why);
    return TB_OK;
}

// ---- the table

typedef struct {
    const char * name;
    int (*check)(const tb_op * op, const char ** why);
    uint32_t required; // bit i: src[i] must be there
    uint32_t dense;    // bit i: rows of src[i] are dense; bit 8: rows of dst are
    uint32_t in_place; // bit i: dst may be the very same elements as src[i]
    uint64_t dst;      // types
    uint64_t src[TB_MAX_SRC];
} rule;

// An operand without elements has nothing to compute with, but a part of a concatenation may have none.
static int may_be_empty(uint32_t code) { return code == TB_OP_CONCAT; }

#define DST 0x100u
#define S(i) (1u << (i))
#define F32 T(TB_F32)
#define F32_F16 (T(TB_F32) | T(TB_F16))
#define COPIED (FLOATS | T(TB_I32)) // bit for bit

// clang-format off
static const rule RULES[TB_OP_COUNT] = {
    // op               name          shapes        required              dense rows                   in place     dst types, src types
    [TB_OP_NOP]        = {"NOP",        NULL,         0,                    0,                           0,           0,       {0}},
    [TB_OP_MUL_MAT]    = {"MUL_MAT",    mul_mat,      S(0) | S(1),          DST | S(0) | S(1),           0,           F32,     {MULTIPLIED, F32_F16}},
    [TB_OP_FLASH_ATTN] = {"FLASH_ATTN", flash_attn,   S(0) | S(1) | S(2),   DST | 0x1f,                  0,           F32,     {F32, FLOATS | BLOCKS, FLOATS | BLOCKS, T(TB_F16), F32}},
    [TB_OP_RMS_NORM]   = {"RMS_NORM",   same_as_src0, S(0),                 DST | S(0),                  S(0),        F32,     {F32}},
    [TB_OP_MUL]        = {"MUL",        binary,       S(0) | S(1),          0,                           S(0) | S(1), FLOATS,  {FLOATS, FLOATS}},
    [TB_OP_ADD]        = {"ADD",        binary,       S(0) | S(1),          0,                           S(0) | S(1), FLOATS,  {FLOATS, FLOATS}},
    [TB_OP_ROPE]       = {"ROPE",       rope,         S(0) | S(1),          DST | S(0) | S(1) | S(2),    S(0),        F32_F16, {F32_F16, T(TB_I32), F32}},
    [TB_OP_SET_ROWS]   = {"SET_ROWS",   set_rows,     S(0) | S(1),          DST | S(0) | S(1),           0,           FLOATS | T(TB_Q8_0) | T(TB_Q4_0), {F32_F16, T(TB_I64) | T(TB_I32)}},
    [TB_OP_GLU]        = {"GLU",        glu,          S(0),                 0,                           S(0) | S(1), FLOATS,  {FLOATS, FLOATS}},
    [TB_OP_SCALE]      = {"SCALE",      same_as_src0, S(0),                 0,                           S(0),        FLOATS,  {FLOATS}},
    [TB_OP_SOFT_MAX]   = {"SOFT_MAX",   soft_max,     S(0),                 DST | S(0) | S(1) | S(2),    S(0) | S(1), F32,     {F32, F32_F16, F32}},
    [TB_OP_GET_ROWS]   = {"GET_ROWS",   get_rows,     S(0) | S(1),          DST | S(0) | S(1),           0,           F32 | T(TB_I32), {FLOATS | BLOCKS | T(TB_I32), T(TB_I32)}},
    [TB_OP_SUB]        = {"SUB",        binary,       S(0) | S(1),          0,                           S(0) | S(1), FLOATS,  {FLOATS, FLOATS}},
    [TB_OP_DIV]        = {"DIV",        binary,       S(0) | S(1),          0,                           S(0) | S(1), FLOATS,  {FLOATS, FLOATS}},
    [TB_OP_UNARY]      = {"UNARY",      unary,        S(0),                 0,                           S(0),        FLOATS,  {FLOATS}},
    [TB_OP_LOG]        = {"LOG",        same_as_src0, S(0),                 0,                           S(0),        FLOATS,  {FLOATS}},
    [TB_OP_CLAMP]      = {"CLAMP",      same_as_src0, S(0),                 0,                           S(0),        FLOATS,  {FLOATS}},
    [TB_OP_FILL]       = {"FILL",       same_as_src0, S(0),                 0,                           S(0),        FLOATS,  {FLOATS}},
    [TB_OP_SUM]        = {"SUM",        sum,          S(0),                 DST | S(0),                  0,           F32,     {F32}},
    [TB_OP_CUMSUM]     = {"CUMSUM",     same_as_src0, S(0),                 DST | S(0),                  0,           F32,     {F32}},
    [TB_OP_ARGMAX]     = {"ARGMAX",     argmax,       S(0),                 DST | S(0),                  0,           T(TB_I32), {F32}},
    [TB_OP_ARGSORT]    = {"ARGSORT",    argsort,      S(0),                 DST | S(0),                  0,           T(TB_I32), {F32}},
    [TB_OP_TOP_K]      = {"TOP_K",      top_k,        S(0),                 DST | S(0),                  0,           T(TB_I32), {F32}},
    [TB_OP_PAD]        = {"PAD",        pad,          S(0),                 DST | S(0),                  0,           F32,     {F32}},
    [TB_OP_MUL_MAT_ID] = {"MUL_MAT_ID", mul_mat_id,   S(0) | S(1) | S(2),   DST | S(0) | S(1) | S(2),    0,           F32,     {MULTIPLIED, F32, T(TB_I32)}},
    [TB_OP_SUM_ROWS]   = {"SUM_ROWS",   sum_rows,     S(0),                 DST | S(0),                  0,           F32,     {F32}},
    [TB_OP_NORM]       = {"NORM",       same_as_src0, S(0),                 DST | S(0),                  S(0),        F32,     {F32}},
    [TB_OP_L2_NORM]    = {"L2_NORM",    same_as_src0, S(0),                 DST | S(0),                  S(0),        F32,     {F32}},
    [TB_OP_REPEAT]     = {"REPEAT",     repeat,       S(0),                 0,                           0,           COPIED,  {COPIED}},
    [TB_OP_CONCAT]     = {"CONCAT",     concat,       S(0) | S(1),          0,                           0,           COPIED,  {COPIED, COPIED}},
    [TB_OP_SQR]        = {"SQR",        same_as_src0, S(0),                 0,                           S(0),        FLOATS,  {FLOATS}},
    [TB_OP_SQRT]       = {"SQRT",       same_as_src0, S(0),                 0,                           S(0),        FLOATS,  {FLOATS}},
    [TB_OP_ADD_ID]     = {"ADD_ID",     tb_check_add_id, S(0) | S(1) | S(2), DST | S(0) | S(1) | S(2),   S(0),        F32,     {F32, F32, T(TB_I32)}},
    [TB_OP_SSM_CONV]   = {"SSM_CONV",   tb_check_ssm_conv, S(0) | S(1),      DST | 0xf,                   0,           F32,     {F32, F32, F32, T(TB_I32)}},
    [TB_OP_SSM_SCAN]   = {"SSM_SCAN",   tb_check_ssm_scan, 0x7f,             DST | 0x7f,                  0,           F32,     {F32, F32, F32, F32, F32, F32, T(TB_I32)}},
    [TB_OP_GATED_DELTA_NET] = {"GATED_DELTA_NET", tb_check_gated_delta_net, 0x3f, DST | 0x7f,            0,           F32,     {F32, F32, F32, F32, F32, F32, T(TB_I32)}},
    [TB_OP_RWKV_WKV6]  = {"RWKV_WKV6",  tb_check_linear_attention, 0x3f,     DST | 0x7f,                  0,           F32,     {F32, F32, F32, F32, F32, F32, T(TB_I32)}},
    [TB_OP_RWKV_WKV7]  = {"RWKV_WKV7",  tb_check_linear_attention, 0x7f,     DST | 0xff,                  0,           F32,     {F32, F32, F32, F32, F32, F32, F32, T(TB_I32)}},
    [TB_OP_GATED_LINEAR_ATTN] = {"GATED_LINEAR_ATTN", tb_check_linear_attention, 0x1f, DST | 0x3f,       0,           F32,     {F32, F32, F32, F32, F32, T(TB_I32)}},
    [TB_OP_LIGHTNING_INDEXER] = {"LIGHTNING_INDEXER", tb_check_lightning_indexer, 0xf, DST | 0xf,        0,           F32,     {F32, FLOATS | BLOCKS, F32, T(TB_F16)}},
    [TB_OP_DSV4_HC_PRE] = {"DSV4_HC_PRE", tb_check_hc_pre, S(0) | S(1),      DST | S(0),                  0,           F32,     {F32, F32}},
    [TB_OP_DSV4_HC_POST] = {"DSV4_HC_POST", tb_check_hc_post, S(0) | S(1) | S(2), DST | S(0) | S(1),     0,           F32,     {F32, F32, F32, F32}},
    [TB_OP_DSV4_HC_COMB] = {"DSV4_HC_COMB", tb_check_hc_comb, S(0) | S(1) | S(2), DST,                   0,           F32,     {F32, F32, F32}},
    [TB_OP_ARANGE]     = {"ARANGE",     tb_check_arange, 0,                  DST,                         0,           F32,     {0}},
    [TB_OP_POOL_2D]    = {"POOL_2D",    tb_check_pool_2d, S(0),              DST | S(0),                  0,           F32,     {F32_F16}},
    [TB_OP_ROPE_BACK]  = {"ROPE_BACK",  rope,         S(0) | S(1),          DST | S(0) | S(1) | S(2),    S(0),        F32_F16, {F32_F16, T(TB_I32), F32}},
    [TB_OP_CPY]        = {"CPY",        cpy,          S(0),                 0,                           S(0),        FLOATS | BLOCKS | T(TB_I32), {FLOATS | BLOCKS | T(TB_I32)}},
};
// clang-format on

int tb_op_states(unsigned code) {
    switch (code) {
    case TB_OP_SSM_CONV:
        return 2;
    case TB_OP_SSM_SCAN:
        return 0;
    case TB_OP_GATED_LINEAR_ATTN:
        return 4;
    case TB_OP_GATED_DELTA_NET:
    case TB_OP_RWKV_WKV6:
        return 5;
    case TB_OP_RWKV_WKV7:
        return 6;
    default:
        return -1;
    }
}

int tb_op_written(const tb_op * op) { return op->params[1] == 0 ? -1 : tb_op_states(op->code); }

const char * tb_op_name(unsigned code) { return code < TB_OP_COUNT ? RULES[code].name : "unknown"; }

uint64_t tb_tensor_span(const tb_tensor * t, int * empty) {
    *empty = 0;
    if (t->type >= TB_TYPE_COUNT) return 0;
    if (is_empty(t)) {
        *empty = 1;
        return 0;
    }
    uint64_t span;
    int first; // dimension from which on nb counts
    uint64_t steps[4] = {t->ne[0] - 1u, t->ne[1] - 1u, t->ne[2] - 1u, t->ne[3] - 1u};
    if (tb_type_is_tiled(t->type)) {
        span = tb_tiled_bytes(t->type, t->ne[0], t->ne[1]);
        if (span == 0) return 0;
        first = 2;
    } else {
        const uint32_t block = tb_type_block(t->type);
        if (t->ne[0] % block != 0) return 0;
        span = tb_type_size(t->type);
        steps[0] = t->ne[0] / block - 1u;
        first = 0;
    }
    for (int i = first; i < 4; i++) {
        uint64_t part;
        if (__builtin_mul_overflow(steps[i], t->nb[i], &part)) return 0;
        if (__builtin_add_overflow(span, part, &span)) return 0;
    }
    return span;
}

// Of tiles: a matrix of a stack, or a part of one, begins after any number of them, and MXFP4's have 17 * 32 bytes.
static uint64_t tiled_align(uint32_t type) {
    const uint64_t smallest = (uint64_t)tb_tile_bytes(type) * (tb_tile_k(type) / TB_TILE_K);
    return smallest % TILED_ALIGN == 0 ? TILED_ALIGN : TILED_ALIGN / 2;
}

// What holds for any operand of any op: a known type, sane numbers, alignment, and elements that lie on top of each
// other at most `overlap` times on average. Else a small buffer would be work for hours, and threads would write one
// element of dst at the same time.
static int check_tensor(const tb_tensor * t, uint64_t overlap, const char ** why) {
    uint64_t n = 1;
    for (int i = 0; i < 4; i++) {
        if (t->ne[i] != 0 && n > MAX_ELEMENTS / t->ne[i]) return refuse(TB_E_SHAPE, "too many elements", why);
        n *= t->ne[i] != 0 ? t->ne[i] : 1;
        if (t->nb[i] > MAX_STRIDE) return refuse(TB_E_SHAPE, "a stride is too large", why);
    }
    int empty;
    const uint64_t span = tb_tensor_span(t, &empty);
    if (span == 0 && !empty) return refuse(TB_E_SHAPE, "not whole blocks, or too large", why);
    if (!empty && (element_bytes(t) - 1) / overlap >= span) {
        return refuse(TB_E_SHAPE, "elements overlap", why);
    }
    const int tiled = tb_type_is_tiled(t->type);
    const uint64_t size = tb_type_size(t->type);
    const uint64_t align = tiled ? tiled_align(t->type) : tb_type_block(t->type) > 1 ? 1 + (size % 2 == 0) : size;
    int odd = t->offset % align != 0;
    for (int i = tiled ? 2 : 0; i < 4; i++)
        odd |= t->ne[i] > 1 && t->nb[i] % align != 0;
    return odd ? refuse(TB_E_SHAPE, "misaligned offset or stride", why) : TB_OK;
}

int tb_op_check_shape(const tb_op * op, const char ** why) {
    const char * unused;
    if (why == NULL) why = &unused;
    *why = "";
    if (op->code == TB_OP_NOP) return TB_OK;
    if (op->code >= TB_OP_COUNT) return refuse(TB_E_UNSUPPORTED, "no such op", why);
    const rule * r = &RULES[op->code];
    const int product = op->code == TB_OP_MUL_MAT || op->code == TB_OP_MUL_MAT_ID;
    const uint32_t one_of = TB_FLAG_FP16 | TB_FLAG_EXACT_EXP | TB_FLAG_DETERMINISTIC;
    const int recurrent =
        op->code == TB_OP_SSM_SCAN || op->code == TB_OP_GATED_DELTA_NET || op->code == TB_OP_RWKV_WKV7;
    const uint32_t flags = product                        ? TB_FLAG_FP16 | TB_FLAG_DETERMINISTIC
                           : recurrent                    ? TB_FLAG_DETERMINISTIC
                           : op->code == TB_OP_FLASH_ATTN ? one_of
                                                          : 0;
    const uint32_t chosen = op->flags & one_of;
    const int alone = (op->flags & TB_FLAG_DETERMINISTIC) == 0 || op->flags == TB_FLAG_DETERMINISTIC;
    if ((op->flags & ~flags) != 0 || (chosen & (chosen - 1)) != 0 || !alone) {
        return refuse(TB_E_UNSUPPORTED, "flags", why);
    }
    if (op->n_src > TB_MAX_SRC) return refuse(TB_E_PROTOCOL, "too many operands", why);

    if (!is_in(op->dst.type, r->dst)) return refuse(TB_E_UNSUPPORTED, "type of dst", why);
    for (uint32_t i = 0; i < TB_MAX_SRC; i++) {
        if (has(op, i) ? r->src[i] == 0 : (r->required >> i & 1u) != 0) {
            return refuse(TB_E_SHAPE, "an operand is missing, or one too many", why);
        }
        if (has(op, i) && !is_in(op->src[i].type, r->src[i])) {
            return refuse(TB_E_UNSUPPORTED, "type of an operand", why);
        }
    }
    int st = check_tensor(&op->dst, 1, why);
    for (uint32_t i = 0; i < TB_MAX_SRC && st == TB_OK; i++)
        st = has(op, i) ? check_tensor(&op->src[i], MOST_OVERLAP, why) : TB_OK;
    if (st != TB_OK) return st;

    if (is_empty(&op->dst)) return TB_OK;
    if ((r->dense & DST) != 0 && !dense_rows(&op->dst)) {
        return refuse(TB_E_UNSUPPORTED, "rows of dst are not dense", why);
    }
    for (uint32_t i = 0; i < TB_MAX_SRC; i++) {
        if (!has(op, i)) continue;
        if (is_empty(&op->src[i]) && !may_be_empty(op->code)) return refuse(TB_E_SHAPE, "an operand is empty", why);
        if ((r->dense >> i & 1u) != 0 && !dense_rows(&op->src[i])) {
            return refuse(TB_E_UNSUPPORTED, "rows of an operand are not dense", why);
        }
    }
    return r->check(op, why);
}

// Is every byte of its span an element's byte? Then two overlapping spans surely share bytes.
static int is_solid(const tb_tensor * t, uint64_t span) {
    const uint32_t block = tb_type_block(t->type);
    return block != 0 && n_elements(t) / block * tb_type_size(t->type) == span;
}

static int same_elements(const tb_tensor * a, const tb_tensor * b) {
    if (a->offset != b->offset || a->type != b->type) return 0;
    for (int i = 0; i < 4; i++) {
        if (a->ne[i] != b->ne[i] || (a->ne[i] > 1 && a->nb[i] != b->nb[i])) return 0;
    }
    return 1;
}

static int check_extent(const tb_tensor * t, int written, const tb_extent * extents, uint32_t n, const char ** why) {
    if (t->buffer >= n || !extents[t->buffer].mapped) return refuse(TB_E_BUFFER, "no such buffer", why);
    if (written && !extents[t->buffer].writable) return refuse(TB_E_BUFFER, "dst is in a read-only buffer", why);
    int empty;
    const uint64_t span = tb_tensor_span(t, &empty);
    const uint64_t size = extents[t->buffer].size;
    if (span == 0 && !empty) return refuse(TB_E_SHAPE, "not whole blocks, or too large", why);
    if (t->offset > size || span > size - t->offset) return refuse(TB_E_BOUNDS, "outside its buffer", why);
    return TB_OK;
}

static int share_bytes(const tb_tensor * a, const tb_tensor * b) {
    int empty;
    const uint64_t of_a = tb_tensor_span(a, &empty), of_b = tb_tensor_span(b, &empty);
    return a->buffer == b->buffer && a->offset < b->offset + of_b && b->offset < a->offset + of_a;
}

int tb_op_check_bounds(const tb_op * op, const tb_extent * extents, uint32_t n_extents, const char ** why) {
    const char * unused;
    if (why == NULL) why = &unused;
    *why = "";
    if (op->code == TB_OP_NOP) return TB_OK;
    if (op->code >= TB_OP_COUNT) return refuse(TB_E_UNSUPPORTED, "no such op", why);
    int st = check_extent(&op->dst, 1, extents, n_extents, why);
    if (st != TB_OK) return st;
    int empty, no_dst;
    const uint64_t dst_span = tb_tensor_span(&op->dst, &no_dst);
    const int dst_solid = is_solid(&op->dst, dst_span);
    const int written = tb_op_written(op);
    if (written >= 0 && share_bytes(&op->dst, &op->src[written]))
        return refuse(TB_E_BOUNDS, "dst overlaps states", why);
    for (uint32_t i = 0; i < TB_MAX_SRC; i++) {
        if (!has(op, i)) continue;
        const tb_tensor * t = &op->src[i];
        st = check_extent(t, (int)i == written, extents, n_extents, why);
        if (st != TB_OK) return st;
        if (written >= 0 && (int)i != written && share_bytes(t, &op->src[written])) {
            return refuse(TB_E_BOUNDS, "states that are written overlap another operand", why);
        }
        // Strided views may interleave without sharing a byte, and sharing one costs only a wrong number: refuse the
        // overlaps that are sure.
        const uint64_t span = tb_tensor_span(t, &empty);
        if (no_dst || empty || t->buffer != op->dst.buffer || t->offset >= op->dst.offset + dst_span ||
            op->dst.offset >= t->offset + span) {
            continue;
        }
        if ((RULES[op->code].in_place >> i & 1u) != 0 && same_elements(t, &op->dst)) continue;
        if (dst_solid && is_solid(t, span)) return refuse(TB_E_BOUNDS, "dst overlaps an operand", why);
    }
    return TB_OK;
}
