// Integer GEMM on AMX, written once over a `unit` of vectors (avx512vnni/unit.h; the tests have one of AVX2), with the
// formats of kernels/gemm_vnni.h and that file's bits: integers are exact, and floats come in the same order.
//
// Quants are unpacked to signed bytes in L1, the matrix unit leaves a tile's products there, and vectors scale and add
// them, two tiles at a time while the next two are multiplied. A scale of its own for each 32 k feeds the unit half of
// the k that it takes.
//
// Internal linkage, see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_AMX_GEMM_INT8_H
#define TILEBEAM_NPU_KERNELS_AMX_GEMM_INT8_H

#include <type_traits>

#include "kernels/amx/matrix_unit.h"
#include "kernels/gemm_vnni.h"

namespace tb::npu {
namespace {

constexpr int tiles_together = 2;

// Products of some tiles, and what they are to be multiplied by.
struct tile_products {
    alignas(64) int32_t dots[tiles_together][gemm_max_rows][gemm_panel];
    alignas(64) float scales[tiles_together][gemm_panel], minima[tiles_together][gemm_panel];
};

// A tile's quants as signed bytes, quad after quad: where they are, or in `buffer`.
template <class unit, class Format> const uint8_t * signed_quants(const uint8_t * tile, uint8_t * buffer) {
    if constexpr (std::is_base_of_v<format_q8<unit>, Format>) {
        return tile;
    } else {
        for (int i = 0; i < gemm_panel / unit::width; i++) {
            typename unit::ints w[8];
            Format::weights(tile, i, w);
#pragma GCC unroll 8
            for (int j = 0; j < 8; j++)
                unit::store(buffer + quad_bytes * j + column_bytes * unit::width * i,
                            Format::has_minima ? w[j] : unit::less_bytes(w[j], Format::offset));
        }
        return buffer;
    }
}

template <class unit, class Format>
void make_products(const gemm_int8_args & a, int64_t first, int n, tile_products & p) {
    alignas(64) uint8_t buffers[tiles_together][gemm_prepared_quants];
    const uint8_t * tile = a.panel + Format::bytes * static_cast<size_t>(first);
    const uint8_t * record = a.group + gemm_record_bytes(a.rows) * static_cast<size_t>(first);
    const uint8_t * weights[tiles_together];
    for (int i = 0; i < n; i++, tile += Format::bytes) {
        if constexpr (Format::streams) prefetch<Format::bytes, 24, _MM_HINT_T1>(tile);
        weights[i] = signed_quants<unit, Format>(tile, buffers[i]);
        for (int v = 0; v < gemm_panel / unit::width; v++) {
            unit::store_floats(p.scales[i] + unit::width * v, Format::scales(tile, v));
            if constexpr (Format::has_minima)
                unit::store_floats(p.minima[i] + unit::width * v, Format::minima(tile, v));
        }
    }
    for (int i = 0; i < n; i++, record += gemm_record_bytes(a.rows)) {
        matrix_unit::clear(a.rows);
        matrix_unit::add<true, true>(record, gemm_panel, weights[i], weights[i] + unit_row_bytes, quad_bytes, a.rows);
        matrix_unit::store(p.dots[i][0], p.dots[i][0] + unit_columns, a.rows);
    }
}

// Sums += products of `n` tiles whose records begin at `record`.
template <class unit, class Format, int n>
void scale_products(const tile_products & p, const uint8_t * record, int rows, float (*sums)[gemm_panel]) {
    for (int at = 0; at < gemm_panel; at += unit::width) {
        typename unit::floats scale[n], least[n];
#pragma GCC unroll 2
        for (int i = 0; i < n; i++) {
            scale[i] = unit::load_floats(p.scales[i] + at);
            least[i] = Format::has_minima ? unit::load_floats(p.minima[i] + at) : unit::zero();
        }
        for (int m = 0; m < rows; m++) {
            const uint8_t * factors = record + gemm_panel * rows + 4 * m;
#pragma GCC unroll 2
            for (int i = 0; i < n; i++, factors += gemm_record_bytes(rows))
                add_products<unit, Format>(sums[m] + at, unit::load_sums(p.dots[i][m] + at), scale[i], least[i],
                                           unit::broadcast(read_float(factors)), factors + 4 * rows);
        }
    }
}

template <class unit, class Format> void multiply_on_unit(const gemm_int8_args & a) {
    alignas(64) float sums[gemm_max_rows][gemm_panel];
    tile_products products[2];
    open_sums<unit>(a, sums);
    const matrix_unit tiles(a.rows, gemm_panel);
    const uint8_t * record = a.group; // of the tiles that are scaled next
    int at = 0, n = 0;                // where they are, and how many
    for (int64_t t = 0; t < a.k_tiles || n > 0; t += tiles_together) {
        const int next = static_cast<int>(std::clamp<int64_t>(a.k_tiles - t, 0, tiles_together));
        if (next > 0) make_products<unit, Format>(a, t, next, products[1 - at]);
        if (n == tiles_together) {
            scale_products<unit, Format, tiles_together>(products[at], record, a.rows, sums);
        } else if (n > 0) {
            scale_products<unit, Format, 1>(products[at], record, a.rows, sums);
        }
        record += gemm_record_bytes(a.rows) * static_cast<size_t>(n);
        at = 1 - at;
        n = next;
    }
    close_sums<unit>(a, sums);
}

template <class unit, class Format, gemm_format format> void by_rows(const gemm_int8_args & a) {
    (a.rows <= few_rows ? replaced[format] : multiply_on_unit<unit, Format>)(a);
}

// The offset stays, as few rows need it; the unit's weights are signed.
template <class unit, gemm_format format, class Format> void replace_kernel(gemm_kernels & k, const char * name) {
    replaced[format] = k.int8[format].run;
    k.int8[format] = {name, gemm_max_rows, k.int8[format].offset, by_rows<unit, Format, format>};
}

// The kernels of a table that has others of the same formats. NVFP4, with two scales for 32 k, is not among them.
template <class unit> void replace_int8_kernels(gemm_kernels & k) {
    replace_kernel<unit, gemm_q4, format_q4<unit>>(k, "gemm_q4c_32x32_amx");
    replace_kernel<unit, gemm_q8, format_q8<unit>>(k, "gemm_q8c_32x32_amx");
    replace_kernel<unit, gemm_iq4nl, format_iq4nl<unit>>(k, "gemm_nlc_32x32_amx");
    replace_kernel<unit, gemm_prepared, format_prepared<unit>>(k, "gemm_q8p_32x32_amx");
    replace_kernel<unit, gemm_q5_0, format_bits<unit, TB_Q5_0_COL>>(k, "gemm_q50c_32x32_amx");
    replace_kernel<unit, gemm_q4_1, format_bits<unit, TB_Q4_1_COL>>(k, "gemm_q41c_32x32_amx");
    replace_kernel<unit, gemm_q5_1, format_bits<unit, TB_Q5_1_COL>>(k, "gemm_q51c_32x32_amx");
    replace_kernel<unit, gemm_mxfp4, format_mxfp4<unit>>(k, "gemm_mx4c_32x32_amx");
    replace_kernel<unit, gemm_q1_0, format_few_bits<unit, TB_Q1_0_COL>>(k, "gemm_q10c_32x32_amx");
    replace_kernel<unit, gemm_q2_0, format_few_bits<unit, TB_Q2_0_COL>>(k, "gemm_q20c_32x32_amx");
}

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_AMX_GEMM_INT8_H
