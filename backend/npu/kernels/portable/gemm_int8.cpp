// Integer GEMM in portable C++: the reference that every other set is tested against, and the float-free part of the
// numerics (activation quantization) that all sets reproduce bit for bit.
#include "kernels/gemm.h"

#include <cmath>
#include <cstring>

#include "half.h"

namespace tb::npu {

namespace {

// One tile with its quants as signed bytes in quad order: w[quad][4 * column + position].
struct unpacked {
    int8_t w[8][128];
    float scale[32], minimum[32]; // or the second 16 k's scale
};

void load_scales(const uint8_t * src, float * scale) {
    for (int n = 0; n < 32; n++)
        scale[n] = tb_half_to_float(tb_load16(src + 2 * n));
}

template <class Value> void load_nibbles(const uint8_t * tile, unpacked & u, Value value) {
    for (int c = 0; c < 4; c++) {
        for (int i = 0; i < 128; i++) {
            const int byte = tile[128 * c + i];
            u.w[2 * c][i] = value(byte & 15);
            u.w[2 * c + 1][i] = value(byte >> 4);
        }
    }
}

template <uint32_t type> struct format_of {
    static constexpr size_t bytes = tile_of(type).bytes;
    static constexpr bool has_minima = false;
};

struct format_q4 : format_of<TB_Q4_0_COL> {
    static void load(const uint8_t * tile, unpacked & u) {
        load_nibbles(tile, u, [](int q) { return static_cast<int8_t>(q - 8); });
        load_scales(tile + tile_of(TB_Q4_0_COL).quants, u.scale);
    }
};

// Q5_0, Q4_1 and Q5_1.
template <uint32_t type> struct format_bits : format_of<type> {
    static constexpr tile_traits traits = tile_of(type);
    static constexpr bool has_minima = traits.minima;
    static void load(const uint8_t * tile, unpacked & u) {
        load_nibbles(tile, u, [](int q) { return static_cast<int8_t>(q); });
        for (int j = 0; j < 8; j++) {
            for (int i = 0; i < 128; i++) {
                const int fifth = traits.fifth ? tile[TB_QUANTS(4) + i] >> j & 1 : 0;
                u.w[j][i] = static_cast<int8_t>((u.w[j][i] | fifth << 4) - (has_minima ? 0 : 16));
            }
        }
        load_scales(tile + traits.quants, u.scale);
        if (has_minima) load_scales(tile + traits.quants + TB_HALF_SCALES, u.minimum);
    }
};

// Q1_0 and Q2_0.
template <uint32_t type> struct format_few_bits : format_of<type> {
    static constexpr tile_traits traits = tile_of(type);
    static void load(const uint8_t * tile, unpacked & u) {
        for (int j = 0; j < 8; j++) {
            for (int i = 0; i < 128; i++) {
                const int q =
                    traits.quants == TB_QUANTS(1) ? (tile[i] >> j & 1) * 2 : tile[128 * (j / 4) + i] >> 2 * (j % 4) & 3;
                u.w[j][i] = static_cast<int8_t>(q - few_bits_offset);
            }
        }
        load_scales(tile + traits.quants, u.scale);
    }
};

struct format_mxfp4 : format_of<TB_MXFP4_COL> {
    static void load(const uint8_t * tile, unpacked & u) {
        load_nibbles(tile, u, [](int q) { return mxfp4_values[q]; });
        for (int n = 0; n < 32; n++)
            u.scale[n] = tb_power_to_float(tile[tile_of(TB_MXFP4_COL).quants + static_cast<size_t>(n)]);
    }
};

struct format_nvfp4 : format_of<TB_NVFP4_COL> {
    static constexpr bool halves = true;
    static void load(const uint8_t * tile, unpacked & u) {
        load_nibbles(tile, u, [](int q) { return mxfp4_values[q]; });
        const uint8_t * scales = tile + tile_of(TB_NVFP4_COL).quants;
        for (int n = 0; n < 32; n++) {
            u.scale[n] = tb_small_to_float(scales[n]);
            u.minimum[n] = tb_small_to_float(scales[TB_TILE_N + n]);
        }
    }
};

struct format_iq4nl : format_of<TB_IQ4_NL_COL> {
    static void load(const uint8_t * tile, unpacked & u) {
        load_nibbles(tile, u, [](int q) { return iq4nl_values[q]; });
        load_scales(tile + tile_of(TB_IQ4_NL_COL).quants, u.scale);
    }
};

struct format_q8 : format_of<TB_Q8_0_COL> {
    static void load(const uint8_t * tile, unpacked & u) {
        std::memcpy(u.w, tile, sizeof(u.w));
        load_scales(tile + tile_of(TB_Q8_0_COL).quants, u.scale);
    }
};

struct format_prepared {
    static constexpr size_t bytes = gemm_prepared_bytes;
    static constexpr bool has_minima = false;
    static void load(const uint8_t * tile, unpacked & u) {
        std::memcpy(u.w, tile, 1024);
        std::memcpy(u.scale, tile + gemm_prepared_quants, sizeof(u.scale));
    }
};

template <class Format> void run(const gemm_int8_args & a) {
    if (!a.add) {
        for (int m = 0; m < a.rows; m++)
            std::memset(a.out[m], 0, 32 * sizeof(float));
    }
    unpacked u;
    for (int64_t t = 0; t < a.k_tiles; t++) {
        Format::load(a.panel + t * Format::bytes, u);
        const uint8_t * record = a.group + t * gemm_record_bytes(a.rows);
        for (int m = 0; m < a.rows; m++) {
            const int8_t * q = reinterpret_cast<const int8_t *>(record) + 32 * m;
            float scale;
            int32_t start;
            std::memcpy(&scale, record + 32 * a.rows + 4 * m, 4);
            std::memcpy(&start, record + 36 * a.rows + 4 * m, 4);
            int32_t dot[32] = {}, first[32] = {};
            for (int j = 0; j < 8; j++) {
                if (has_halves<Format> && j == 4) {
                    std::memcpy(first, dot, sizeof(first));
                    std::memset(dot, 0, sizeof(dot));
                }
                const int a0 = q[4 * j], a1 = q[4 * j + 1], a2 = q[4 * j + 2], a3 = q[4 * j + 3];
                const int8_t * w = u.w[j];
                for (int n = 0; n < 32; n++) {
                    dot[n] += a0 * w[4 * n] + a1 * w[4 * n + 1] + a2 * w[4 * n + 2] + a3 * w[4 * n + 3];
                }
            }
            float * out = a.out[m];
            for (int n = 0; n < 32; n++) {
                const float product = static_cast<float>(dot[n]);
                if constexpr (has_halves<Format>) {
                    out[n] += static_cast<float>(first[n]) * (u.scale[n] * scale);
                    out[n] += product * (u.minimum[n] * scale);
                } else if constexpr (Format::has_minima) {
                    out[n] += (product * u.scale[n] + static_cast<float>(start) * u.minimum[n]) * scale;
                } else {
                    out[n] += product * (u.scale[n] * scale);
                }
            }
        }
    }
}

template <class Format> gemm_int8 kernel(const char * name) {
    return {name, 8, Format::has_minima ? gemm_minima_offset : 0, run<Format>};
}

void quantize(const float * x, int64_t k_tiles, int32_t offset, uint8_t * group, int rows, int row) {
    static constexpr int order[4] = {0, 2, 1, 3};
    for (int64_t t = 0; t < k_tiles; t++, x += 32) {
        uint8_t * record = group + t * gemm_record_bytes(rows);
        float amax = 0;
        bool finite = true;
        for (int i = 0; i < 32; i++) {
            const float v = std::fabs(x[i]);
            finite = finite && v < INFINITY;
            amax = v > amax ? v : amax;
        }
        int8_t q[32] = {};
        int32_t sum = 0;
        float scale = finite ? 0.0f : NAN;
        if (finite && amax >= gemm_least_amax) {
            scale = amax / 127.0f;
            const float inverse = 127.0f / amax;
            for (int i = 0; i < 32; i++) {
                // adding 1.5 * 2^23 rounds to the nearest integer, ties to even
                const float r = x[(i & ~3) + order[i & 3]] * inverse + 12582912.0f;
                q[i] = static_cast<int8_t>(r - 12582912.0f);
                sum += q[i];
            }
        }
        const int32_t start = -offset * sum;
        std::memcpy(record + 32 * row, q, 32);
        std::memcpy(record + 32 * rows + 4 * row, &scale, 4);
        std::memcpy(record + 36 * rows + 4 * row, &start, 4);
    }
}

// Each 2(k) x 16(n) block has its own scale, the whole column of 32 k gets one: see gemm.h. A scale that is not a
// number makes its columns NaN.
void prepare(uint32_t type, const uint8_t * panel, int64_t k_tiles, uint8_t * out) {
    const bool q8 = type == TB_Q8_0_TILE;
    const bool q4 = type == TB_Q4_0_TILE; // quants of 4 bits; the others' reach 127
    const int shift = q4 ? gemm_requantize_shift_q4 : gemm_requantize_shift_q8;
    unpacked u;
    for (int64_t t = 0; t < k_tiles; t++, panel += tile_of(type).bytes, out += gemm_prepared_bytes) {
        if (q8) {
            format_q8::load(panel, u);
        } else if (q4) {
            format_q4::load(panel, u);
        } else {
            format_iq4nl::load(panel, u);
        }
        // u.scale[2 * v + h]: rows 2v and 2v + 1, columns 16h to 16h + 15
        float d[2];
        int ratio[32];
        for (int h = 0; h < 2; h++) {
            float smax = 0;
            bool finite = true;
            for (int v = 0; v < 16; v++) {
                const float s = std::fabs(u.scale[2 * v + h]);
                finite = finite && s < INFINITY;
                smax = s > smax ? s : smax;
            }
            d[h] = !finite ? NAN : q4 ? smax * (8.0f / 127.0f) : smax;
            const float inverse = finite && smax > 0 ? 1.0f / d[h] : 0.0f;
            for (int v = 0; v < 16; v++) {
                const float r = finite ? u.scale[2 * v + h] * inverse * static_cast<float>(1 << shift) : 0.0f;
                ratio[2 * v + h] = static_cast<int>(r + 12582912.0f - 12582912.0f);
            }
        }
        for (int j = 0; j < 8; j++) {
            for (int i = 0; i < 128; i++) {
                const int n = i / 4, position = i & 3;
                // positions 0, 2 are rows of the first pair of the quad, 1, 3 of the second
                const int r = ratio[2 * (2 * j + (position & 1)) + n / 16];
                u.w[j][i] = static_cast<int8_t>((u.w[j][i] * (1 << (15 - shift)) * r + (1 << 14)) >> 15);
            }
        }
        for (int n = 0; n < 32; n++)
            u.scale[n] = d[n / 16];
        std::memcpy(out, u.w, sizeof(u.w));
        std::memcpy(out + gemm_prepared_quants, u.scale, sizeof(u.scale));
    }
}

} // namespace

void fill_gemm_portable_int8(gemm_kernels & k) {
    TILEBEAM_COLUMN_KERNELS(k, "8x32_portable");
    k.quantize = quantize;
    k.prepare = prepare;
}

} // namespace tb::npu
