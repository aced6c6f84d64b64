// The recurrent states of an op's sequences: which of a tensor's states each sequence begins with, where the one after
// its last token goes, and the way through its tokens. A graph that is told to keeps states in the cache: they are read
// and written there, and no copy of them is made unless a sequence's new state takes the place of one that another
// sequence begins with.
#ifndef TILEBEAM_NPU_OPS_STATES_H
#define TILEBEAM_NPU_OPS_STATES_H

#include <algorithm>
#include <cstdint>

#include "ops/ops.h"

namespace tb::npu {

class sequence_states {
  public:
    // Of operand `states`, whose dimension `dim` counts them. Operand `which`, if there, has the number of each
    // sequence's first state, else it is the sequence's own. params[1]: 0, or one more than the number of the state
    // that sequence 0's last one replaces, which those of the others follow.
    sequence_states(const op_context & of, int states, int dim, int which, int64_t n_sequences);

    // Look at the numbers, and put states aside that would be overwritten too early: into `aside`, which has room for
    // all sequences' ones without gaps. All threads call it, with the same memory; false: a number is out of range, and
    // said. The numbers come from data that may change meanwhile, so each is read once, into `copy`, by one thread.
    bool begin(float * aside, uint8_t * copy);

    // Bytes of `copy` for so many sequences.
    static constexpr int64_t copy_bytes(int64_t n_sequences) {
        return (n_sequences + 1) * static_cast<int64_t>(sizeof(int32_t));
    }

    bool in_place() const { return first >= 0; }

    // Row (i1, i2) of a sequence's first state; of three-dimensional states i2 is 0.
    const float * from(int64_t i1, int64_t i2, int64_t sequence) const {
        return now.at<const float>(i1, dim == 3 ? i2 : 0) + index(sequence) * stride;
    }
    // .. and of the state in the cache that takes its place.
    float * into(int64_t i1, int64_t i2, int64_t sequence) const {
        return ctx.src[operand].at<float>(i1, dim == 3 ? i2 : first + sequence, dim == 3 ? first + sequence : 0);
    }

  private:
    const op_context & ctx;
    const int operand, dim;
    const int64_t sequences;
    const int64_t first; // below 0: not in place
    const int32_t * numbers;
    tb_tensor shape; // of `now`
    view now;        // the operand, or what was put aside
    int64_t stride;  // floats from one state to the next

    int64_t index(int64_t sequence) const { return numbers ? numbers[sequence] : sequence; }
    enum verdict { fine, collide, out_of_range };
    verdict look() const;
    void put_aside(float * aside);
};

// One head of one sequence on its way through the tokens. Its state has rows of n elements.
struct head_states {
    const sequence_states & first;
    float * last; // of all heads and sequences, without gaps: the last states, the ones before, ..; unless in place
    int64_t head, heads, sequence, sequences, tokens, n, rows;
    int64_t kept;  // last states to keep
    float * lanes; // for rows side by side, state_lanes at a time: as many as are walked, rounded up

    // A row of the state after the token that is so many before the last one.
    float * row(int64_t r, int64_t back) const {
        if (first.in_place()) {
            return first.into(r, head, sequence);
        }
        return last + (((back * sequences + sequence) * heads + head) * rows + r) * n;
    }

    // Where its results of a token are: behind each other in dst, all heads' of a token, tokens, sequences.
    float * result(const op_context & ctx, int64_t t) const {
        return ctx.dst.at<float>(0) + ((sequence * tokens + t) * heads + head) * rows;
    }

    // Take rows [begin, end) through all tokens. token.read(t) comes before the rows of token t; then token.row(r,
    // from, next) for each, or token.lanes(r, side, count) for `count` rows from r on that lie side by side. That pays
    // from so many tokens on, for which the rows are laid so; sums of the two ways are in different orders. What a few
    // tokens bring stays in the nearest cache for all rows: heads of the next token are a page away.
    template <class Token> void walk(int64_t begin, int64_t end, bool side_by_side, Token && token) const {
        if (!side_by_side || tokens < 16) {
            for (int64_t t = 0; t < tokens; t++) {
                token.read(t);
                const int64_t back = tokens - 1 - t;
                for (int64_t r = begin; r < end; r++) {
                    float * next = row(r, 0); // rows change where the last state will be
                    token.row(r, t == 0 ? first.from(r, head, sequence) : next, next);
                    if (back > 0 && back < kept) {
                        std::copy_n(next, n, row(r, back));
                    }
                }
            }
            return;
        }
        for (int64_t t = 0; t < tokens; t += few_tokens) {
            for (int64_t r = begin; r < end; r += state_lanes) {
                walk_few(r, std::min(state_lanes, end - r), t, lanes + (r - begin) * n, token);
            }
        }
    }

  private:
    static constexpr int64_t few_tokens = 8;

    // Rows [r, r + count), which lie side by side, through a few tokens from t on.
    template <class Token> void walk_few(int64_t r, int64_t count, int64_t t, float * side, Token & token) const {
        if (t == 0) {
            std::fill_n(side, n * state_lanes, 0.0f);
            for (int64_t i = 0; i < count; i++) {
                spread(n, first.from(r + i, head, sequence), 1, side + i, state_lanes);
            }
        }
        for (const int64_t end = std::min(tokens, t + few_tokens); t < end; t++) {
            token.read(t);
            token.lanes(r, side, count);
            const int64_t back = tokens - 1 - t;
            for (int64_t i = 0; i < count && back < kept; i++) {
                spread(n, side + i, state_lanes, row(r + i, back), 1);
            }
        }
    }

    static void spread(int64_t n, const float * x, int64_t step_x, float * y, int64_t step_y) {
        for (int64_t i = 0; i < n; i++) {
            y[i * step_y] = x[i * step_x];
        }
    }
};

// Floats of a thread's workspace for rows side by side.
inline int64_t side_floats(int64_t rows, int64_t n) { return divide_up(rows, state_lanes) * state_lanes * n; }

// Of a thread in walk_heads: the rows, and `spare` floats.
inline int64_t walk_bytes(int64_t n, int64_t spare) {
    return static_cast<int64_t>(align64(static_cast<uint64_t>(side_floats(n, n) + spare) * sizeof(float)));
}

inline uint64_t walk_scratch(const tb_tensor & values, int n_threads, int64_t spare) {
    return static_cast<uint64_t>(n_threads * walk_bytes(values.ne[0], spare) +
                                 sequence_states::copy_bytes(values.ne[3]));
}

// Take square states of all heads and sequences through their tokens, where rows of a state know nothing of each other.
// `values` is [n, heads, tokens, sequences]; dst has its results, then the last `kept` states. make(of, spare) gives
// what a token does to the rows of a head. Items are heads where there are enough of them for all threads, else blocks
// of their rows.
template <class Make>
void walk_heads(const op_context & ctx, const view & values, int64_t kept, int64_t spare, Make && make) {
    const int64_t n = values.ne(0), heads = values.ne(1), sequences = values.ne(3);
    const int operand = tb_op_states(ctx.op->code);
    float * const last = ctx.dst.at<float>(0) + n * values.rows();
    sequence_states states(ctx, operand, 3, operand + 1, sequences);
    if (!states.begin(last, ctx.scratch + ctx.n_threads * walk_bytes(n, spare))) {
        return;
    }
    const bool side_by_side = (ctx.op->flags & TB_FLAG_DETERMINISTIC) == 0;
    const int64_t n_rows = heads * sequences >= 4 * ctx.n_threads ? n : state_lanes;
    const int64_t blocks = divide_up(n, n_rows);
    float * const lanes = reinterpret_cast<float *>(ctx.scratch + ctx.thread * walk_bytes(n, spare));
    for (const int64_t item : ctx.share(blocks * heads * sequences)) {
        const int64_t row = item % blocks * n_rows;
        const int64_t head = item / blocks;
        const head_states of{states, last, head % heads, heads, head / heads, sequences, values.ne(2),
                             n,      n,    kept,         lanes};
        of.walk(row, std::min(row + n_rows, n), side_by_side, make(of, lanes + side_floats(n, n)));
    }
}

} // namespace tb::npu

#endif // TILEBEAM_NPU_OPS_STATES_H
