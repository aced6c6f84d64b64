// Every kernel set of this CPU against the portable one, attention and vector kernels, on random data: for machines
// where Python cannot follow (aarch64 under emulation; see tests/test_aarch64.py). Prints one line per set; exit status
// 1 on a difference.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "half.h"
#include "kernels/kernels.h"

using namespace tb::npu;

namespace {

std::mt19937 rng(1);
int failures = 0;

std::vector<float> floats(size_t n, float spread) {
    std::normal_distribution<float> normal(0.0f, spread);
    std::vector<float> v(n);
    for (float & x : v) {
        x = normal(rng);
    }
    return v;
}

void expect(const char * set, const char * what, const std::vector<float> & got, const std::vector<float> & want,
            float tolerance) {
    for (size_t i = 0; i < got.size(); i++) {
        if (!(std::fabs(got[i] - want[i]) <= tolerance * (1.0f + std::fabs(want[i])))) {
            std::printf("%s: %s differs from portable at %zu: %g, not %g\n", set, what, i, static_cast<double>(got[i]),
                        static_cast<double>(want[i]));
            failures++;
            return;
        }
    }
}

// Cells of normally distributed elements, each in memory of its own that ends where the cell ends.
std::vector<std::vector<uint8_t>> random_cells(cell_type type, int cells, int dim) {
    std::vector<std::vector<uint8_t>> memory;
    for (int c = 0; c < cells; c++) {
        const std::vector<float> values = floats(static_cast<size_t>(dim), 1.0f);
        std::vector<uint8_t> row;
        const auto append = [&row](const void * bytes, size_t n) {
            const uint8_t * b = static_cast<const uint8_t *>(bytes);
            row.insert(row.end(), b, b + n);
        };
        for (size_t d = 0; d < values.size(); d++) {
            const uint16_t half = tb_float_to_half(values[d]);
            const uint16_t scale = tb_float_to_half(1.0f / 64);
            const int8_t byte = d % 7 == 0 ? int8_t{-128} : static_cast<int8_t>(std::lrint(values[d] * 20));
            if (type == cell_type::f32) append(&values[d], sizeof(float));
            if (type == cell_type::f16) append(&half, sizeof(half));
            if (type == cell_type::q8_0 && d % 32 == 0) append(&scale, sizeof(scale));
            if (type == cell_type::q8_0) append(&byte, sizeof(byte));
        }
        memory.push_back(std::move(row));
    }
    return memory;
}

// One tile through all three steps.
std::vector<float> tile(const attention_kernels & k, int rows, int dim, cell_type type, const std::vector<float> & q,
                        const std::vector<const void *> & cell_rows, const std::vector<float> & bias, uint64_t visible,
                        float softcap, bool exact) {
    const int cells = static_cast<int>(cell_rows.size());
    std::vector<const float *> q_rows;
    std::vector<float> s(static_cast<size_t>(rows) * attention_tile_cells, 0.0f);
    std::vector<float> o(static_cast<size_t>(rows * dim), 1.0f);
    std::vector<float *> o_rows;
    std::vector<float> scratch(static_cast<size_t>(dim) * attention_tile_cells);
    for (int r = 0; r < rows; r++) {
        q_rows.push_back(q.data() + r * dim);
        o_rows.push_back(o.data() + r * dim);
    }
    k.scores({rows, cells, dim, q_rows.data(), cell_rows.data(), type, s.data(), scratch.data()});
    std::vector<float> alpha(static_cast<size_t>(rows));
    std::vector<float> max(alpha.size(), -3.0f);
    std::vector<float> parts(alpha.size() * attention_sum_parts);
    for (size_t r = 0; r < alpha.size(); r++) {
        parts[r * attention_sum_parts] = 0.5f;
    }
    k.softmax({rows, cells, visible, bias.empty() ? nullptr : bias.data(), 0.2f, softcap, s.data(), max.data(),
               parts.data(), alpha.data(), exact});
    k.accumulate({rows, cells, dim, s.data(), alpha.data(), cell_rows.data(), type, o_rows.data(), scratch.data()});
    o.insert(o.end(), max.begin(), max.end());
    for (size_t r = 0; r < alpha.size(); r++) {
        const auto row = parts.begin() + static_cast<std::ptrdiff_t>(r * attention_sum_parts);
        o.push_back(std::accumulate(row, row + attention_sum_parts, 0.0f));
    }
    return o;
}

// Weights of scores, and sums of weighted cells from an anchor on: [rows][dim], each row's sum of weights behind it.
std::vector<float> any_order(const attention_kernels & k, int rows, int dim, cell_type type,
                             const std::vector<std::vector<float>> & scores,
                             const std::vector<const void *> & cell_rows) {
    const int cells = static_cast<int>(cell_rows.size());
    const auto width = static_cast<size_t>(attention_any_order_dim(dim));
    const double anchor = 0x1.8p26; // far above what 64 cells add up to
    std::vector<double> o(static_cast<size_t>(rows) * width, anchor), p(static_cast<size_t>(rows * 64));
    std::vector<double *> o_rows;
    std::vector<float> scratch(static_cast<size_t>(attention_scratch_floats(dim))), found, sums;
    for (size_t r = 0; r < static_cast<size_t>(rows); r++) {
        std::vector<float> w = scores[r];
        const double sum = k.any_order.powers(cells, w.data(), *std::max_element(w.begin(), w.end()));
        sums.push_back(static_cast<float>(sum));
        std::copy(w.begin(), w.end(), p.begin() + static_cast<std::ptrdiff_t>(64 * r));
        o_rows.push_back(o.data() + r * width);
    }
    k.any_order.accumulate({rows, cells, dim, p.data(), cell_rows.data(), type, o_rows.data(), scratch.data(), {}});
    for (size_t r = 0; r < sums.size(); r++) {
        for (size_t d = 0; d < static_cast<size_t>(dim); d++) {
            found.push_back(static_cast<float>(o[r * width + d] - anchor));
        }
        found.push_back(sums[r]);
    }
    return found;
}

void check_any_order(const kernel_table & set, const kernel_table & portable) {
    for (const cell_type type : {cell_type::f16, cell_type::f32, cell_type::q8_0}) {
        for (const int dim : {1, 24, 31, 64, 100, 160}) {
            if (type == cell_type::q8_0 && dim % 32 != 0) continue;
            for (const int cells : {1, 5, 63, 64}) {
                for (const int rows : {1, 2, 7, 13}) {
                    const std::vector<std::vector<uint8_t>> memory = random_cells(type, cells, dim);
                    std::vector<std::vector<float>> scores;
                    for (int r = 0; r < rows; r++) {
                        scores.push_back(floats(static_cast<size_t>(cells), 4.0f));
                    }
                    std::vector<const void *> rows_in_order, rows_shuffled;
                    std::vector<size_t> places(memory.size());
                    std::iota(places.begin(), places.end(), size_t{0});
                    std::shuffle(places.begin(), places.end(), rng);
                    std::vector<std::vector<float>> shuffled(scores.size());
                    for (size_t c = 0; c < memory.size(); c++) {
                        rows_in_order.push_back(memory[c].data());
                        rows_shuffled.push_back(memory[places[c]].data());
                        for (size_t r = 0; r < scores.size(); r++) {
                            shuffled[r].push_back(scores[r][places[c]]);
                        }
                    }
                    const auto run = [&](const kernel_table & t, const auto & s, const auto & at) {
                        return any_order(t.attention, rows, dim, type, s, at);
                    };
                    const std::vector<float> got = run(set, scores, rows_in_order);
                    expect(set.isa, "sums in any order", got, run(set, shuffled, rows_shuffled), 0.0f);
                    expect(set.isa, "sums in any order", got, run(portable, scores, rows_in_order), 1e-5f);
                }
            }
        }
    }
}

void check_attention(const kernel_table & set, const kernel_table & portable) {
    std::vector<uint16_t> in(65536);
    std::vector<uint16_t> got(in.size());
    std::vector<uint16_t> want(in.size());
    for (size_t i = 0; i < in.size(); i++) {
        in[i] = static_cast<uint16_t>(i);
    }
    set.attention.exp2_fp16(in.data(), got.data(), in.size());
    portable.attention.exp2_fp16(in.data(), want.data(), in.size());
    for (size_t i = 0; i < in.size(); i++) {
        if (got[i] != want[i] && !(std::isnan(tb_half_to_float(got[i])) && std::isnan(tb_half_to_float(want[i])))) {
            std::printf("%s: exp2 of %04zx is %04x, not %04x\n", set.isa, i, got[i], want[i]);
            failures++;
            break;
        }
    }
    const float inf = std::numeric_limits<float>::infinity();
    for (const int rows : {1, 2, 3, 4, 5, 6, 7, 8, 13, 50}) {
        for (const int cells : {1, 5, 17, 40, 64}) {
            for (const int dim : {1, 40, 67, 128}) {
                const std::vector<float> q = floats(static_cast<size_t>(rows * dim), 1.0f);
                std::vector<float> bias = floats(attention_tile_cells, 1.0f);
                bias[static_cast<size_t>(cells) / 2] = -inf;
                const uint64_t visible = (static_cast<uint64_t>(rng()) << 32 | rng()) | 1;
                const float softcap = cells == 40 ? 2.0f : 0.0f;
                for (const cell_type type : {cell_type::f16, cell_type::f32, cell_type::q8_0}) {
                    if (type == cell_type::q8_0 && dim % 32 != 0) continue;
                    const std::vector<std::vector<uint8_t>> memory = random_cells(type, cells, dim);
                    std::vector<const void *> cell_rows;
                    for (const std::vector<uint8_t> & row : memory) {
                        cell_rows.push_back(row.data());
                    }
                    const auto compare = [&](const std::vector<float> & added, uint64_t seen, float cap, bool exact) {
                        // a score's rounding may tip its FP16 exponent by one step, at most 2^-6 of a small weight
                        expect(set.isa, exact ? "an exact attention tile" : "an attention tile",
                               tile(set.attention, rows, dim, type, q, cell_rows, added, seen, cap, exact),
                               tile(portable.attention, rows, dim, type, q, cell_rows, added, seen, cap, exact),
                               exact ? 1e-4f : 2e-3f);
                    };
                    compare(bias, visible, softcap, false);
                    compare({}, ~uint64_t{0}, 0.0f, false);
                    compare({}, visible, softcap, true);
                }
            }
        }
    }
    std::vector<uint16_t> mask(64);
    for (uint16_t & m : mask) {
        m = static_cast<uint16_t>(rng() % 3 == 0 ? 0xfc00 : rng() % 2 == 0 ? 0x8000 : 0x3c00);
    }
    for (int cells = 1; cells <= 64; cells++) {
        uint64_t a = 0;
        uint64_t b = 0;
        if (set.attention.visible(mask.data(), cells, &a) != portable.attention.visible(mask.data(), cells, &b) ||
            a != b) {
            std::printf("%s: mask bits differ from portable at %d cells\n", set.isa, cells);
            failures++;
        }
    }
}

void check_vectors(const kernel_table & set, const kernel_table & portable) {
    const vec_kernels & a = set.vec;
    const vec_kernels & b = portable.vec;
    for (const int64_t n : {1, 3, 4, 15, 16, 31, 64, 333}) {
        const size_t count = static_cast<size_t>(n);
        const std::vector<float> x = floats(count, 20.0f);
        const std::vector<float> y = floats(count, 2.0f);
        std::vector<float> got(count);
        std::vector<float> want(count);
        a.add(n, x.data(), y.data(), got.data());
        b.add(n, x.data(), y.data(), want.data());
        expect(set.isa, "add", got, want, 0.0f);
        a.mul(n, x.data(), y.data(), got.data());
        b.mul(n, x.data(), y.data(), want.data());
        expect(set.isa, "mul", got, want, 0.0f);
        a.scale(n, x.data(), 0.3f, -1.0f, got.data());
        b.scale(n, x.data(), 0.3f, -1.0f, want.data());
        expect(set.isa, "scale", got, want, 0.0f);
        for (int kind = 0; kind < glu_kind_count; kind++) {
            a.glu[kind](n, x.data(), y.data(), 1.7f, 7.0f, got.data());
            b.glu[kind](n, x.data(), y.data(), 1.7f, 7.0f, want.data());
            expect(set.isa, "glu", got, want, 1e-5f);
        }
        expect(set.isa, "sum of squares", {a.sum_squares(n, x.data())}, {b.sum_squares(n, x.data())}, 1e-5f);
        expect(set.isa, "max", {a.max(n, x.data())}, {b.max(n, x.data())}, 0.0f);
        got = x;
        want = x;
        const float top = b.max(n, x.data());
        expect(set.isa, "sum of exponents", {a.exp_sum(n, got.data(), top)}, {b.exp_sum(n, want.data(), top)}, 1e-5f);
        expect(set.isa, "exp", got, want, 1e-5f);
        for (const unsigned type : {TB_F16, TB_BF16}) {
            std::vector<uint16_t> half_a(count);
            std::vector<uint16_t> half_b(count);
            a.from_f32[type](n, x.data(), half_a.data());
            b.from_f32[type](n, x.data(), half_b.data());
            a.to_f32[type](n, half_a.data(), got.data());
            b.to_f32[type](n, half_b.data(), want.data());
            expect(set.isa, "conversion", got, want, 0.0f);
        }
        const int64_t pairs = n / 2;
        a.rope_neox(pairs, pairs, x.data(), y.data(), y.data() + pairs, got.data());
        b.rope_neox(pairs, pairs, x.data(), y.data(), y.data() + pairs, want.data());
        expect(set.isa, "rope, neox", got, want, 1e-5f);
        a.rope_normal(pairs, x.data(), y.data(), y.data() + pairs, got.data());
        b.rope_normal(pairs, x.data(), y.data(), y.data() + pairs, want.data());
        expect(set.isa, "rope, normal", got, want, 1e-5f);
    }
}

} // namespace

int main() {
    const kernel_list & sets = available_kernels();
    const kernel_table & portable = *sets.tables[sets.n - 1];
    check_any_order(portable, portable);
    for (int i = 0; i < sets.n - 1; i++) {
        check_any_order(*sets.tables[i], portable);
        check_attention(*sets.tables[i], portable);
        check_vectors(*sets.tables[i], portable);
        std::printf("%s: checked\n", sets.tables[i]->isa);
    }
    return failures == 0 ? 0 : 1;
}
