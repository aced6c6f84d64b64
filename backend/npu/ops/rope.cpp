// ROPE: rotates pairs of a row by angles that depend on the row's position, ROPE_BACK the other way round; NORMAL pairs
// (2i, 2i+1), all others (i, i + number of pairs); with YaRN scaling and optional frequency factors. Rows are heads,
// ne[2] counts tokens.
//
// Tokens of images and videos have four positions (time, height, width and one more), and each pair turns by one of
// them: section by section (MROPE), by turns (IMROPE), or section by section with frequencies that start anew in each
// (VISION).
//
// Cosines and sines cost more than the rotation, and the same positions come back for every head, for Q and K, and in
// every layer of a model. So each thread remembers the rows of its last positions, for a few sets of parameters.
#include "ops/ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace tb::npu {
namespace {

constexpr float pi = 3.14159265358979323846f;
constexpr int axes = 4; // positions of a token

struct rope_params {
    int32_t n_dims, mode, n_ctx_orig;
    float freq_base, freq_scale, ext_factor, attn_factor, beta_fast, beta_slow;
    int32_t sections[axes]; // zero for modes with one position per token
    float direction = 1.0f; // -1 turns back

    bool is_multi() const { return mode == TB_ROPE_MROPE || mode == TB_ROPE_VISION || mode == TB_ROPE_IMROPE; }
    int32_t pairs() const { return mode == TB_ROPE_VISION ? n_dims : n_dims / 2; }
};

struct position {
    int32_t axis[axes]; // the first one only, where there is one position per token

    bool operator==(const position & other) const { return std::memcmp(axis, other.axis, sizeof axis) == 0; }
};

rope_params read_params(const op_context & ctx) {
    rope_params p = {ctx.param_i(1), ctx.param_i(2), ctx.param_i(4), ctx.param_f(5),  ctx.param_f(6),
                     ctx.param_f(7), ctx.param_f(8), ctx.param_f(9), ctx.param_f(10), {}};
    if (ctx.op->code == TB_OP_ROPE_BACK) {
        p.direction = -1.0f;
    }
    for (int i = 0; p.is_multi() && i < axes; i++) {
        p.sections[i] = ctx.param_i(11 + i);
    }
    return p;
}

position read_position(const rope_params & p, const view & positions, int64_t token, int64_t n_tokens) {
    position at = {};
    for (int i = 0; i < (p.is_multi() ? axes : 1); i++) {
        at.axis[i] = positions.at<const int32_t>(0)[i * n_tokens + token];
    }
    return at;
}

// Which of the positions pair i turns by.
int axis_of(const rope_params & p, int32_t i) {
    if (!p.is_multi()) {
        return 0;
    }
    const int32_t * s = p.sections;
    const int32_t at = i % (s[0] + s[1] + s[2] + s[3]);
    if (p.mode == TB_ROPE_IMROPE) {
        const int axis = at % 3;
        return at < 3 * int64_t{s[axis]} ? axis : 3;
    }
    return at < s[0] ? 0 : at < s[0] + s[1] ? 1 : at < s[0] + s[1] + s[2] ? 2 : 3;
}

// VISION: the position whose frequencies start anew at pair i; -1: none.
int axis_started(const rope_params & p, int32_t i) {
    if (p.mode != TB_ROPE_VISION) {
        return -1;
    }
    int32_t first = 0;
    const int32_t at = i % (p.sections[0] + p.sections[1] + p.sections[2] + p.sections[3]);
    for (int axis = 0; axis < axes; first += p.sections[axis++]) {
        if (at == first) {
            return axis;
        }
    }
    return -1;
}

// The pair that turns `rotations` times within the original context (YaRN's find_correction_dim).
float correction_pair(const rope_params & p, float rotations) {
    return static_cast<float>(p.n_dims) * std::log(static_cast<float>(p.n_ctx_orig) / (rotations * 2.0f * pi)) /
           (2.0f * std::log(p.freq_base));
}

// Cosines and sines of one token's position, one of each for a pair. The angle steps down by a float product from pair
// to pair, as ggml does it, so that long contexts see the same rounding.
void compute_row(const rope_params & p, const float * factors, const position & at, float * cos, float * sin) {
    const float step = std::pow(p.freq_base, -2.0f / static_cast<float>(p.n_dims));
    float low = 0.0f;
    float high = 0.0f;
    float magnitude = p.attn_factor;
    if (p.ext_factor != 0.0f) {
        low = std::max(0.0f, std::floor(correction_pair(p, p.beta_fast)));
        high = std::min(static_cast<float>(p.n_dims - 1), std::ceil(correction_pair(p, p.beta_slow)));
        magnitude *= 1.0f + 0.1f * std::log(1.0f / p.freq_scale);
    }
    float thetas[axes];
    for (int i = 0; i < axes; i++) {
        thetas[i] = static_cast<float>(at.axis[i]);
    }
    for (int32_t i = 0; i < p.pairs(); i++) {
        if (const int started = axis_started(p, i); started >= 0) {
            thetas[started] = static_cast<float>(at.axis[started]);
        }
        const float theta = thetas[axis_of(p, i)];
        const float extrapolated = factors != nullptr ? theta / factors[i] : theta;
        float angle = p.freq_scale * extrapolated;
        if (p.ext_factor != 0.0f) {
            const float ramp = (static_cast<float>(i) - low) / std::max(0.001f, high - low);
            const float mix = (1.0f - std::min(1.0f, std::max(0.0f, ramp))) * p.ext_factor;
            angle = angle * (1.0f - mix) + extrapolated * mix;
        }
        cos[i] = std::cos(angle) * magnitude;
        sin[i] = std::sin(angle) * magnitude * p.direction;
        for (float & t : thetas) {
            t *= step;
        }
    }
}

class angle_memo {
  public:
    // Points *cos and *sin at a value for each pair, valid until the next call.
    void get(const position & at, const float ** cos, const float ** sin) {
        // Of an image's tokens height and width differ; of a text's all but the last are the same.
        const auto axis = [&at](int i) { return static_cast<uint32_t>(at.axis[i]); };
        const size_t slot = (params.is_multi() ? 2 * axis(0) + 16 * axis(1) + axis(2) + axis(3) : axis(0)) % slots;
        const int64_t pairs = params.pairs();
        float * row = values.data() + slot * static_cast<size_t>(2 * pairs);
        if (!known[slot] || !(positions[slot] == at)) {
            compute_row(params, factors.empty() ? nullptr : factors.data(), at, row, row + pairs);
            positions[slot] = at;
            known[slot] = 1;
        }
        *cos = row;
        *sin = row + pairs;
    }

    bool matches(const rope_params & p, const float * f) const {
        return used && std::memcmp(&params, &p, sizeof(p)) == 0 && (f != nullptr) == !factors.empty() &&
               (f == nullptr || std::memcmp(factors.data(), f, factors.size() * sizeof(float)) == 0);
    }

    void start(const rope_params & p, const float * f) {
        used = false; // until there is memory for all of it
        params = p;
        factors.assign(f, f == nullptr ? f : f + p.pairs());
        known.assign(slots, 0);
        positions.assign(slots, {});
        values.resize(slots * 2 * static_cast<size_t>(p.pairs()));
        used = true;
    }

  private:
    static constexpr size_t slots = 256;
    bool used = false;
    rope_params params = {};
    std::vector<float> factors;
    std::vector<uint8_t> known;
    std::vector<position> positions;
    std::vector<float> values;
};

// A model alternates between few sets of parameters (Gemma's local and global layers): keep the last four.
angle_memo & find_memo(const rope_params & p, const float * factors) {
    static thread_local angle_memo memos[4];
    static thread_local int next = 0;
    for (angle_memo & m : memos) {
        if (m.matches(p, factors)) {
            return m;
        }
    }
    angle_memo & m = memos[next];
    next = (next + 1) % 4;
    m.start(p, factors);
    return m;
}

void rope(const op_context & ctx) {
    const view & x = ctx.src[0];
    const view & positions = ctx.src[1];
    const view & freq_factors = ctx.src[2];
    const view & dst = ctx.dst;
    const kernel_table & k = *ctx.kernels;
    const rope_params p = read_params(ctx);
    const int64_t offset = ctx.param_i(15);
    const int64_t pairs = p.pairs();
    const int64_t rotated = 2 * pairs;
    const int64_t tail = offset + rotated;
    const bool in_place = x.data == dst.data;
    const range mine = ctx.share(x.rows());
    if (mine.first == mine.last) {
        return; // and makes no angles
    }
    angle_memo & memo = find_memo(p, freq_factors && rotated > 0 ? freq_factors.at<const float>(0) : nullptr);
    std::vector<float> buffer(x.type() == TB_F32 ? 0 : static_cast<size_t>(rotated));
    const float * cos = nullptr;
    const float * sin = nullptr;
    int64_t token = -1;
    for (const int64_t r : mine) {
        const row_index i = row_of(x, r);
        if (i.i2 != token) {
            token = i.i2;
            memo.get(read_position(p, positions, token, x.ne(2)), &cos, &sin);
        }
        const uint8_t * src = x.at<uint8_t>(i.i1, i.i2, i.i3);
        uint8_t * out = dst.at<uint8_t>(i.i1, i.i2, i.i3);
        const float * a = load_run(k, x, src, offset, rotated, buffer.data());
        float * b = run_target(dst, out, offset, buffer.data());
        if (p.mode == TB_ROPE_NORMAL) {
            k.vec.rope_normal(pairs, a, cos, sin, b);
        } else {
            k.vec.rope_neox(pairs, pairs, a, cos, sin, b);
        }
        store_run(k, dst, out, offset, rotated, b);
        if (!in_place) {
            copy_run(k, x, src, 0, dst, out, 0, offset);
            copy_run(k, x, src, tail, dst, out, tail, x.ne(0) - tail);
        }
    }
}

} // namespace

const op_entry rope_entry = {rope, nullptr, cut::rows};
const op_entry rope_back_entry = {rope, nullptr, cut::rows};

} // namespace tb::npu
