// Ops of state space models. SSM_CONV: a short convolution along the tokens, of each channel by itself. SSM_SCAN: each
// head's state, a matrix of D rows of N, decays and takes in x B^T from token to token; the result is the state times
// C.
#include "ops/states.h"

#include <algorithm>
#include <cmath>

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

// One more token for channels whose d - 1 last ones are their states: `next`, which may be `state`, has the new ones.
template <int d>
void one_token(int64_t n, const float * w, int64_t weight_step, const float * x, const float * state, float * next,
               int64_t state_step, float * out) {
    for (int64_t c = 0; c < n; c++, w += weight_step, state += state_step, next += state_step) {
        float last[d];
        std::copy_n(state, d - 1, last);
        last[d - 1] = x[c];
        float sum = last[0] * w[0];
        for (int i = 1; i < d; i++) {
            sum += last[i] * w[i];
        }
        out[c] = sum;
        std::copy_n(last + 1, d - 1, next);
    }
}

// What a convolution with states works on at once: so many channels of one sequence, all of its tokens.
constexpr int64_t chunk_channels = 128;

// With the sequences' last tokens before these ones as states [d - 1, C], and x as [C, T, S]: nothing is laid crosswise
// but these few. Sums are in the same order as without.
class stateful_convolution {
  public:
    explicit stateful_convolution(const op_context & of, const sequence_states & from) : ctx(of), first(from) {}

    void run(int64_t channel, int64_t n_channels, int64_t sequence) {
        if (n_tokens == 1 && (n_taps == 3 || n_taps == 4)) {
            const auto one = n_taps == 3 ? one_token<3> : one_token<4>;
            one(n_channels, ctx.src[1].at<const float>(channel), weight_step,
                ctx.src[0].at<const float>(0, sequence) + channel, first.from(channel, 0, sequence),
                first.into(channel, 0, sequence), state_step, ctx.dst.at<float>(0, sequence) + channel);
            return;
        }
        if (channel != weights_of) {
            spread(ctx.src[1].at<const float>(channel), weight_step, n_taps, n_channels, taps);
            weights_of = channel;
        }
        spread(first.from(channel, 0, sequence), state_step, n_taps - 1, n_channels, before);
        const float *rows[most_taps], *weights[most_taps];
        for (int64_t i = 0; i < n_taps; i++) {
            weights[i] = taps[i];
        }
        for (int64_t t = 0; t < n_tokens; t++) {
            for (int64_t i = 0; i < n_taps; i++) {
                rows[i] = token(t + i, channel, sequence);
            }
            ctx.kernels->vec.convolve(n_channels, n_taps, rows, weights, ctx.dst.at<float>(t, sequence) + channel);
        }
        for (int64_t i = 0; i + 1 < n_taps; i++) {
            const float * x = token(n_tokens + i, channel, sequence);
            float * state = first.into(channel, 0, sequence) + i;
            for (int64_t c = 0; c < n_channels; c++) {
                state[c * state_step] = x[c];
            }
        }
    }

  private:
    const op_context & ctx;
    const sequence_states & first;
    const int64_t n_taps = ctx.src[1].ne(0);
    const int64_t n_tokens = ctx.dst.ne(1);
    const int64_t weight_step = ctx.src[1].nb(1) / static_cast<int64_t>(sizeof(float)); // from channel to channel
    const int64_t state_step = ctx.src[2].nb(1) / static_cast<int64_t>(sizeof(float));
    int64_t weights_of = -1; // channel of `taps`
    float taps[most_taps][chunk_channels];
    float before[most_taps][chunk_channels];

    static void spread(const float * x, int64_t step, int64_t n, int64_t n_channels, float (*to)[chunk_channels]) {
        for (int64_t i = 0; i < n; i++) {
            for (int64_t c = 0; c < n_channels; c++) {
                to[i][c] = x[c * step + i];
            }
        }
    }

    // Token t, counted from the first one of the state.
    const float * token(int64_t t, int64_t channel, int64_t sequence) const {
        return t + 1 < n_taps ? before[t] : ctx.src[0].at<const float>(t + 1 - n_taps, sequence) + channel;
    }
};

// Room for all sequences' states.
uint64_t aside_bytes(const tb_op & op) {
    const tb_tensor & weights = op.src[1];
    return sizeof(float) * (weights.ne[0] - 1) * uint64_t{weights.ne[1]} * op.dst.ne[2];
}

void convolve_with_states(const op_context & ctx) {
    const int64_t channels = ctx.dst.ne(0);
    const int64_t sequences = ctx.dst.ne(2);
    sequence_states states(ctx, 2, 2, 3, sequences);
    if (!states.begin(reinterpret_cast<float *>(ctx.scratch), ctx.scratch + aside_bytes(*ctx.op))) {
        return;
    }
    stateful_convolution work(ctx, states);
    for (const int64_t item : ctx.share(divide_up(channels, chunk_channels) * sequences)) {
        const int64_t channel = item / sequences * chunk_channels;
        work.run(channel, std::min(chunk_channels, channels - channel), item % sequences);
    }
}

uint64_t ssm_conv_scratch(const tb_op & op, int, const kernel_table &) {
    if (op.n_src <= 2) {
        return 0;
    }
    return aside_bytes(op) + static_cast<uint64_t>(sequence_states::copy_bytes(op.dst.ne[2]));
}

void ssm_conv(const op_context & ctx) {
    if (ctx.src[2]) {
        convolve_with_states(ctx);
        return;
    }
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

// What one token does to the rows of a head's state.
struct token {
    const op_context & ctx;
    const head_states & of;
    float * const decay; // of a row's elements
    float dt = 0;
    const float *x = nullptr, *b = nullptr, *c = nullptr;
    float * result = nullptr;

    void read(int64_t t) {
        const view & a = ctx.src[3];
        const view & in = ctx.src[4];
        const int64_t group = of.head / (of.heads / in.ne(1));
        dt = softplus(ctx.src[2].at<const float>(t, of.sequence)[of.head]);
        x = ctx.src[1].at<const float>(of.head, t, of.sequence);
        b = in.at<const float>(group, t, of.sequence);
        c = ctx.src[5].at<const float>(group, t, of.sequence);
        result = of.result(ctx, t);
        if (a.ne(0) == 1) {
            std::fill_n(decay, of.n, std::exp(dt * *a.at<const float>(of.head)));
        } else {
            ctx.kernels->vec.scale(of.n, a.at<const float>(of.head), dt, 0.0f, decay);
            ctx.kernels->vec.exp_sum(of.n, decay, 0.0f);
        }
    }

    void row(int64_t r, const float * from, float * next) const {
        result[r] = ctx.kernels->vec.scan_step(of.n, from, decay, x[r] * dt, b, c, next);
    }

    void lanes(int64_t r, float * side, int64_t count) const {
        float taken[state_lanes] = {};
        float out[state_lanes];
        for (int64_t i = 0; i < count; i++) {
            taken[i] = x[r + i] * dt;
        }
        ctx.kernels->vec.scan_rows(of.n, side, decay, taken, b, c, out);
        std::copy_n(out, count, result + r);
    }
};

// Of a thread: rows side by side, and one of their length.
int64_t workspace_bytes(int64_t rows, int64_t n) {
    return static_cast<int64_t>(align64(static_cast<uint64_t>(side_floats(rows, n) + n) * sizeof(float)));
}

void ssm_scan(const op_context & ctx) {
    const view & x = ctx.src[1];
    const int64_t n = ctx.src[0].ne(0);
    const int64_t rows = x.ne(0);
    const int64_t heads = x.ne(1);
    float * const last = ctx.dst.at<float>(0) + rows * x.rows();
    sequence_states states(ctx, 0, 3, 6, x.ne(3));
    if (!states.begin(last, ctx.scratch + ctx.n_threads * workspace_bytes(rows, n))) {
        return;
    }
    const bool side_by_side = rows >= state_lanes / 2 && (ctx.op->flags & TB_FLAG_DETERMINISTIC) == 0;
    float * const lanes = reinterpret_cast<float *>(ctx.scratch + ctx.thread * workspace_bytes(rows, n));
    for (const int64_t item : ctx.share(heads * x.ne(3), std::max(int64_t{1}, line_floats / rows))) {
        const head_states of{states,  last, item % heads, heads,          item / heads, x.ne(3),
                             x.ne(2), n,    rows,         ctx.param_i(0), lanes};
        of.walk(0, rows, side_by_side, token{ctx, of, lanes + side_floats(rows, n)});
    }
}

uint64_t ssm_scan_scratch(const tb_op & op, int n_threads, const kernel_table &) {
    const int64_t copy = sequence_states::copy_bytes(op.src[1].ne[3]);
    return static_cast<uint64_t>(n_threads * workspace_bytes(op.src[0].ne[1], op.src[0].ne[0]) + copy);
}

} // namespace

const op_entry ssm_conv_entry = {ssm_conv, ssm_conv_scratch};
const op_entry ssm_scan_entry = {ssm_scan, ssm_scan_scratch};

} // namespace tb::npu
