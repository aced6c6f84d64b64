// Integer GEMM for sets with vpdpbusd, written once over the names of a `unit` (avx512vnni/unit.h, avxvnni/unit.h):
// vectors of unit::width columns, each 32-bit lane four k of one column.
//
// direct    few rows: a tile's quants are unpacked in registers and meet all rows of the group. Up to unit::wide_rows
//           rows take several vectors in one pass over k, so that the panel streams through once.
// prepared  tiles that were unpacked to bytes before: rows x 2 vectors of integer sums and as many of float sums, an
//           activation loaded once for both vectors.
// coarse    the same with one scale per 256 k: only integer sums stay in registers, so there are twice as many rows.
//
// vpdpbusd shares its ports with multiplications, and each 32 k with a scale of their own cost two of those beside
// eight dot products: 80 % of the peak is the most that `direct` and `prepared` can reach; `coarse` 97 %.
// The tile shapes follow from the registers: gemm_shape.h. Internal linkage, see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_GEMM_VNNI_H
#define TILEBEAM_NPU_KERNELS_GEMM_VNNI_H

#include <algorithm>
#include <cstring>

#include "kernels/gemm.h"
#include "kernels/gemm_shape.h"

namespace tb::npu {
namespace {

constexpr int column_bytes = 4; // of one column in a quad
constexpr int quad_bytes = gemm_panel * column_bytes;

int32_t read_int(const uint8_t * p) {
    int32_t v;
    std::memcpy(&v, p, 4);
    return v;
}

float read_float(const uint8_t * p) {
    float v;
    std::memcpy(&v, p, 4);
    return v;
}

// Vector `i` of the scales after a tile's quants.
template <class unit> typename unit::floats half_scales(const uint8_t * p, int i) {
    return unit::load_halves(p + 2 * unit::width * i);
}

template <class unit> struct format_q4 {
    static constexpr size_t bytes = 576;
    static constexpr int32_t offset = 8;
    static void weights(const uint8_t * tile, int i, typename unit::ints * w) {
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) {
            const typename unit::ints v = unit::load(tile + quad_bytes * c + column_bytes * unit::width * i);
            w[2 * c] = unit::low_nibbles(v);
            w[2 * c + 1] = unit::high_nibbles(v);
        }
    }
    static typename unit::floats scales(const uint8_t * tile, int i) { return half_scales<unit>(tile + 512, i); }
};

template <class unit> struct format_iq4nl {
    static constexpr size_t bytes = 576;
    static constexpr int32_t offset = 128;
    static void weights(const uint8_t * tile, int i, typename unit::ints * w) {
        // -127, -104, -83, .. 113, each plus 128
        const typename unit::ints values =
            unit::table(1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241);
        format_q4<unit>::weights(tile, i, w);
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            w[j] = unit::look_up(values, w[j]);
    }
    static typename unit::floats scales(const uint8_t * tile, int i) { return half_scales<unit>(tile + 512, i); }
};

template <class unit> struct format_q8 {
    static constexpr size_t bytes = 1088;
    static constexpr int32_t offset = 128;
    static void weights(const uint8_t * tile, int i, typename unit::ints * w) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            w[j] = unit::flip_signs(unit::load(tile + quad_bytes * j + column_bytes * unit::width * i));
    }
    static typename unit::floats scales(const uint8_t * tile, int i) { return half_scales<unit>(tile + 1024, i); }
};

// The quants of a set whose bias is 0.
template <class unit> struct format_prepared {
    static constexpr size_t bytes = gemm_prepared_bytes;
    static constexpr int32_t offset = 128;
    static void weights(const uint8_t * tile, int i, typename unit::ints * w) { format_q8<unit>::weights(tile, i, w); }
    static typename unit::floats scales(const uint8_t * tile, int i) {
        return unit::load_floats(reinterpret_cast<const float *>(tile + 1024) + unit::width * i);
    }
};

// ---- direct

// Vectors [first, first + vectors) of the panel.
template <class unit, class Format, int rows, int vectors> void direct_pass(const gemm_int8_args & a, int first) {
    typename unit::floats acc[rows][vectors];
#pragma GCC unroll 16
    for (int m = 0; m < rows; m++) {
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) {
            acc[m][i] = a.add ? unit::load_floats(a.out[m] + unit::width * (first + i)) : unit::zero();
        }
    }
    const uint8_t * tile = a.panel;
    const uint8_t * record = a.group;
    for (int64_t t = 0; t < a.k_tiles; t++, tile += Format::bytes, record += gemm_record_bytes(rows)) {
        if (first == 0) unit::template prefetch<Format::bytes>(tile);
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) {
            // Activations are memory operands again for the next vector: kept in registers they would push others out.
            if (rows > 3) asm volatile("" ::: "memory");
            typename unit::ints w[8];
            Format::weights(tile, first + i, w);
            const typename unit::floats scale = Format::scales(tile, first + i);
#pragma GCC unroll 16
            for (int m = 0; m < rows; m++) {
                typename unit::ints dot = unit::broadcast(read_int(record + 36 * rows + 4 * m));
#pragma GCC unroll 8
                for (int j = 0; j < 8; j++) {
                    unit::dot_memory(dot, w[j], record + 32 * m + 4 * j);
                }
                const typename unit::floats s =
                    unit::mul(scale, unit::broadcast(read_float(record + 32 * rows + 4 * m)));
                acc[m][i] = unit::fma(unit::to_floats(dot), s, acc[m][i]);
            }
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < rows; m++) {
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++)
            unit::store_floats(a.out[m] + unit::width * (first + i), acc[m][i]);
    }
}

template <class unit, class Format, int rows> void direct(const gemm_int8_args & a) {
    if (a.rows != rows) {
        if constexpr (rows > 1) direct<unit, Format, rows - 1>(a);
    } else {
        constexpr int vectors = unit::vectors_of_direct(rows);
        for (int i = 0; i < gemm_panel / unit::width; i += vectors)
            direct_pass<unit, Format, rows, vectors>(a, i);
    }
}

// ---- prepared

template <class unit, int rows> void prepared_pass(const gemm_int8_args & a, int first) {
    constexpr int vectors = unit::prepared.vectors;
    typename unit::floats acc[rows][vectors];
#pragma GCC unroll 16
    for (int m = 0; m < rows; m++) {
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) {
            acc[m][i] = a.add ? unit::load_floats(a.out[m] + unit::width * (first + i)) : unit::zero();
        }
    }
    const uint8_t * tile = a.panel + column_bytes * unit::width * first;
    const uint8_t * record = a.group;
    for (int64_t t = 0; t < a.k_tiles; t++, tile += gemm_prepared_bytes, record += gemm_record_bytes(rows)) {
        typename unit::ints dot[rows][vectors];
#pragma GCC unroll 16
        for (int m = 0; m < rows; m++) {
            const typename unit::ints start = unit::broadcast(read_int(record + 36 * rows + 4 * m));
#pragma GCC unroll 4
            for (int i = 0; i < vectors; i++)
                dot[m][i] = start;
        }
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            typename unit::ints w[vectors];
#pragma GCC unroll 4
            for (int i = 0; i < vectors; i++)
                w[i] = unit::load(tile + quad_bytes * j + column_bytes * unit::width * i);
#pragma GCC unroll 16
            for (int m = 0; m < rows; m++) {
                const typename unit::ints x = unit::broadcast(read_int(record + 32 * m + 4 * j));
#pragma GCC unroll 4
                for (int i = 0; i < vectors; i++)
                    unit::dot(dot[m][i], w[i], x);
            }
        }
        typename unit::floats scale[vectors];
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++)
            scale[i] = unit::load_floats(reinterpret_cast<const float *>(tile + 1024) + unit::width * i);
#pragma GCC unroll 16
        for (int m = 0; m < rows; m++) {
            const typename unit::floats s = unit::broadcast(read_float(record + 32 * rows + 4 * m));
#pragma GCC unroll 4
            for (int i = 0; i < vectors; i++)
                acc[m][i] = unit::fma(unit::to_floats(dot[m][i]), unit::mul(scale[i], s), acc[m][i]);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < rows; m++) {
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++)
            unit::store_floats(a.out[m] + unit::width * (first + i), acc[m][i]);
    }
}

template <class unit, int rows> void prepared(const gemm_int8_args & a) {
    if (a.rows != rows) {
        if constexpr (rows > 1) prepared<unit, rows - 1>(a);
    } else {
        for (int i = 0; i < gemm_panel / unit::width; i += unit::prepared.vectors)
            prepared_pass<unit, rows>(a, i);
    }
}

// ---- coarse

// One block of `quads` quads, added to or written to `out`.
template <class unit, int rows>
void coarse_block(const uint8_t * weights, const float * scales, const uint8_t * record, int quads, bool add,
                  float * const * out, int first) {
    constexpr int vectors = unit::coarse.vectors;
    const uint8_t * factors = record + rows * gemm_coarse_k;
    typename unit::ints dot[rows][vectors];
#pragma GCC unroll 16
    for (int m = 0; m < rows; m++) {
        const typename unit::ints start = unit::broadcast(read_int(factors + 4 * (rows + m)));
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++)
            dot[m][i] = start;
    }
    for (int j = 0; j < quads; j++, weights += quad_bytes, record += 4) {
        typename unit::ints w[vectors];
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++)
            w[i] = unit::load(weights + column_bytes * unit::width * (first + i));
#pragma GCC unroll 16
        for (int m = 0; m < rows; m++) {
            const typename unit::ints x = unit::broadcast(read_int(record + gemm_coarse_k * m));
#pragma GCC unroll 4
            for (int i = 0; i < vectors; i++)
                unit::dot(dot[m][i], w[i], x);
        }
    }
    typename unit::floats scale[vectors];
#pragma GCC unroll 4
    for (int i = 0; i < vectors; i++)
        scale[i] = unit::load_floats(scales + unit::width * (first + i));
#pragma GCC unroll 16
    for (int m = 0; m < rows; m++) {
        const typename unit::floats s = unit::broadcast(read_float(factors + 4 * m));
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) {
            float * to = out[m] + unit::width * (first + i);
            const typename unit::floats product = unit::mul(scale[i], s), sum = unit::to_floats(dot[m][i]);
            unit::store_floats(to, add ? unit::fma(sum, product, unit::load_floats(to)) : unit::mul(sum, product));
        }
    }
}

template <class unit, int rows> void coarse(const gemm_int8_args & a) {
    if (a.rows != rows) {
        if constexpr (rows > 1) coarse<unit, rows - 1>(a);
    } else {
        const uint8_t * panel = a.panel;
        const uint8_t * record = a.group;
        bool add = a.add;
        for (int64_t t = 0; t < a.k_tiles; t += gemm_coarse_tiles) {
            const int quads = 8 * static_cast<int>(std::min<int64_t>(gemm_coarse_tiles, a.k_tiles - t));
            const float * scales = reinterpret_cast<const float *>(panel + gemm_coarse_k * gemm_panel);
            for (int i = 0; i < gemm_panel / unit::width; i += unit::coarse.vectors)
                coarse_block<unit, rows>(panel, scales, record, quads, add, a.out, i);
            panel += gemm_coarse_panel_bytes;
            record += gemm_coarse_record_bytes(rows);
            add = true;
        }
    }
}

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_GEMM_VNNI_H
