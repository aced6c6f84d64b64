// Float GEMM, written once over the names of a `unit`: an ISA's simd struct (kernels/<isa>/simd.h) with the number of
// its registers and BF16 numbers (kernels/<isa>/gemm_float.cpp).
//
// panels  rows x vectors of columns in registers, over float panels [k][32].
// pack    panels from F32, F16 and BF16 rows, by transposing squares in registers.
// dot     vectors run along k, so weights are read as they lie in the file, converted on the way: rows x columns of
//         partial sums in registers, over all of k. Several groups of rows meet some columns, which come from memory
//         for the first group and from a cache for the others, before the next ones.
// Internal linkage, see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_GEMM_FLOAT_SIMD_H
#define TILEBEAM_NPU_KERNELS_GEMM_FLOAT_SIMD_H

#include <algorithm>
#include <cstring>

#include "kernels/gemm.h"
#include "kernels/gemm_shape.h"

namespace tb::npu {
namespace {

// Elements of weights, as many as `step` at a time, beside floats of activations: `load_n` and `activations_n` read n
// of them, 1 to step, and zeros. The order of elements within an operand is the same for both.
template <class unit> struct element_of_vec {
    using operand = typename unit::vec;
    static constexpr int step = unit::width;
    static operand activations(const float * x) { return unit::load(x); }
    static operand activations_n(const float * x, int n) { return unit::load_n(x, n); }
    static typename unit::vec fma(operand x, operand w, typename unit::vec sum) { return unit::fma(x, w, sum); }
};

template <class unit> struct element_f32 : element_of_vec<unit> {
    static constexpr int size = 4;
    static typename unit::vec load(const uint8_t * p) { return unit::load(reinterpret_cast<const float *>(p)); }
    static typename unit::vec load_n(const uint8_t * p, int n) {
        return unit::load_n(reinterpret_cast<const float *>(p), n);
    }
};

template <class unit> struct element_f16 : element_of_vec<unit> {
    static constexpr int size = 2;
    static typename unit::vec load(const uint8_t * p) { return unit::load(reinterpret_cast<const uint16_t *>(p)); }
    static typename unit::vec load_n(const uint8_t * p, int n) {
        return unit::load_n(reinterpret_cast<const uint16_t *>(p), n);
    }
};

template <class unit> struct element_bf16 : element_of_vec<unit> {
    static constexpr int size = 2;
    static typename unit::vec load(const uint8_t * p) { return unit::load_bf16(p); }
    static typename unit::vec load_n(const uint8_t * p, int n) {
        uint8_t t[2 * unit::width] = {};
        std::memcpy(t, p, static_cast<size_t>(n) * size);
        return load(t);
    }
};

// ---- panels

template <class unit>
constexpr gemm_shape panel_shape = solve_gemm_shape(unit::registers, gemm_panel / unit::width, 1, 0, gemm_max_rows);

template <class unit, int rows> void float_block(const gemm_float_args & a, int first) {
    constexpr int vectors = panel_shape<unit>.vectors, width = unit::width;
    typename unit::vec sum[rows][vectors];
#pragma GCC unroll 16
    for (int m = 0; m < rows; m++) {
#pragma GCC unroll 8
        for (int i = 0; i < vectors; i++)
            sum[m][i] = a.add ? unit::load(a.out[m] + first + width * i) : unit::zero();
    }
    const float * w = a.panel + first;
    const float * x = a.group;
    for (int64_t k = 0; k < a.k; k++, w += gemm_panel, x += rows) {
        typename unit::vec v[vectors];
#pragma GCC unroll 8
        for (int i = 0; i < vectors; i++)
            v[i] = unit::load(w + width * i);
#pragma GCC unroll 16
        for (int m = 0; m < rows; m++) {
            const typename unit::vec xm = unit::set1(x[m]);
#pragma GCC unroll 8
            for (int i = 0; i < vectors; i++)
                sum[m][i] = unit::fma(xm, v[i], sum[m][i]);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < rows; m++) {
#pragma GCC unroll 8
        for (int i = 0; i < vectors; i++)
            unit::store(a.out[m] + first + width * i, sum[m][i]);
    }
}

template <class unit, int rows> void float_panel(const gemm_float_args & a) {
    if (a.rows == rows) {
        for (int first = 0; first < gemm_panel; first += panel_shape<unit>.vectors * unit::width)
            float_block<unit, rows>(a, first);
    } else if constexpr (rows > 1) {
        float_panel<unit, rows - 1>(a);
    }
}

// ---- pack

template <class unit, class Element>
void pack_rows(const uint8_t * src, int64_t stride, int cols, int64_t k, float * out) {
    constexpr int width = unit::width;
    for (int first = 0; first < gemm_panel; first += width) {
        for (int64_t i = 0; i < k; i += width) {
            const int count = static_cast<int>(std::min<int64_t>(width, k - i));
            typename unit::vec v[width];
#pragma GCC unroll 16
            for (int n = 0; n < width; n++) {
                const uint8_t * p = src + (first + n) * stride + i * Element::size;
                v[n] = first + n >= cols ? unit::zero() : count == width ? Element::load(p) : Element::load_n(p, count);
            }
            unit::transpose(v);
            for (int n = 0; n < count; n++)
                unit::store(out + gemm_panel * (i + n) + first, v[n]);
        }
    }
}

template <class unit> void pack(uint32_t type, const uint8_t * src, int64_t stride, int cols, int64_t k, float * out) {
    if (type == TB_F32) {
        pack_rows<unit, element_f32<unit>>(src, stride, cols, k, out);
    } else if (type == TB_F16) {
        pack_rows<unit, element_f16<unit>>(src, stride, cols, k, out);
    } else {
        pack_rows<unit, element_bf16<unit>>(src, stride, cols, k, out);
    }
}

// ---- dot

// Weights are asked for so far ahead, and into the second cache: a core waits for few lines at a time on the way to its
// first one, and the hardware's own prefetching stops at the end of each page.
constexpr int dot_locality = 2;
constexpr int64_t dot_ahead = 16 << 10;

// One row: a column after the other, so that weights are one stream.
template <class unit, class Element> void dot_one(const gemm_dot_args & a) {
    using vec = typename unit::vec;
    constexpr int sums = 4, step = Element::step;
    for (int col = 0; col < a.cols; col++) {
        const uint8_t * w = a.w + col * a.stride;
        vec sum[sums];
#pragma GCC unroll 4
        for (int i = 0; i < sums; i++)
            sum[i] = unit::zero();
        int64_t k = 0;
        for (; k + sums * step <= a.k; k += sums * step) {
#pragma GCC unroll 4
            for (int i = 0; i < sums; i++) {
                const uint8_t * p = w + (k + i * step) * Element::size;
                if (i * step * Element::size % 64 == 0) __builtin_prefetch(p + dot_ahead, 0, dot_locality);
                sum[i] = Element::fma(Element::activations(a.x[0] + k + i * step), Element::load(p), sum[i]);
            }
        }
        for (; k < a.k; k += step) {
            const int n = static_cast<int>(std::min<int64_t>(step, a.k - k));
            sum[0] =
                Element::fma(Element::activations_n(a.x[0] + k, n), Element::load_n(w + k * Element::size, n), sum[0]);
        }
        a.out[0][col] = unit::sum(unit::add(unit::add(sum[0], sum[1]), unit::add(sum[2], sum[3])));
    }
}

// More rows: groups of them, each beside as many columns as there are registers for sums, an operand of each column and
// one of activations.
constexpr int dot_group_rows = 6;
template <class unit> constexpr int dot_cols(int rows) {
    const int most = (unit::registers - 1) / (rows + 1);
    return most >= 6 ? 6 : most >= 4 ? 4 : most;
}
constexpr int64_t dot_k = 8192; // whose activations, of a group 192 KiB at most, stay in the second cache
constexpr int64_t dot_weight_bytes = 64 << 10; // that all groups meet before the next columns

// Where a block of results lies, and the elements of k it is about; `add`: to what is there. ahead: bytes to the
// weights that are asked for, 0: none.
struct dot_place {
    int row, col;
    int64_t begin, n;
    bool add;
    int64_t ahead;
};

// x: [n / step][rows], n rounded up to whole steps.
template <class unit, class Element, int rows, int cols>
void dot_block(const gemm_dot_args & a, const typename Element::operand * x, const dot_place & at) {
    using vec = typename unit::vec;
    constexpr int width = unit::width, step = Element::step, results = (rows * cols + width - 1) / width * width;
    constexpr int line = std::max(1, 64 / (step * Element::size)) * step;
    vec sum[results];
#pragma GCC unroll 32
    for (int i = 0; i < results; i++)
        sum[i] = unit::zero();
    const uint8_t * w = a.w + at.col * a.stride + at.begin * Element::size;
    const auto multiply = [&](const typename Element::operand * v) {
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++) {
#pragma GCC unroll 8
            for (int c = 0; c < cols; c++)
                sum[m * cols + c] = Element::fma(x[m], v[c], sum[m * cols + c]);
        }
        x += rows;
    };
    typename Element::operand v[cols];
    const auto steps = [&](int64_t k, int64_t end) {
#pragma GCC unroll 2
        for (; k < end; k += step) {
#pragma GCC unroll 8
            for (int c = 0; c < cols; c++)
                v[c] = Element::load(w + c * a.stride + k * Element::size);
            multiply(v);
        }
    };
    int64_t k = 0;
    for (; k + line <= at.n; k += line) {
        if (at.ahead != 0) {
#pragma GCC unroll 8
            for (int c = 0; c < cols; c++)
                __builtin_prefetch(w + c * a.stride + k * Element::size + at.ahead, 0, dot_locality);
        }
        steps(k, k + line);
    }
    steps(k, at.n / step * step);
    k = at.n / step * step;
    if (k < at.n) {
#pragma GCC unroll 8
        for (int c = 0; c < cols; c++)
            v[c] = Element::load_n(w + c * a.stride + k * Element::size, static_cast<int>(at.n - k));
        multiply(v);
    }
    float total[results];
    // The same way for all columns, or bits would depend on where a thread's columns begin.
    if constexpr (rows * dot_cols<unit>(rows) <= width / 2) {
        for (int i = 0; i < rows * cols; i++)
            total[i] = unit::sum(sum[i]);
    } else {
#pragma GCC unroll 8
        for (int i = 0; i < results; i += width) {
            vec part[width];
#pragma GCC unroll 16
            for (int j = 0; j < width; j++)
                part[j] = sum[i + j];
            unit::store(total + i, unit::sums(part));
        }
    }
    if (at.add) {
        float before[results] = {};
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++)
            std::memcpy(before + m * cols, a.out[at.row + m] + at.col, cols * sizeof(float));
#pragma GCC unroll 32
        for (int i = 0; i < results; i++)
            total[i] += before[i];
    }
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
        std::memcpy(a.out[at.row + m] + at.col, total + m * cols, cols * sizeof(float));
}

// Columns [at.col, last) of a group.
template <class unit, class Element, int rows, int cols>
void dot_columns(const gemm_dot_args & a, const typename Element::operand * x, dot_place at, int last) {
    for (; at.col + cols <= last; at.col += cols)
        dot_block<unit, Element, rows, cols>(a, x, at);
    for (; at.col < last; at.col++)
        dot_block<unit, Element, rows, 1>(a, x, at);
}

template <class Element> void dot_activations(const gemm_dot_args & a, const dot_place & at, int rows, void * out) {
    constexpr int step = Element::step;
    typename Element::operand * x = static_cast<typename Element::operand *>(out);
    for (int64_t k = 0; k < at.n; k += step, x += rows) {
        const int n = static_cast<int>(std::min<int64_t>(step, at.n - k));
        for (int m = 0; m < rows; m++) {
            const float * from = a.x[at.row + m] + at.begin + k;
            x[m] = n == step ? Element::activations(from) : Element::activations_n(from, n);
        }
    }
}

// Groups of `rows` and, where that does not come out even, of one row less.
template <class unit, class Element, int rows> void dot_groups(const gemm_dot_args & a, int groups) {
    if constexpr (rows > 2) {
        if ((a.rows + groups - 1) / groups < rows) return dot_groups<unit, Element, rows - 1>(a, groups);
    }
    using operand = typename Element::operand;
    constexpr int cols = dot_cols<unit>(rows), step = Element::step;
    operand * const x = static_cast<operand *>(a.scratch);
    for (int64_t begin = 0; begin < a.k; begin += dot_k) {
        dot_place at = {0, 0, begin, std::min(dot_k, a.k - begin), begin > 0, 0};
        const int64_t steps = (at.n + step - 1) / step, block_bytes = cols * at.n * Element::size;
        const auto group = [&](int g) { return static_cast<int>(int64_t{a.rows} * g / groups); };
        for (int g = 0; g < groups; g++) {
            at.row = group(g);
            dot_activations<Element>(a, at, group(g + 1) - at.row, x + at.row * steps);
        }
        const int blocks = static_cast<int>(std::max<int64_t>(1, dot_weight_bytes / block_bytes));
        const int chunk = groups == 1 ? a.cols : cols * blocks;
        for (int first = 0; first < a.cols; first += chunk) {
            const int last = std::min(a.cols, first + chunk);
            for (int g = 0; g < groups; g++) {
                at.row = group(g);
                at.col = first;
                at.ahead = g > 0 ? 0 : (dot_ahead + block_bytes - 1) / block_bytes * cols * a.stride;
                const operand * group_x = x + at.row * steps;
                if constexpr (rows > 2) {
                    if (group(g + 1) - at.row < rows) {
                        dot_columns<unit, Element, rows - 1, cols>(a, group_x, at, last);
                        continue;
                    }
                }
                dot_columns<unit, Element, rows, cols>(a, group_x, at, last);
            }
        }
    }
}

template <class unit, class Element> void dot(const gemm_dot_args & a) {
    if (a.rows == 1) return dot_one<unit, Element>(a);
    constexpr int most = dot_group_rows;
    dot_groups<unit, Element, most>(a, (a.rows + most - 1) / most);
}

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_GEMM_FLOAT_SIMD_H
