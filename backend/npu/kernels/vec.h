// Vector kernels: what the ops other than matrix products and attention do to one contiguous row.
//
// All take any n and any alignment; dst may be the same row as a source (element i is read before it is written), but
// not overlap it otherwise. Types narrower than F32 are widened first, worked on as float and narrowed at the end.
#ifndef TILEBEAM_NPU_KERNELS_VEC_H
#define TILEBEAM_NPU_KERNELS_VEC_H

#include <cstdint>

#include "tilebeam/types.h"

namespace tb::npu {

// ggml_glu_op, the order of tb_op.params[0]
enum glu_kind {
    glu_reglu,
    glu_geglu,
    glu_swiglu,
    glu_swiglu_oai,
    glu_geglu_erf,
    glu_geglu_quick,
    glu_swiglu_clamp,
    glu_kind_count,
};

// Rows of a recurrent state that lie side by side: element i of row r is state[i * state_lanes + r].
constexpr int64_t state_lanes = 16;
constexpr int64_t most_taps = 8; // of a short convolution

struct vec_kernels {
    // Conversions by tb_type, nullptr where there is none. Block types want n % 32 == 0.
    void (*to_f32[TB_TYPE_COUNT])(int64_t n, const void * src, float * dst);
    void (*from_f32[TB_TYPE_COUNT])(int64_t n, const float * src, void * dst);

    void (*add)(int64_t n, const float * a, const float * b, float * dst);
    void (*mul)(int64_t n, const float * a, const float * b, float * dst);
    // dst = x * scale + bias
    void (*scale)(int64_t n, const float * x, float scale, float bias, float * dst);
    float (*sum_squares)(int64_t n, const float * x);
    float (*dot)(int64_t n, const float * a, const float * b);
    float (*max)(int64_t n, const float * x); // -inf if n == 0
    // x = exp(x - max) in place; returns the sum. exp(-inf) is 0.
    float (*exp_sum)(int64_t n, float * x, float max);
    void (*sigmoid)(int64_t n, const float * x, float * dst);
    void (*silu)(int64_t n, const float * x, float * dst); // x * sigmoid(x)
    // dst = act(gate) * up; alpha belongs to glu_swiglu_oai, limit to it and to glu_swiglu_clamp
    void (*glu[glu_kind_count])(int64_t n, const float * gate, const float * up, float alpha, float limit, float * dst);
    // Rotate n pairs by the angles whose cosines and sines are given: pairs (x[2i], x[2i+1]), or (x[i], x[i+half]).
    void (*rope_normal)(int64_t n, const float * x, const float * cos, const float * sin, float * dst);
    void (*rope_neox)(int64_t n, int64_t half, const float * x, const float * cos, const float * sin, float * dst);
    // A row of a recurrent state, one token on. SSM_SCAN: next = row * decay + x * in; returns next . out. `next` may
    // be `row`.
    float (*scan_step)(int64_t n, const float * row, const float * decay, float x, const float * in, const float * out,
                       float * next);
    // GATED_DELTA_NET: next = row * decay, then next += (v - next . k) * beta * k; returns next . q.
    float (*delta_step)(int64_t n, const float * row, const float * decay, const float * k, const float * q, float v,
                        float beta, float * next);
    // RWKV_WKV7: next = row * decay + v * k + (row . a) * b; returns next . r.
    float (*wkv7_step)(int64_t n, const float * row, const float * decay, const float * k, const float * a,
                       const float * b, const float * r, float v, float * next);
    // The same of state_lanes rows side by side, in place, which need no sums across a vector; x, v and result have an
    // element for each row. seen = decay * k.
    void (*scan_rows)(int64_t n, float * state, const float * decay, const float * x, const float * in,
                      const float * out, float * result);
    void (*delta_rows)(int64_t n, float * state, const float * decay, const float * k, const float * seen,
                       const float * q, const float * v, float beta, float * result);
    // Here the state is read once for a token: `seen` is row . a, and becomes what that is for the next token's a.
    void (*wkv7_rows)(int64_t n, float * state, const float * decay, const float * k, const float * b, const float * r,
                      const float * v, const float * next_a, float * seen, float * result);
    // RWKV_WKV6, GATED_LINEAR_ATTN: n columns of a state of `rows` rows that are `stride` apart, one token on. result =
    // v * own + sum of row[i] * q[i], then next[i] = row[i] * decay[i] + v * k[i]. `next` may be `state`.
    void (*linear_step)(int64_t n, int64_t rows, int64_t stride, const float * state, const float * decay,
                        const float * k, const float * q, const float * v, float own, float * next, float * result);
    // SSM_CONV: dst = sum of rows[i] * taps[i], i below n_taps, in this order.
    void (*convolve)(int64_t n, int64_t n_taps, const float * const * rows, const float * const * taps, float * dst);
};

void fill_vec_portable(vec_kernels & k);
void fill_vec_avx2(vec_kernels & k);
void fill_vec_avx512vnni(vec_kernels & k);
void fill_vec_neon(vec_kernels & k);
void fill_vec_hvx(vec_kernels & k);

} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_VEC_H
