// Float GEMM, written once over the names of a `unit`: an ISA's simd struct (kernels/<isa>/simd.h) with the number of
// its registers and BF16 numbers (kernels/<isa>/gemm_float.cpp).
//
// panels  rows x vectors of columns in registers, over float panels [k][32].
// pack    panels from F32, F16 and BF16 rows, by transposing squares in registers.
// dot     vectors run along k, so weights are read as they lie in the file, converted on the way: rows x columns of
//         partial sums in registers. A group of rows takes a stretch of k that stays in L1 against all columns of the
//         panel, which come from memory for the first group and from L2 for the others.
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

// Few rows: a column after the other, so that weights are one stream, fetched a page ahead of the hardware, which stops
// at the end of each.
constexpr int dot_few_rows = 3;

template <class unit, class Element, int rows> void dot_few(const gemm_dot_args & a) {
    if (a.rows != rows) {
        if constexpr (rows > 1) dot_few<unit, Element, rows - 1>(a);
        return;
    }
    using vec = typename unit::vec;
    constexpr int sums = 4, step = Element::step, ahead = 4096;
    for (int col = 0; col < a.cols; col++) {
        const uint8_t * w = a.w + col * a.stride;
        vec sum[rows][sums];
#pragma GCC unroll 4
        for (int m = 0; m < rows; m++) {
#pragma GCC unroll 4
            for (int i = 0; i < sums; i++)
                sum[m][i] = unit::zero();
        }
        int64_t k = 0;
        for (; k + sums * step <= a.k; k += sums * step) {
#pragma GCC unroll 4
            for (int i = 0; i < sums; i++) {
                const uint8_t * p = w + (k + i * step) * Element::size;
                if (i * step * Element::size % 64 == 0) __builtin_prefetch(p + ahead);
                const typename Element::operand v = Element::load(p);
#pragma GCC unroll 4
                for (int m = 0; m < rows; m++)
                    sum[m][i] = Element::fma(Element::activations(a.x[m] + k + i * step), v, sum[m][i]);
            }
        }
        for (; k < a.k; k += step) {
            const int n = static_cast<int>(std::min<int64_t>(step, a.k - k));
            const typename Element::operand v = Element::load_n(w + k * Element::size, n);
#pragma GCC unroll 4
            for (int m = 0; m < rows; m++)
                sum[m][0] = Element::fma(Element::activations_n(a.x[m] + k, n), v, sum[m][0]);
        }
#pragma GCC unroll 4
        for (int m = 0; m < rows; m++) {
            a.out[m][col] = unit::sum(unit::add(unit::add(sum[m][0], sum[m][1]), unit::add(sum[m][2], sum[m][3])));
        }
    }
}

// More rows: a stretch of k, of a group of rows 24 KiB at most.
constexpr int64_t dot_k = 1024;

// Columns at a time beside so many rows: enough sums to hide the latency of additions, no more than there are registers
// for beside an operand of each column and one of activations.
template <class unit> constexpr int dot_cols(int rows) { return (unit::registers - 1) / (rows + 1) >= 4 ? 4 : 2; }
constexpr int dot_group_rows = 6;

// Where a block of results lies, and the elements of k it is about; `add`: to what is there.
struct dot_place {
    int row, col;
    int64_t begin, n;
    bool add;
};

// x: [n / step][rows], n rounded up to whole steps.
template <class unit, class Element, int rows, int cols>
void dot_block(const gemm_dot_args & a, const typename Element::operand * x, const dot_place & at) {
    using vec = typename unit::vec;
    constexpr int width = unit::width, step = Element::step, results = (rows * cols + width - 1) / width * width;
    vec sum[results];
#pragma GCC unroll 32
    for (int i = 0; i < results; i++)
        sum[i] = unit::zero();
    const uint8_t * w = a.w + at.col * a.stride + at.begin * Element::size;
    const auto multiply = [&](const typename Element::operand * v) {
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++) {
#pragma GCC unroll 4
            for (int c = 0; c < cols; c++)
                sum[m * cols + c] = Element::fma(x[m], v[c], sum[m * cols + c]);
        }
        x += rows;
    };
    int64_t k = 0;
    typename Element::operand v[cols];
    for (; k + step <= at.n; k += step) {
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++) {
            const uint8_t * p = w + c * a.stride + k * Element::size;
            v[c] = Element::load(p);
            // rows of weights are a few pages, too short for the hardware to follow: fetch the next columns'
            if (at.row == 0) __builtin_prefetch(p + cols * a.stride);
        }
        multiply(v);
    }
    if (k < at.n) {
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++)
            v[c] = Element::load_n(w + c * a.stride + k * Element::size, static_cast<int>(at.n - k));
        multiply(v);
    }
    float total[results];
    if constexpr (rows * cols <= width / 2) {
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

template <class unit, class Element, int rows>
void dot_group(const gemm_dot_args & a, int row, int count, int64_t begin, int64_t n) {
    if (count != rows) {
        if constexpr (rows > dot_few_rows) dot_group<unit, Element, rows - 1>(a, row, count, begin, n);
        return;
    }
    constexpr int cols = dot_cols<unit>(rows), step = Element::step;
    alignas(64) typename Element::operand x[rows * dot_k / step];
    int64_t k = 0;
    for (; k + step <= n; k += step) {
        for (int m = 0; m < rows; m++)
            x[k / step * rows + m] = Element::activations(a.x[row + m] + begin + k);
    }
    if (k < n) {
        for (int m = 0; m < rows; m++)
            x[k / step * rows + m] = Element::activations_n(a.x[row + m] + begin + k, static_cast<int>(n - k));
    }
    int col = 0;
    for (; col + cols <= a.cols; col += cols)
        dot_block<unit, Element, rows, cols>(a, x, {row, col, begin, n, begin > 0});
    for (; col < a.cols; col++)
        dot_block<unit, Element, rows, 1>(a, x, {row, col, begin, n, begin > 0});
}

template <class unit, class Element> void dot(const gemm_dot_args & a) {
    if (a.rows <= dot_few_rows) return dot_few<unit, Element, dot_few_rows>(a);
    const int groups = (a.rows + dot_group_rows - 1) / dot_group_rows;
    for (int64_t begin = 0; begin < a.k; begin += dot_k) {
        const int64_t n = std::min(dot_k, a.k - begin);
        for (int g = 0, row = 0; g < groups; g++) {
            const int count = (a.rows - row) / (groups - g);
            dot_group<unit, Element, dot_group_rows>(a, row, count, begin, n);
            row += count;
        }
    }
}

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_GEMM_FLOAT_SIMD_H
