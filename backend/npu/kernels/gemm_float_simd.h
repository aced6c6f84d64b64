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

template <class unit> struct element_f32 {
    static constexpr int size = 4;
    static typename unit::vec load(const uint8_t * p) { return unit::load(reinterpret_cast<const float *>(p)); }
    static typename unit::vec load_n(const uint8_t * p, int n) {
        return unit::load_n(reinterpret_cast<const float *>(p), n);
    }
};

template <class unit> struct element_f16 {
    static constexpr int size = 2;
    static typename unit::vec load(const uint8_t * p) { return unit::load(reinterpret_cast<const uint16_t *>(p)); }
    static typename unit::vec load_n(const uint8_t * p, int n) {
        return unit::load_n(reinterpret_cast<const uint16_t *>(p), n);
    }
};

template <class unit> struct element_bf16 {
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
    constexpr int steps = 4, width = unit::width, ahead = 4096;
    for (int col = 0; col < a.cols; col++) {
        const uint8_t * w = a.w + col * a.stride;
        vec sum[rows][steps];
#pragma GCC unroll 4
        for (int m = 0; m < rows; m++) {
#pragma GCC unroll 4
            for (int i = 0; i < steps; i++)
                sum[m][i] = unit::zero();
        }
        int64_t k = 0;
        for (; k + steps * width <= a.k; k += steps * width) {
#pragma GCC unroll 4
            for (int i = 0; i < steps; i++) {
                const uint8_t * p = w + (k + i * width) * Element::size;
                if (i * width * Element::size % 64 == 0) __builtin_prefetch(p + ahead);
                const vec v = Element::load(p);
#pragma GCC unroll 4
                for (int m = 0; m < rows; m++)
                    sum[m][i] = unit::fma(unit::load(a.x[m] + k + i * width), v, sum[m][i]);
            }
        }
        for (; k < a.k; k += width) {
            const int n = static_cast<int>(std::min<int64_t>(width, a.k - k));
            const vec v = Element::load_n(w + k * Element::size, n);
#pragma GCC unroll 4
            for (int m = 0; m < rows; m++)
                sum[m][0] = unit::fma(unit::load_n(a.x[m] + k, n), v, sum[m][0]);
        }
#pragma GCC unroll 4
        for (int m = 0; m < rows; m++) {
            a.out[m][col] = unit::sum(unit::add(unit::add(sum[m][0], sum[m][1]), unit::add(sum[m][2], sum[m][3])));
        }
    }
}

// A stretch of k: of a group of rows 24 KiB at most.
constexpr int64_t dot_k = 1024;

// Columns at a time beside so many rows: enough sums to hide the latency of additions, no more than there are registers
// for beside a vector of each column and one of activations.
template <class unit> constexpr int dot_cols(int rows) { return (unit::registers - 1) / (rows + 1) >= 4 ? 4 : 2; }
template <class unit> constexpr int dot_rows = 6;

// Elements [begin, begin + n) of columns `w` times those of the rows from `row` on; `add`: to what is there.
template <class unit, class Element, int rows, int cols>
void dot_block(const gemm_dot_args & a, const float * x, int row, int col, int64_t begin, int64_t n, bool add) {
    using vec = typename unit::vec;
    constexpr int width = unit::width, results = (rows * cols + width - 1) / width * width;
    vec sum[results];
#pragma GCC unroll 32
    for (int i = 0; i < results; i++)
        sum[i] = unit::zero();
    const uint8_t * w = a.w + col * a.stride + begin * Element::size;
    int64_t k = 0;
    for (; k + width <= n; k += width) {
        vec v[cols];
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++) {
            const uint8_t * p = w + c * a.stride + k * Element::size;
            v[c] = Element::load(p);
            // rows of weights are a few pages, too short for the hardware to follow: fetch the next columns'
            if (row == 0) __builtin_prefetch(p + cols * a.stride);
        }
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++) {
            const vec xm = unit::load(x + k * rows + m * width);
#pragma GCC unroll 4
            for (int c = 0; c < cols; c++)
                sum[m * cols + c] = unit::fma(xm, v[c], sum[m * cols + c]);
        }
    }
    if (k < n) {
        const int rest = static_cast<int>(n - k);
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++) {
            const vec v = Element::load_n(w + c * a.stride + k * Element::size, rest);
#pragma GCC unroll 8
            for (int m = 0; m < rows; m++)
                sum[m * cols + c] = unit::fma(unit::load(x + k * rows + m * width), v, sum[m * cols + c]);
        }
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
    if (add) {
        float before[results] = {};
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++)
            std::memcpy(before + m * cols, a.out[row + m] + col, cols * sizeof(float));
#pragma GCC unroll 32
        for (int i = 0; i < results; i++)
            total[i] += before[i];
    }
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
        std::memcpy(a.out[row + m] + col, total + m * cols, cols * sizeof(float));
}

template <class unit, class Element, int rows>
void dot_group(const gemm_dot_args & a, int row, int count, int64_t begin, int64_t n) {
    if (count != rows) {
        if constexpr (rows > dot_few_rows) dot_group<unit, Element, rows - 1>(a, row, count, begin, n);
        return;
    }
    constexpr int cols = dot_cols<unit>(rows), width = unit::width;
    alignas(64) float x[rows * dot_k];
    int64_t k = 0;
    for (; k + width <= n; k += width) {
        for (int m = 0; m < rows; m++)
            unit::store(x + k * rows + m * width, unit::load(a.x[row + m] + begin + k));
    }
    if (k < n) {
        for (int m = 0; m < rows; m++)
            unit::store(x + k * rows + m * width, unit::load_n(a.x[row + m] + begin + k, static_cast<int>(n - k)));
    }
    int col = 0;
    for (; col + cols <= a.cols; col += cols)
        dot_block<unit, Element, rows, cols>(a, x, row, col, begin, n, begin > 0);
    for (; col < a.cols; col++)
        dot_block<unit, Element, rows, 1>(a, x, row, col, begin, n, begin > 0);
}

template <class unit, class Element> void dot_rows_of(const gemm_dot_args & a) {
    if (a.rows <= dot_few_rows) return dot_few<unit, Element, dot_few_rows>(a);
    const int groups = (a.rows + dot_rows<unit> - 1) / dot_rows<unit>;
    const int64_t stretches = (a.k + dot_k - 1) / dot_k;
    for (int64_t s = 0; s < stretches; s++) {
        const int64_t begin = s * dot_k, n = std::min(dot_k, a.k - begin);
        for (int g = 0, row = 0; g < groups; g++) {
            const int count = (a.rows - row) / (groups - g);
            dot_group<unit, Element, dot_rows<unit>>(a, row, count, begin, n);
            row += count;
        }
    }
}

template <class unit> void dot(const gemm_dot_args & a) {
    if (a.type == TB_F32) {
        dot_rows_of<unit, element_f32<unit>>(a);
    } else if (a.type == TB_F16) {
        dot_rows_of<unit, element_f16<unit>>(a);
    } else {
        dot_rows_of<unit, element_bf16<unit>>(a);
    }
}

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_GEMM_FLOAT_SIMD_H
