// Random operands for the programs of this folder that compare GEMM kernels.
#ifndef TILEBEAM_TESTS_GEMM_DATA_H
#define TILEBEAM_TESTS_GEMM_DATA_H

#include <cstring>
#include <random>
#include <vector>

#include "kernels/kernels.h"

namespace tb::npu {
namespace {

std::mt19937 rng(1);

float uniform() { return std::uniform_real_distribution<float>(-1, 1)(rng); }

std::vector<float> floats(size_t n) {
    std::vector<float> v(n);
    for (float & x : v)
        x = uniform();
    return v;
}

// Random tiles: any quants, `scales` scales (and minima) in 2^-4 .. 2^-3 of either sign.
std::vector<uint8_t> tiles(size_t quants, int64_t n, bool float_scales, int scales = 32) {
    const size_t bytes = quants + static_cast<size_t>(scales) * (float_scales ? sizeof(float) : sizeof(uint16_t));
    std::vector<uint8_t> v(bytes * static_cast<size_t>(n));
    for (uint8_t & x : v)
        x = static_cast<uint8_t>(rng());
    for (int64_t t = 0; t < n; t++) {
        uint8_t * scale = v.data() + static_cast<size_t>(t) * bytes + quants;
        for (int i = 0; i < scales; i++) {
            const float wide = uniform() / 8;
            const uint16_t half = static_cast<uint16_t>(0x2c00 | (rng() & 0x83ff));
            if (float_scales) {
                std::memcpy(scale + 4 * i, &wide, 4);
            } else {
                std::memcpy(scale + 2 * i, &half, 2);
            }
        }
    }
    return v;
}

struct result {
    explicit result(int rows) : data(static_cast<size_t>(rows) * 32, 0.5f) {
        for (int m = 0; m < rows; m++)
            at[m] = data.data() + 32 * m;
    }
    std::vector<float> data;
    float * at[gemm_max_rows];
};

// Formats of one scale per column and 32 k, and types of their tiles; of gemm_prepared there is none.
struct column_kind {
    gemm_format format;
    uint32_t type;
};

constexpr column_kind column_kinds[] = {
    {gemm_q4, TB_Q4_0_COL},   {gemm_q8, TB_Q8_0_COL},   {gemm_iq4nl, TB_IQ4_NL_COL}, {gemm_q5_0, TB_Q5_0_COL},
    {gemm_q4_1, TB_Q4_1_COL}, {gemm_q5_1, TB_Q5_1_COL}, {gemm_mxfp4, TB_MXFP4_COL},  {gemm_prepared, TB_TYPE_COUNT}};

// A random panel of n tiles.
std::vector<uint8_t> column_panel(const column_kind & kind, int64_t n) {
    if (kind.format == gemm_prepared) return tiles(gemm_prepared_quants, n, true);
    const tile_traits tile = tile_of(kind.type);
    if (kind.format != gemm_mxfp4) return tiles(tile.quants, n, false, tile.minima ? 64 : 32);
    auto panel = tiles(tile.quants, n, false, 16); // as many bytes as its 32 exponents
    for (size_t i = 0; i < static_cast<size_t>(n) * gemm_panel; i++)
        panel[i / gemm_panel * tile.bytes + tile.quants + i % gemm_panel] = static_cast<uint8_t>(118 + rng() % 8);
    return panel;
}

struct k_kind {
    gemm_format format;
    size_t bytes, halves; // of a block panel, and how many of its last are FP16 scales
};

constexpr k_kind k_kinds[] = {{gemm_q4_k, TB_Q4_K_PANEL, 2 * TB_K_HALVES}, {gemm_q5_k, TB_Q5_K_PANEL, 2 * TB_K_HALVES},
                              {gemm_q6_k, TB_Q6_K_PANEL, TB_K_HALVES},     {gemm_q2_k, TB_Q2_K_PANEL, 2 * TB_K_HALVES},
                              {gemm_q3_k, TB_Q3_K_PANEL, TB_K_HALVES},     {gemm_iq4_xs, TB_IQ4_XS_PANEL, TB_K_HALVES},
                              {gemm_tq2_0, TB_TQ2_0_PANEL, TB_K_HALVES},   {gemm_tq1_0, TB_TQ1_0_PANEL, TB_K_HALVES}};

// A random panel of blocks of 256 k: any bytes, small scales.
std::vector<uint8_t> k_panel(const k_kind & kind, int64_t blocks) {
    std::vector<uint8_t> panel(kind.bytes * static_cast<size_t>(blocks));
    for (uint8_t & x : panel)
        x = static_cast<uint8_t>(rng());
    for (size_t end = kind.bytes; end <= panel.size(); end += kind.bytes) {
        for (size_t at = end - kind.halves; at < end; at += 2) {
            const uint16_t half = static_cast<uint16_t>(rng() & 0x83ff); // subnormal
            std::memcpy(panel.data() + at, &half, 2);
        }
    }
    return panel;
}

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_TESTS_GEMM_DATA_H
