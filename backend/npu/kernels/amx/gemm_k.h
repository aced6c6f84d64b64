// GEMM with types of 256 k on AMX: kernels/gemm_k.h with the matrix unit's products of whole blocks.
//
// Each 16 or 32 k have a scale of their own, and taking a tile's products out of the unit to scale them takes as long
// as vpdpbusd. So weights go in multiplied by their scales, in two bytes, a plane of low and one of high ones: the unit
// adds up all 256 k by itself, 64 at a time, and its two sums are put together at the end. All of it is integers, as in
// kernels/gemm_k.h, and has the same bits. Internal linkage, see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_AMX_GEMM_K_H
#define TILEBEAM_NPU_KERNELS_AMX_GEMM_K_H

#include "kernels/amx/matrix_unit.h"
#include "kernels/gemm_k.h"

namespace tb::npu {
namespace {

constexpr int unit_k = 64; // that the unit takes at a time

// What formats are on the unit: weights are signed, and have their offset taken out.
template <class unit> struct k_signed : unit {
    static constexpr bool signed_weights = true, starts = true;
};

// Weights times their scales. Weights of at most 31 times scales of at most 127, both positive: the scale's low three
// bits, and its others; where scales have four bits and weights two, a byte has the product. Others: the product's low
// byte, which is positive, and its high one.
template <class Format> struct k_planes {
    static constexpr bool small = Format::minima && Format::most == 3 && Format::scales == 2; // Q2_K
    static constexpr bool is_signed = !Format::minima; // the last one; the low one never is
    static constexpr int n = small ? 1 : 2, bits = Format::minima ? 3 : 8;
};

// Of a block: 64 k of 16 columns at a time, in quads; the first 16 columns, then the others.
constexpr int k_steps = TB_K_BLOCK / unit_k, k_block_steps = k_steps * gemm_panel / unit_columns;
template <class Format> struct k_weights {
    alignas(64) uint8_t at[k_block_steps][k_planes<Format>::n][unit_k * unit_columns];
};

// The next blocks of a panel on their way to L2, a few lines at a time: more than that wait for each other, and the
// hardware follows a stream to the end of its page only.
template <class Format> struct k_stream {
    const uint8_t * next;
    size_t piece;

    k_stream(const uint8_t * panel, int times)
        : next(panel + 2 * Format::bytes), piece((Format::bytes / static_cast<size_t>(times) + 63) / 64 * 64) {}
    void fetch() {
        for (size_t at = 0; at < piece; at += 64)
            __builtin_prefetch(next + at, 0, 2);
        next += piece;
    }
};

template <class unit, class Format>
void k_fill_step(const uint8_t * panel, const uint8_t * scales, int step, k_weights<Format> & w) {
    using planes = k_planes<Format>;
    constexpr int quads = 8 / Format::scales;
    const int half = step / k_steps, first = step % k_steps * (unit_k / gemm_panel);
    uint8_t *low = w.at[step][0], *high = w.at[step][planes::n - 1];
    for (int t = first; t < first + unit_k / gemm_panel; t++) {
        const Format tile(panel, t);
        for (int i = half * unit_columns / unit::width; i < (half + 1) * unit_columns / unit::width; i++) {
            const int column = unit::width * i - unit_columns * half;
#pragma GCC unroll 2
            for (int sub = 0; sub < Format::scales; sub++) {
                const auto scale = unit::template twice<!Format::minima>(
                    scales + gemm_panel * (Format::scales * t + sub) + unit::width * i);
                const auto least = unit::masked(scale, 7), most = unit::shifted(scale, -3);
#pragma GCC unroll 8
                for (int j = quads * sub; j < quads * (sub + 1); j++) {
                    const int at = unit_row_bytes * (8 * (t - first) + j) + column_bytes * column;
                    const auto v = tile.weights(j, i);
                    if constexpr (planes::small) {
                        unit::store(low + at, unit::products16(v, scale));
                    } else if constexpr (Format::minima) {
                        unit::store(low + at, unit::products16(v, least));
                        unit::store(high + at, unit::products16(v, most));
                    } else {
                        const auto x = Format::offset ? unit::less_bytes(v, Format::offset) : v;
                        const auto even = unit::products16(unit::widened16(unit::shifted(x, 8)), scale);
                        const auto odd = unit::products16(unit::widened16(x), scale);
                        unit::store(low + at, unit::bytes_of_both(even, unit::shifted(odd, 8)));
                        unit::store(high + at, unit::bytes_of_both(unit::shifted(even, -8), odd));
                    }
                }
            }
        }
    }
}

// The sums of `tile_rows` rows' products with a block.
template <class unit, class Format>
void k_sums_on_unit(const k_weights<Format> & w, const uint8_t * q, int tile_rows, int32_t (*sums)[gemm_panel],
                    k_stream<Format> & stream) {
    using planes = k_planes<Format>;
    alignas(64) int32_t high[gemm_max_rows][gemm_panel];
    for (int i = 0; i < k_block_steps; i++) {
        if (i % k_steps == 0) matrix_unit::clear(tile_rows);
        if constexpr (planes::n == 1) {
            matrix_unit::add_first(q + i % k_steps * unit_k, TB_K_BLOCK, w.at[i][0], tile_rows);
        } else {
            matrix_unit::add<false, planes::is_signed>(q + i % k_steps * unit_k, TB_K_BLOCK, w.at[i][0], w.at[i][1],
                                                       unit_row_bytes, tile_rows);
        }
        stream.fetch();
        const int column = i / k_steps * unit_columns;
        if (i % k_steps == k_steps - 1) matrix_unit::store(sums[0] + column, high[0] + column, tile_rows);
    }
    for (int m = 0; m < tile_rows && planes::n == 2; m++) {
#pragma GCC unroll 4
        for (int i = 0; i < gemm_panel; i += unit::width) {
            const auto most = unit::template shifted_sums<planes::bits>(unit::load_sums(high[m] + i));
            unit::store_sums(sums[m] + i, unit::add(unit::load_sums(sums[m] + i), most));
        }
    }
}

// A block's weights are made once for all rows: a load of tiles waits for all that was stored before it.
template <class unit, class Format> void multiply_k_on_unit(const gemm_int8_args & a) {
    alignas(64) float results[unit_group_rows][gemm_panel];
    alignas(64) int32_t sums[gemm_max_rows][gemm_panel];
    alignas(64) uint8_t unpacked[k_before + 1024];
    k_weights<Format> w;
    open_results(a, results);
    const int tile_rows = rows_of_unit(a.rows);
    const matrix_unit tiles(tile_rows, unit_k);
    const uint8_t * panel = a.panel;
    for (int64_t t = 0; t < a.k_tiles; t += gemm_k_tiles, panel += Format::bytes) {
        const k_record r(a.group + gemm_k_record_bytes(a.rows) * static_cast<size_t>(t / gemm_k_tiles), a.rows);
        const k_factors s = Format::unpack(panel + Format::fields, unpacked + k_before);
        k_stream<Format> stream(panel, k_block_steps * (1 + (a.rows + tile_rows - 1) / tile_rows));
        for (int i = 0; i < k_block_steps; i++) {
            stream.fetch();
            k_fill_step<unit>(panel, s.scales, i, w);
        }
        for (int done = 0; done < a.rows; done += tile_rows) {
            const int first = std::min(done, a.rows - tile_rows);
            k_sums_on_unit<unit>(w, r.q + TB_K_BLOCK * first, tile_rows, sums, stream);
            k_finish<unit, Format>(s.factors, panel + Format::halves, r.from(done), first + tile_rows - done,
                                   sums + (done - first), results + done);
        }
    }
    close_results(a, results);
}

template <gemm_format format, class unit, class Format> void k_by_rows(const gemm_int8_args & a) {
    constexpr int few = Format::minima ? 8 : few_rows; // whose weights are made with fewer instructions
    (a.rows <= few ? replaced[format] : multiply_k_on_unit<unit, Format>)(a);
}

// The kernels of a table that has others of the same formats.
struct k_runs_by_rows {
    template <class unit, gemm_format format, class Format> static auto run() {
        return k_by_rows<format, unit, Format>;
    }
};

template <class unit> void replace_k_kernels(gemm_kernels & k) {
    for (int f = gemm_q4_k; f < gemm_format_count; f++)
        replaced[f] = k.int8[f].run;
    fill_k_kernels<k_signed<unit>, k_runs_by_rows>(k, TILEBEAM_K_NAMES("128x32_amx"));
    for (int f = gemm_q4_k; f < gemm_format_count; f++)
        k.int8[f].rows = unit_group_rows;
}

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_AMX_GEMM_K_H
