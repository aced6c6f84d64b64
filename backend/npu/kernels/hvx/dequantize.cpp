// Dequantization to FP16 tiles; see dequantize.h for the method.
#include "kernels/hvx/dequantize.h"

#include "kernels/hvx/multiply.h"
#include "kernels/tiles.h"
#include "tilebeam/types.h"

namespace tb::npu::hvx {

namespace {

constexpr uint32_t tile_halves = 1024;
constexpr uint32_t scale_bytes = TB_HALF_SCALES;
constexpr uint32_t quants_8bit = TB_QUANTS(8);

struct alignas(128) table {
    uint32_t at[32];
};

// Entry i in word i, both halves. vlut16 without matching takes four bits of an index, so that no nibble needs masking.
template <class T> constexpr table table_of(const T (&values)[16]) {
    table t{};
    for (int i = 0; i < 32; i++) {
        const uint32_t bits = quant_bits(values[i % 16]);
        t.at[i] = bits << 16 | bits;
    }
    return t;
}

constexpr int q4_values[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
constexpr table q4_table = table_of(q4_values);
constexpr table iq4nl_table = table_of(iq4nl_values);

HVX_Vector constant(const table & t) { return load_aligned(t.at); }

// The tile's 32 scales, in the upper half of a vector that starts inside its quants: nothing past a tile is read.
HVX_Vector scales_of(const uint8_t * tile, uint32_t quants) { return load(tile + quants - scale_bytes); }

// Controls that make vdelta, seven stages of exchanges over distances 64 to 1, put byte source(i) at place i. Each
// place of each stage has one bit: a set of moves is possible if no two need it to differ.
template <class F> constexpr byte_table delta_controls(F source) {
    byte_table t{};
    for (int i = 0; i < 128; i++) {
        int place = i;
        for (int distance = 1; distance < 128; distance *= 2) { // backwards, from the result to the source
            if (((place ^ source(i)) & distance) != 0) {
                t.at[place] = static_cast<uint8_t>(t.at[place] | distance);
                place ^= distance;
            }
        }
    }
    return t;
}

template <class F> constexpr bool routes(const byte_table & t, F source) {
    byte_table now{};
    for (int i = 0; i < 128; i++)
        now.at[i] = static_cast<uint8_t>(i);
    for (int distance = 64; distance > 0; distance /= 2) {
        byte_table next{};
        for (int i = 0; i < 128; i++)
            next.at[i] = now.at[(t.at[i] & distance) != 0 ? i ^ distance : i];
        now = next;
    }
    for (int i = 0; i < 128; i++) {
        if (now.at[i] != source(i)) return false;
    }
    return true;
}

// Where the scale of each byte of a row pair lies, in the vector of scales_of. vdelta needs the permute unit only,
// while look-ups and conversions wait for the shift unit.
constexpr int column_source(int i) { return 64 + 2 * (i / 4) + (i & 1); } // s[n] at 2n and 2n + 1
constexpr byte_table column_route = delta_controls(column_source);
static_assert(routes(column_route, column_source), "one vdelta is enough");

template <int pair> constexpr int group_source(int i) { return 64 + 2 * (2 * pair + i / 64) + (i & 1); }
template <int pair> constexpr byte_table group_route() {
    constexpr byte_table t = delta_controls(group_source<pair>);
    static_assert(routes(t, group_source<pair>), "one vdelta is enough");
    return t;
}

constexpr byte_table group_routes[16] = {group_route<0>(),  group_route<1>(),  group_route<2>(),  group_route<3>(),
                                         group_route<4>(),  group_route<5>(),  group_route<6>(),  group_route<7>(),
                                         group_route<8>(),  group_route<9>(),  group_route<10>(), group_route<11>(),
                                         group_route<12>(), group_route<13>(), group_route<14>(), group_route<15>()};

// `column`: for every row pair. `tile`: for this one.
scales column_scales(HVX_Vector s) { return scales(Q6_V_vdelta_VV(s, load_aligned(column_route.at))); }
scales group_scales(HVX_Vector s, int pair) { return scales(Q6_V_vdelta_VV(s, load_aligned(group_routes[pair].at))); }

// `words16`: 0 for the table in words 0..15, 1 for the one in words 16..31.
HVX_VectorPair look_up(HVX_Vector indices, HVX_Vector values, int words16 = 0) {
    return Q6_Wh_vlut16_VbVhR_nomatch(indices, values, words16);
}

void store_pair(uint16_t * out, HVX_Vector first, HVX_Vector second) {
    store_aligned(out, first);
    store_aligned(out + 64, second);
}

// Two row pairs out of 128 bytes.
#if TILEBEAM_HVX_FLOAT
// 1024 + (byte + 128) is FP16 0x6400 | byte ^ 0x80; the difference to 1152 is exact in qf16
struct widened {
    HVX_VectorPair biased;
    explicit widened(HVX_Vector bytes) : biased(Q6_Wuh_vzxt_Vub(Q6_V_vxor_VV(bytes, words(0x80808080)))) {}
    static HVX_Vector value(HVX_Vector v) {
        return Q6_Vqf16_vsub_VhfVhf(Q6_V_vor_VV(v, halves(0x6400)), halves(0x6480));
    }
    HVX_Vector first(const scales & s) const { return s.times_qf16(value(Q6_V_lo_W(biased))); }
    HVX_Vector second(const scales & s) const { return s.times_qf16(value(Q6_V_hi_W(biased))); }
};
#else
struct widened {
    HVX_VectorPair values;
    explicit widened(HVX_Vector bytes) : values(Q6_Wh_vsxt_Vb(bytes)) {}
    HVX_Vector first(const scales & s) const { return s.times(Q6_V_lo_W(values)); }
    HVX_Vector second(const scales & s) const { return s.times(Q6_V_hi_W(values)); }
};
#endif

// A 4-bit tile in registers. Loops load the next tile while they work on one, or each iteration would begin with
// packets that only load; the last one loads itself again.
struct tile_4bit {
    static constexpr uint32_t quants = TB_QUANTS(4);
    HVX_Vector chunk[4], scales;
    explicit tile_4bit(const uint8_t * p)
        : chunk{load(p), load(p + 128), load(p + 256), load(p + 384)}, scales(scales_of(p, quants)) {}
};

// f(tile, out) for each tile.
template <class F>
__attribute__((always_inline)) inline void each_4bit(const uint8_t * panel, uint32_t tiles, uint16_t * __restrict out,
                                                     F && f) {
    if (tiles == 0) return;
    constexpr uint32_t bytes = tile_4bit::quants + scale_bytes;
    const uint8_t * last = panel + (tiles - 1) * bytes;
    tile_4bit next(panel);
    for (; tiles != 0; tiles--, out += tile_halves) {
        const tile_4bit now = next;
        panel = panel == last ? panel : panel + bytes;
        next = tile_4bit(panel);
        f(now, out);
    }
}

__attribute__((always_inline)) inline void column_4bit(const uint8_t * panel, uint32_t tiles, uint16_t * __restrict out,
                                                       const table & t) {
    const HVX_Vector values = constant(t);
    each_4bit(panel, tiles, out, [&](const tile_4bit & tile, uint16_t * __restrict to) {
        const scales s = column_scales(tile.scales);
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++, to += 256) {
            const HVX_VectorPair low = look_up(tile.chunk[c], values);
            const HVX_VectorPair high = look_up(Q6_Vuh_vlsr_VuhR(tile.chunk[c], 4), values);
            store_pair(to, s.times(Q6_V_lo_W(low)), s.times(Q6_V_hi_W(low)));
            store_pair(to + 128, s.times(Q6_V_lo_W(high)), s.times(Q6_V_hi_W(high)));
        }
    });
}

#if !TILEBEAM_HVX_FLOAT

// s[g] in word g, as a table for vlut16.
HVX_Vector scale_table(HVX_Vector s) { return Q6_V_hi_W(Q6_Wuw_vunpack_Vuh(s)); }

// Table j of four in one vector, as vlut16 picks it: words 0..15 or 16..31 (j & 1), even or odd halves (j >> 1).
// Indices that build it for scales 8c .. 8c + 3 (even bytes) and 8c + 4 .. 8c + 7 (odd bytes).
constexpr table quadruple_indices(int c) {
    table t{};
    for (int word = 0; word < 32; word++) {
        const uint32_t j = static_cast<uint32_t>(8 * c + word / 16);
        t.at[word] = j | (j + 4) << 8 | (j + 2) << 16 | (j + 6) << 24;
    }
    return t;
}

constexpr table quadruple[4] = {quadruple_indices(0), quadruple_indices(1), quadruple_indices(2), quadruple_indices(3)};

// In the upper nibble of an index: which of the four tables belongs to its result.
constexpr table table_numbers() {
    table t{};
    for (int word = 0; word < 32; word++)
        t.at[word] = word < 16 ? 0x20002000u : 0x30103010u;
    return t;
}

constexpr table numbers = table_numbers();

HVX_VectorPair look_up_in_four(HVX_Vector indices, HVX_Vector tables) {
    const HVX_Vector i = Q6_V_vor_VV(Q6_V_vand_VV(indices, words(0x0f0f0f0f)), constant(numbers));
    HVX_VectorPair r = Q6_Wh_vlut16_VbVhR(i, tables, 0);
    r = Q6_Wh_vlut16or_WhVbVhR(r, i, tables, 1);
    r = Q6_Wh_vlut16or_WhVbVhR(r, i, tables, 2);
    return Q6_Wh_vlut16or_WhVbVhR(r, i, tables, 3);
}

#endif

__attribute__((always_inline)) inline void group_4bit(const uint8_t * panel, uint32_t tiles, uint16_t * __restrict out,
                                                      const table & t) {
    const HVX_Vector values = constant(t);
    each_4bit(panel, tiles, out, [&](const tile_4bit & tile, uint16_t * __restrict to) {
#if !TILEBEAM_HVX_FLOAT
        const HVX_Vector all = scale_table(tile.scales);
#endif
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++, to += 256) {
            const HVX_Vector upper = Q6_Vuh_vlsr_VuhR(tile.chunk[c], 4);
#if TILEBEAM_HVX_FLOAT
            const HVX_VectorPair low = look_up(tile.chunk[c], values), high = look_up(upper, values);
            const HVX_Vector & d = tile.scales;
            store_pair(to, group_scales(d, 4 * c).times(Q6_V_lo_W(low)),
                       group_scales(d, 4 * c + 1).times(Q6_V_hi_W(low)));
            store_pair(to + 128, group_scales(d, 4 * c + 2).times(Q6_V_lo_W(high)),
                       group_scales(d, 4 * c + 3).times(Q6_V_hi_W(high)));
#else
            const HVX_VectorPair s = look_up(constant(quadruple[c]), all, c / 2);
            const HVX_VectorPair low = look_up_in_four(tile.chunk[c], scales(Q6_V_lo_W(s)).times(values));
            const HVX_VectorPair high = look_up_in_four(upper, scales(Q6_V_hi_W(s)).times(values));
            store_pair(to, Q6_V_lo_W(low), Q6_V_hi_W(low));
            store_pair(to + 128, Q6_V_lo_W(high), Q6_V_hi_W(high));
#endif
        }
    });
}

} // namespace

void dequantize_q4_column(const uint8_t * panel, uint32_t tiles, uint16_t * __restrict out) {
    column_4bit(panel, tiles, out, q4_table);
}

void dequantize_iq4nl_column(const uint8_t * panel, uint32_t tiles, uint16_t * __restrict out) {
    column_4bit(panel, tiles, out, iq4nl_table);
}

void dequantize_q8_column(const uint8_t * panel, uint32_t tiles, uint16_t * __restrict out) {
    for (; tiles != 0; tiles--, panel += quants_8bit + scale_bytes, out += tile_halves) {
        const scales s = column_scales(scales_of(panel, quants_8bit));
#pragma GCC unroll 8
        for (int c = 0; c < 8; c++) {
            const widened w(load(panel + 128 * c));
            store_pair(out + 128 * c, w.first(s), w.second(s));
        }
    }
}

void dequantize_q4_tile(const uint8_t * panel, uint32_t tiles, uint16_t * __restrict out) {
    group_4bit(panel, tiles, out, q4_table);
}

void dequantize_iq4nl_tile(const uint8_t * panel, uint32_t tiles, uint16_t * __restrict out) {
    group_4bit(panel, tiles, out, iq4nl_table);
}

void dequantize_q8_tile(const uint8_t * panel, uint32_t tiles, uint16_t * __restrict out) {
    for (; tiles != 0; tiles--, panel += quants_8bit + scale_bytes, out += tile_halves) {
        const HVX_Vector d = scales_of(panel, quants_8bit);
#pragma GCC unroll 8
        for (int c = 0; c < 8; c++) {
            const widened w(load(panel + 128 * c));
            store_pair(out + 128 * c, w.first(group_scales(d, 2 * c)), w.second(group_scales(d, 2 * c + 1)));
        }
    }
}

dequantize_function dequantize_of(uint32_t type) {
    switch (type) {
    case TB_Q4_0_COL:
        return dequantize_q4_column;
    case TB_IQ4_NL_COL:
        return dequantize_iq4nl_column;
    case TB_Q8_0_COL:
        return dequantize_q8_column;
    case TB_Q4_0_TILE:
        return dequantize_q4_tile;
    case TB_IQ4_NL_TILE:
        return dequantize_iq4nl_tile;
    case TB_Q8_0_TILE:
        return dequantize_q8_tile;
    default:
        return nullptr;
    }
}

} // namespace tb::npu::hvx
