// How attention kernels of an ISA's `simd` struct (kernels/<isa>/simd.h, included before this) read cells, and in which
// blocks of rows they work. Internal linkage, see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_ATTENTION_CELLS_H
#define TILEBEAM_NPU_KERNELS_ATTENTION_CELLS_H

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/attention.h"

namespace tb::npu {
namespace {

using vec = simd::vec;
constexpr int lanes = simd::width;

// A cell's row of F16 or float, or of Q8_0 blocks: an FP16 scale and 32 signed bytes.
template <class T> struct cell_row {
    const T * x;

    explicit cell_row(const void * cell = nullptr) : x(static_cast<const T *>(cell)) {}
    vec get(int d) const { return simd::load(x + d); }
    vec get_n(int d, int n) const { return simd::load_n(x + d, n); }
};

template <> struct cell_row<int8_t> {
    static constexpr int block = 32;
    const uint8_t * x;

    explicit cell_row(const void * cell = nullptr) : x(static_cast<const uint8_t *>(cell)) {}
    vec get(int d) const {
        const uint8_t * at = x + d / block * (sizeof(uint16_t) + block);
        const vec scale = simd::set1(reinterpret_cast<const uint16_t *>(at));
        return simd::mul(scale, simd::load(reinterpret_cast<const int8_t *>(at + sizeof(uint16_t)) + d % block));
    }
    vec get_n(int d, int) const { return get(d); } // whole blocks are whole vectors
};

// Asks for the rows of an attention_fetch, a few lines in each of `steps` steps. Always inline: gcc takes a function
// that does nothing but this for one without effect, and drops its calls.
class fetcher {
  public:
    fetcher(const attention_fetch & fetch, int steps) : what(fetch) {
        const int pieces = fetch.rows * ((fetch.bytes + piece - 1) / piece);
        const int n = std::max(1, steps); // rows shorter than a vector make no step
        pieces_per_step = (pieces + n - 1) / n;
        period = pieces == 0 ? std::numeric_limits<int>::max() : std::max(1, n / pieces);
        wait = period;
    }

    __attribute__((always_inline)) void step() {
        if (--wait > 0) {
            return;
        }
        wait = period;
        for (int i = 0; i < pieces_per_step; i++) {
            if (at >= end) {
                if (row == what.rows) {
                    wait = std::numeric_limits<int>::max();
                    return;
                }
                at = what.base + what.cells[row++] * what.stride;
                end = at + what.bytes;
            }
#pragma GCC unroll 4
            for (int line = 0; line < piece; line += 64) {
                __builtin_prefetch(at + line);
            }
            at += piece;
        }
    }

  private:
    static constexpr int piece = 128; // bytes: two lines cost little more than one
    const attention_fetch & what;
    const uint8_t * at = nullptr;
    const uint8_t * end = nullptr;
    int row = 0;
    int pieces_per_step, period, wait;
};

// f(cell_row<T>()) for the cells' type.
template <class F> inline void with_cells(cell_type type, F && f) {
    switch (type) {
    case cell_type::f16:
        return f(cell_row<uint16_t>());
    case cell_type::f32:
        return f(cell_row<float>());
    case cell_type::q8_0:
        return f(cell_row<int8_t>());
    }
}

// sum[r][i] += weight(r, c) * x[i] for c = 0 .. n - 1 in order, where load(c, x) gives x: the tile of sums stays in
// registers. Floats or doubles.
template <int rows, int vecs, class V, class Weight, class Load>
inline __attribute__((always_inline)) void add_products(V (&sum)[rows][vecs], int n, Weight && weight, Load && load) {
    for (int c = 0; c < n; c++) {
        V x[vecs];
        load(c, x);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const V w = simd::set1(weight(r, c));
#pragma GCC unroll 8
            for (int i = 0; i < vecs; i++) {
                sum[r][i] = simd::fma(w, x[i], sum[r][i]);
            }
        }
    }
}

// Parts of at most `most` rows, as equal as possible: the size of the next one.
inline int next_part(int left, int most) {
    const int parts = (left + most - 1) / most;
    return (left + parts - 1) / parts;
}

// f(std::integral_constant<int, n>()) for 1 <= n <= most.
template <int most, class F> inline void with_rows(int n, F && f) {
    if constexpr (most > 1) {
        if (n < most) {
            return with_rows<most - 1>(n, f);
        }
    }
    f(std::integral_constant<int, most>());
}

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_ATTENTION_CELLS_H
