// See attention_any_order.h.
#include "ops/attention_any_order.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tb::npu {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr uint64_t alignment = 128;

uint64_t aligned(uint64_t bytes) { return (bytes + alignment - 1) / alignment * alignment; }

// f(cell) for each set bit.
template <class F> void each_cell(int cells, uint64_t visible, F && f) {
    const uint64_t all = cells == 64 ? ~uint64_t{0} : (uint64_t{1} << cells) - 1;
    for (uint64_t left = visible & all; left != 0; left &= left - 1) {
        f(__builtin_ctzll(left));
    }
}

} // namespace

uint64_t any_order_rows::bytes(int64_t rows, int64_t n_kv, int64_t dim) {
    const auto n = static_cast<uint64_t>(rows);
    return aligned(n * sizeof(row)) +
           aligned(n * static_cast<uint64_t>(attention_any_order_dim(dim)) * sizeof(double)) +
           aligned(n * attention_tile_cells * sizeof(double)) +
           aligned(n * static_cast<uint64_t>(n_kv) * sizeof(float));
}

any_order_rows::any_order_rows(const kernel_table & set, void * workspace, int64_t most_rows, int64_t cells,
                               int64_t values)
    : kernels(set), n_kv(cells), dim(attention_any_order_dim(values)) {
    uint8_t * at = static_cast<uint8_t *>(workspace);
    const auto take = [&at, most_rows](int64_t bytes) {
        uint8_t * start = at;
        at += aligned(static_cast<uint64_t>(most_rows * bytes));
        return start;
    };
    rows = reinterpret_cast<row *>(take(sizeof(row)));
    total = reinterpret_cast<double *>(take(dim * static_cast<int64_t>(sizeof(double))));
    tile = reinterpret_cast<double *>(take(attention_tile_cells * sizeof(double)));
    scores = reinterpret_cast<float *>(take(n_kv * static_cast<int64_t>(sizeof(float))));
}

void any_order_rows::open(int64_t n) { std::fill_n(rows, n, row{0, -infinity, 0.0f, 0.0, 0.0}); }

void any_order_rows::meet(int64_t r, int cells, uint64_t visible, const float * s, const float * largest, float most) {
    float * out = scores + r * n_kv + rows[r].met;
    float * end = out;
    float high = largest == nullptr ? most : 0.0f;
    each_cell(cells, visible, [&](int c) {
        *end++ = s[c];
        if (largest != nullptr) high = std::max(high, largest[c]);
    });
    rows[r].met += end - out;
    rows[r].largest = std::max(rows[r].largest, high);
}

void any_order_rows::weigh(int64_t r) {
    row & x = rows[r];
    float * s = scores + r * n_kv;
    x.max = kernels.vec.max(x.met, s);
    x.sum = kernels.attention.any_order.powers(x.met, s, std::max(x.max, attention_least_base));
    // All partial sums are within the bound, below 2^(e + 1). The anchor 1.5 * 2^(e + 3) is 2^(e + 2) away from where
    // its last bit would stand for more, or for less.
    const double bound = x.sum * static_cast<double>(x.largest);
    x.anchor = bound > 0.0 && std::isfinite(bound) ? std::ldexp(1.5, std::ilogb(bound) + 3) : 1.0;
    begin_again(r);
}

void any_order_rows::begin_again(int64_t r) {
    std::fill_n(sums(r), dim, rows[r].anchor);
    rows[r].met = 0;
}

void any_order_rows::meet_again(int64_t r, int cells, uint64_t visible, double * p) {
    const float * from = scores + r * n_kv + rows[r].met;
    const float * next = from;
    std::fill_n(p, cells, 0.0);
    each_cell(cells, visible, [&](int c) { p[c] = static_cast<double>(*next++); });
    rows[r].met += next - from;
}

any_order_rows::result any_order_rows::close(int64_t r, int64_t n, float * out) const {
    for (int64_t d = 0; d < n; d++) {
        out[d] = static_cast<float>(total[r * dim + d] - rows[r].anchor);
    }
    return {rows[r].max, static_cast<float>(rows[r].sum)};
}

} // namespace tb::npu
