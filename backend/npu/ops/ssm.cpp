// Ops of state space models. SSM_CONV: a short convolution along the tokens, of each channel by itself. SSM_SCAN: each
// head's state, a matrix of D rows of N, decays and takes in x B^T from token to token; the result is the state times
// C.
#include "ops/ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tb::npu {
namespace {

constexpr int64_t line_floats = 16; // of a cache line, so that threads write lines of their own

// Tokens lie side by side in src0, channels in dst: squares of both sides, where there are enough tokens.
constexpr int64_t square_tokens = 64;
constexpr int64_t few_tokens = 8;

// Sums of both ways are in the same order.
void convolve_few(const op_context & ctx, int64_t channel, int64_t n_channels, int64_t n_tokens, int64_t sequence) {
    const view & x = ctx.src[0];
    const view & weights = ctx.src[1];
    const int64_t width = weights.ne(0);
    for (int64_t t = 0; t < n_tokens; t++) {
        float * out = ctx.dst.at<float>(t, sequence);
        for (int64_t c = channel; c < channel + n_channels; c++) {
            const float * row = x.at<const float>(c, sequence) + t;
            const float * w = weights.at<const float>(c);
            float sum = 0.0f;
            for (int64_t i = 0; i < width; i++) {
                sum += row[i] * w[i];
            }
            out[c] = sum;
        }
    }
}

void convolve(const op_context & ctx, int64_t channel, int64_t n_channels, int64_t token, int64_t n_tokens,
              int64_t sequence) {
    const view & x = ctx.src[0];
    const view & weights = ctx.src[1];
    const int64_t width = weights.ne(0);
    float square[square_tokens][line_floats];
    for (int64_t c = 0; c < n_channels; c++) {
        const float * row = x.at<const float>(channel + c, sequence) + token;
        const float * w = weights.at<const float>(channel + c);
        float sums[square_tokens] = {};
        for (int64_t i = 0; i < width; i++) {
            for (int64_t t = 0; t < n_tokens; t++) {
                sums[t] += row[t + i] * w[i];
            }
        }
        for (int64_t t = 0; t < n_tokens; t++) {
            square[t][c] = sums[t];
        }
    }
    for (int64_t t = 0; t < n_tokens; t++) {
        std::copy_n(square[t], n_channels, ctx.dst.at<float>(token + t, sequence) + channel);
    }
}

void ssm_conv(const op_context & ctx) {
    const int64_t channels = ctx.dst.ne(0);
    const int64_t tokens = ctx.dst.ne(1);
    const int64_t pieces = divide_up(channels, line_floats);
    for (const int64_t item : ctx.share(pieces * ctx.dst.ne(2))) {
        const int64_t channel = item % pieces * line_floats;
        const int64_t n_channels = std::min(line_floats, channels - channel);
        if (tokens < few_tokens) {
            convolve_few(ctx, channel, n_channels, tokens, item / pieces);
            continue;
        }
        for (int64_t token = 0; token < tokens; token += square_tokens) {
            convolve(ctx, channel, n_channels, token, std::min(square_tokens, tokens - token), item / pieces);
        }
    }
}

float softplus(float x) { return x > 20.0f ? x : std::log(1.0f + std::exp(x)); }

// One head of one sequence, through all of its tokens.
class head_scan {
  public:
    head_scan(const op_context & of, int64_t head_number, int64_t sequence_number)
        : ctx(of), head(head_number), sequence(sequence_number), n(of.src[0].ne(0)), rows(of.src[0].ne(1)),
          heads(of.src[1].ne(1)), tokens(of.src[1].ne(2)), sequences(of.src[1].ne(3)),
          decay(reinterpret_cast<float *>(of.scratch + of.thread * bytes(n))) {}

    static int64_t bytes(int64_t n) { return static_cast<int64_t>(align64(static_cast<uint64_t>(n) * sizeof(float))); }

    // From the state with this index. The last state is dst's first one, where it becomes what it is.
    void run(int32_t index) const {
        const int64_t kept = ctx.param_i(0);
        float * state = state_at(0);
        for (int64_t t = 0; t < tokens; t++) {
            step(t, state, index);
            const int64_t back = tokens - 1 - t;
            if (back > 0 && back < kept) {
                std::copy_n(state, n * rows, state_at(back));
            }
        }
    }

  private:
    const op_context & ctx;
    const int64_t head, sequence, n, rows, heads, tokens, sequences;
    float * const decay; // of the elements of a row

    // The state after the token that is so many before the last one.
    float * state_at(int64_t back) const {
        const int64_t results = rows * heads * tokens * sequences;
        return ctx.dst.at<float>(0) + results + ((back * sequences + sequence) * heads + head) * rows * n;
    }

    void step(int64_t t, float * state, int32_t index) const {
        const vec_kernels & vec = ctx.kernels->vec;
        const view & a = ctx.src[3];
        const view & in = ctx.src[4];
        const int64_t group = head / (heads / in.ne(1));
        const float dt = softplus(ctx.src[2].at<const float>(t, sequence)[head]);
        const float * x = ctx.src[1].at<const float>(head, t, sequence);
        const float * b = in.at<const float>(group, t, sequence);
        const float * c = ctx.src[5].at<const float>(group, t, sequence);
        float * result = ctx.dst.at<float>(0) + ((sequence * tokens + t) * heads + head) * rows;
        if (a.ne(0) == 1) {
            std::fill_n(decay, n, std::exp(dt * *a.at<const float>(head)));
        } else {
            vec.scale(n, a.at<const float>(head), dt, 0.0f, decay);
            vec.exp_sum(n, decay, 0.0f);
        }
        for (int64_t r = 0; r < rows; r++) {
            const float * from = t == 0 ? ctx.src[0].at<const float>(r, head, index) : state + r * n;
            result[r] = vec.scan_step(n, from, decay, x[r] * dt, b, c, state + r * n);
        }
    }
};

void ssm_scan(const op_context & ctx) {
    const view & states = ctx.src[0];
    const view & x = ctx.src[1];
    const int64_t heads = x.ne(1);
    for (const int64_t item : ctx.share(heads * x.ne(3), std::max(int64_t{1}, line_floats / x.ne(0)))) {
        const int64_t sequence = item / heads;
        const int32_t index = ctx.src[6].at<const int32_t>(0)[sequence];
        if (index < 0 || index >= states.ne(3)) {
            ctx.fail(TB_E_BOUNDS, "SSM_SCAN: index of a state out of range");
            return;
        }
        head_scan(ctx, item % heads, sequence).run(index);
    }
}

uint64_t ssm_scan_scratch(const tb_op & op, int n_threads, const kernel_table &) {
    return static_cast<uint64_t>(n_threads) * static_cast<uint64_t>(head_scan::bytes(op.src[0].ne[0]));
}

} // namespace

const op_entry ssm_conv_entry = {ssm_conv, nullptr};
const op_entry ssm_scan_entry = {ssm_scan, ssm_scan_scratch};

} // namespace tb::npu
