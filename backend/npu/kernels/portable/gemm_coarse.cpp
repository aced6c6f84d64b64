// The coarse int8 numerics in portable C++: one scale per 256 k. The reference of the other sets: they return the same
// bits for weights and activations (gemm.h has the formulas).
#include <algorithm>
#include <cmath>
#include <cstring>

#include "half.h"
#include "kernels/gemm.h"

namespace tb::npu {

void fill_gemm_portable_coarse(gemm_kernels & k);

namespace {

constexpr int max_rows = 8;
constexpr float round_to_integer = 12582912.0f; // 1.5 * 2^23: adding it rounds to the nearest integer, ties to even

void run(const gemm_int8_args & a) {
    const uint8_t * panel = a.panel;
    const uint8_t * record = a.group;
    for (int64_t t = 0; t < a.k_tiles; t += gemm_coarse_tiles) {
        const int quads = 8 * static_cast<int>(std::min<int64_t>(gemm_coarse_tiles, a.k_tiles - t));
        for (int m = 0; m < a.rows; m++) {
            const int8_t * q = reinterpret_cast<const int8_t *>(record) + gemm_coarse_k * m;
            float scale;
            int32_t start;
            std::memcpy(&scale, record + gemm_coarse_k * a.rows + 4 * m, 4);
            std::memcpy(&start, record + (gemm_coarse_k + 4) * a.rows + 4 * m, 4);
            int32_t dot[gemm_panel];
            std::fill(dot, dot + gemm_panel, start);
            for (int j = 0; j < quads; j++) {
                for (int i = 0; i < 4 * gemm_panel; i++)
                    dot[i / 4] += panel[128 * j + i] * q[4 * j + i % 4];
            }
            for (int n = 0; n < gemm_panel; n++) {
                float common;
                std::memcpy(&common, panel + gemm_coarse_k * gemm_panel + 4 * n, 4);
                const float product = static_cast<float>(dot[n]) * (common * scale);
                a.out[m][n] = a.add || t > 0 ? a.out[m][n] + product : product;
            }
        }
        panel += gemm_coarse_panel_bytes;
        record += gemm_coarse_record_bytes(a.rows);
    }
}

void quantize(const float * x, int64_t k_tiles, uint8_t * group, int rows, int row) {
    static constexpr int order[4] = {0, 2, 1, 3};
    for (int64_t t = 0; t < k_tiles; t += gemm_coarse_tiles, group += gemm_coarse_record_bytes(rows)) {
        const int n = gemm_panel * static_cast<int>(std::min<int64_t>(gemm_coarse_tiles, k_tiles - t));
        const float * v = x + gemm_panel * t;
        float amax = 0;
        bool finite = true;
        for (int i = 0; i < n; i++) {
            const float magnitude = std::fabs(v[i]);
            finite = finite && magnitude < INFINITY;
            amax = magnitude > amax ? magnitude : amax;
        }
        const bool live = finite && amax >= gemm_least_amax;
        const float scale = !finite ? NAN : live ? amax / 127.0f : 0.0f;
        const float inverse = live ? 127.0f / amax : 0.0f;
        int32_t sum = 0;
        for (int i = 0; i < n; i++) {
            const float r = live ? v[(i & ~3) + order[i & 3]] * inverse + round_to_integer : round_to_integer;
            const int8_t q = static_cast<int8_t>(r - round_to_integer);
            group[gemm_coarse_k * row + i] = static_cast<uint8_t>(q);
            sum += q;
        }
        const int32_t start = -128 * sum;
        std::memcpy(group + gemm_coarse_k * rows + 4 * row, &scale, 4);
        std::memcpy(group + (gemm_coarse_k + 4) * rows + 4 * row, &start, 4);
    }
}

// Column n's scale in tile t of a block.
float scale_of(const uint8_t * block, const tile_traits & tile, int t, int n) {
    return tb_half_to_float(tb_load16(block + tile.bytes * static_cast<size_t>(t) + tile.quants + 2 * n));
}

// Byte `at` (below 1024) of a tile unpacked: the nibble of a Q4_0 weight, the value of another.
int value_of(uint32_t type, const uint8_t * tile, int at) {
    if (type == TB_Q8_0_COL) return static_cast<int8_t>(tile[at]);
    const int byte = tile[at / 256 * 128 + at % 128];
    const int nibble = at / 128 % 2 ? byte >> 4 : byte & 15;
    return type == TB_Q4_0_COL ? nibble : iq4nl_values[nibble];
}

void prepare(uint32_t type, const uint8_t * panel, int64_t k_tiles, uint8_t * out) {
    const bool q4 = type == TB_Q4_0_COL;
    const tile_traits tile = tile_of(type);
    for (int64_t t = 0; t < k_tiles; t += gemm_coarse_tiles, out += gemm_coarse_panel_bytes) {
        const uint8_t * block = panel + tile.bytes * static_cast<size_t>(t);
        const int tiles = static_cast<int>(std::min<int64_t>(gemm_coarse_tiles, k_tiles - t));
        for (int n = 0; n < gemm_panel; n++) {
            float common = 0;
            bool finite = true;
            for (int i = 0; i < tiles; i++) {
                const float s = scale_of(block, tile, i, n);
                finite = finite && std::fabs(s) < INFINITY;
                common = std::fabs(s) > std::fabs(common) ? s : common;
            }
            const bool live = finite && common != 0;
            const float inverse = live ? (q4 ? -32768.0f : 16384.0f) / common : 0.0f;
            for (int i = 0; i < tiles; i++) {
                const float r = live ? scale_of(block, tile, i, n) * inverse : 0.0f;
                const int rounded = static_cast<int>(r + round_to_integer - round_to_integer);
                const int ratio = q4 ? std::min(rounded, gemm_coarse_most_q4) : std::max(rounded, gemm_coarse_least_q8);
                for (int k = 0; k < gemm_panel; k++) {
                    const int at = 128 * (k / 4) + 4 * n + k % 4;
                    const int q = value_of(type, block + tile.bytes * static_cast<size_t>(i), at);
                    const int factor = q4 ? 128 - 16 * q : 2 * q;
                    out[gemm_panel * gemm_panel * i + at] =
                        static_cast<uint8_t>(((factor * ratio + (1 << 14)) >> 15) + 128);
                }
            }
            const float scale = !finite ? NAN : q4 ? common * (1.0f / 16) : common;
            std::memcpy(out + gemm_coarse_k * gemm_panel + 4 * n, &scale, 4);
        }
    }
}

} // namespace

void fill_gemm_portable_coarse(gemm_kernels & k) {
    k.coarse = {"gemm_q8k_8x32_portable", max_rows, run, quantize, prepare};
}

} // namespace tb::npu
