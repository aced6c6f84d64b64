// Every kernel set of this CPU against the portable one, GEMM kernels only, on random data: for machines where Python
// cannot follow (aarch64 under emulation; see tests/test_aarch64.py). Prints one line per set; exit status 1 on a
// difference.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/gemm_shape.h"
#include "kernels/kernels.h"

using namespace tb::npu;

namespace {

int failures = 0;

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
    float * at[gemm_most_rows];
};

// Formats of one scale per column and 32 k, and types of their tiles; of gemm_prepared there is none.
struct column_kind {
    gemm_format format;
    uint32_t type;
};

constexpr column_kind column_kinds[] = {
    {gemm_q4, TB_Q4_0_COL},   {gemm_q8, TB_Q8_0_COL},     {gemm_iq4nl, TB_IQ4_NL_COL},   {gemm_q5_0, TB_Q5_0_COL},
    {gemm_q4_1, TB_Q4_1_COL}, {gemm_q5_1, TB_Q5_1_COL},   {gemm_mxfp4, TB_MXFP4_COL},    {gemm_q1_0, TB_Q1_0_COL},
    {gemm_q2_0, TB_Q2_0_COL}, {gemm_nvfp4, TB_NVFP4_COL}, {gemm_prepared, TB_TYPE_COUNT}};

// A random panel of n tiles.
std::vector<uint8_t> column_panel(const column_kind & kind, int64_t n) {
    if (kind.format == gemm_prepared) return tiles(gemm_prepared_quants, n, true);
    const tile_traits tile = tile_of(kind.type);
    if (kind.format == gemm_nvfp4) {
        auto panel = tiles(tile.quants, n, false);
        for (size_t i = 0; i < panel.size(); i++)
            panel[i] &= i % tile.bytes < tile.quants ? 0xff : 0x1f; // scales of 0.06 at most
        return panel;
    }
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

constexpr k_kind k_kinds[] = {
    {gemm_q4_k, TB_Q4_K_PANEL, 2 * TB_K_HALVES},   {gemm_q5_k, TB_Q5_K_PANEL, 2 * TB_K_HALVES},
    {gemm_q6_k, TB_Q6_K_PANEL, TB_K_HALVES},       {gemm_q2_k, TB_Q2_K_PANEL, 2 * TB_K_HALVES},
    {gemm_q3_k, TB_Q3_K_PANEL, TB_K_HALVES},       {gemm_iq4_xs, TB_IQ4_XS_PANEL, TB_K_HALVES},
    {gemm_tq2_0, TB_TQ2_0_PANEL, TB_K_HALVES},     {gemm_tq1_0, TB_TQ1_0_PANEL, TB_K_HALVES},
    {gemm_iq2_xxs, TB_IQ2_XXS_PANEL, TB_K_HALVES}, {gemm_iq2_xs, TB_IQ2_XS_PANEL, TB_K_HALVES},
    {gemm_iq3_xxs, TB_IQ3_PANEL, TB_K_HALVES},     {gemm_iq3_s, TB_IQ3_PANEL, TB_K_HALVES},
    {gemm_iq1_s, TB_IQ1_S_PANEL, TB_K_HALVES},     {gemm_iq1_m, TB_IQ2_XS_PANEL, TB_K_HALVES}};

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

void expect(bool good, const char * set, const char * what) {
    if (good) return;
    std::printf("%s: %s differs\n", set, what);
    failures++;
}

bool close(const std::vector<float> & a, const std::vector<float> & b, float tolerance) {
    for (size_t i = 0; i < a.size(); i++) {
        if (std::isnan(b[i]) ? !std::isnan(a[i]) : !(std::fabs(a[i] - b[i]) <= tolerance)) return false;
    }
    return true;
}

std::vector<uint8_t> groups(const gemm_kernels & k, gemm_format f, const std::vector<float> & x, int rows, int64_t n) {
    std::vector<uint8_t> group(static_cast<size_t>(n) * gemm_record_bytes(rows));
    for (int m = 0; m < rows; m++) {
        k.quantize(x.data() + static_cast<size_t>(m * n) * 32, n, k.int8[f].offset, group.data(), rows, m);
    }
    return group;
}

// All rows of small groups, some of large ones.
int more(int rows) {
    const bool next = rows < gemm_max_rows + 2 || rows == gemm_most_rows;
    return next ? rows + 1 : std::min(rows + 31, gemm_most_rows);
}

void compare(const kernel_table & t, const kernel_table & reference, gemm_format f, const std::vector<uint8_t> & panel,
             int64_t n) {
    const gemm_int8 &fast = t.gemm.int8[f], &slow = reference.gemm.int8[f];
    for (int rows = 1; rows <= fast.rows; rows = more(rows)) {
        const auto x = floats(static_cast<size_t>(rows * n) * 32);
        result out(rows), want(rows);
        for (bool add : {false, true}) {
            const auto group = groups(t.gemm, f, x, rows, n);
            fast.run({panel.data(), group.data(), n, rows, add, out.at});
            for (int m = 0; m < rows; m++) {
                const std::vector<float> row(x.begin() + m * n * 32, x.begin() + (m + 1) * n * 32);
                const auto one = groups(reference.gemm, f, row, 1, n);
                slow.run({panel.data(), one.data(), n, 1, add, want.at + m});
            }
            expect(close(out.data, want.data, 2e-3f), t.isa, fast.name);
        }
    }
}

void integer(const kernel_table & t, const kernel_table & reference) {
    for (const column_kind & kind : column_kinds) {
        const auto panel = column_panel(kind, 5);
        compare(t, reference, kind.format, panel, 5);
    }
}

// An int8 group whose rows lie in pairs, in the order of one that has none.
std::vector<uint8_t> without_pairs(const std::vector<uint8_t> & group, int rows) {
    std::vector<uint8_t> plain = group;
    const size_t record = gemm_record_bytes(rows);
    for (size_t i = 0; i < group.size(); i++) {
        const size_t at = i % record, pair = at / 64;
        if (pair >= static_cast<size_t>(rows / 2)) continue; // an odd last row, scales, starts
        const size_t row = 2 * pair + at / 8 % 2, k = at % 64 / 16 * 8 + at % 8;
        plain[i - at + 32 * row + k] = group[i];
    }
    return plain;
}

void quantizing(const kernel_table & t, const kernel_table & reference) {
    auto x = floats(32 * 9);
    for (int i = 0; i < 32; i++)
        x[32 + static_cast<size_t>(i)] = 0;
    x[70] = NAN;
    x[100] = INFINITY;
    x[140] = 1e30f;
    for (int i = 0; i < 32; i++)
        x[160 + static_cast<size_t>(i)] = (static_cast<float>(i) - 15.5f); // ties
    for (int rows = 1; rows <= 4; rows++) {
        std::vector<uint8_t> a(9 * gemm_record_bytes(rows)), b = a;
        for (int row = 0; row < rows; row++) {
            x[3] = static_cast<float>(row); // so that no two rows are alike
            t.gemm.quantize(x.data(), 9, 8, a.data(), rows, row);
            reference.gemm.quantize(x.data(), 9, 8, b.data(), rows, row);
        }
        expect((t.gemm.row_pairs ? without_pairs(a, rows) : a) == b, t.isa, "quantize");
    }
    for (uint32_t type : {TB_Q4_0_TILE, TB_Q8_0_TILE, TB_IQ4_NL_TILE}) {
        const auto panel = tiles(tile_of(type).quants, 3, false);
        std::vector<uint8_t> p(3 * gemm_prepared_bytes), q = p;
        t.gemm.prepare(type, panel.data(), 3, p.data());
        reference.gemm.prepare(type, panel.data(), 3, q.data());
        expect(p == q, t.isa, "prepare");
    }
    for (uint32_t type : {TB_Q4_0_COL, TB_Q8_0_COL, TB_IQ4_NL_COL, TB_Q4_0_TILE, TB_Q8_0_TILE, TB_IQ4_NL_TILE}) {
        const auto panel = tiles(tile_of(type).quants, 3, false);
        std::vector<float> p(3 * 1024), q = p;
        t.gemm.dequantize(type, panel.data(), 3, p.data());
        reference.gemm.dequantize(type, panel.data(), 3, q.data());
        expect(p == q, t.isa, "dequantize");
    }
}

// Types of 256 k: random bytes with finite scales, over blocks of 256 k.
void k_quants(const kernel_table & t, const kernel_table & reference) {
    constexpr int64_t blocks = 3, n = blocks * gemm_k_tiles;
    auto special = floats(32 * n);
    for (size_t i = 0; i < TB_K_BLOCK; i++)
        special[TB_K_BLOCK + i] = static_cast<float>(i) - 127.5f; // ties
    special[700] = NAN;
    std::vector<uint8_t> p(blocks * gemm_k_record_bytes(3)), q = p;
    for (int row = 0; row < 3; row++) {
        special[3] = static_cast<float>(row); // so that no two rows are alike
        t.gemm.quantize_k(special.data(), n, p.data(), 3, row);
        reference.gemm.quantize_k(special.data(), n, q.data(), 3, row);
    }
    expect(p == q, t.isa, "quantize_k");
    for (const k_kind & kind : k_kinds) {
        const auto panel = k_panel(kind, blocks);
        const gemm_int8 &fast = t.gemm.int8[kind.format], &slow = reference.gemm.int8[kind.format];
        for (int rows = 1; rows <= fast.rows; rows = more(rows)) {
            result out(rows), want(rows);
            for (bool add : {false, true}) {
                std::vector<uint8_t> group(blocks * gemm_k_record_bytes(rows)), one(blocks * gemm_k_record_bytes(1));
                for (int m = 0; m < rows; m++) {
                    const auto row = floats(32 * n);
                    t.gemm.quantize_k(row.data(), n, group.data(), rows, m);
                    reference.gemm.quantize_k(row.data(), n, one.data(), 1, 0);
                    slow.run({panel.data(), one.data(), n, 1, add, want.at + m});
                }
                fast.run({panel.data(), group.data(), n, rows, add, out.at});
                expect(close(out.data, want.data, 1e-3f), t.isa, fast.name);
            }
        }
    }
}

void floating(const kernel_table & t, const kernel_table & reference) {
    const auto panel = floats(70 * 32);
    for (int rows = 1; rows <= t.gemm.f32.rows; rows++) {
        const auto group = floats(static_cast<size_t>(70 * rows));
        result out(rows), want(rows);
        for (bool add : {false, true}) {
            t.gemm.f32.run({panel.data(), group.data(), 70, rows, add, out.at});
            reference.gemm.f32.run({panel.data(), group.data(), 70, rows, add, want.at});
            expect(close(out.data, want.data, 1e-4f), t.isa, t.gemm.f32.name);
        }
    }
    constexpr int64_t most_k = 8200, stride = 4 * most_k; // more than the kernels take in one go
    std::vector<uint8_t> w(42 * stride);
    for (size_t i = 0; i < w.size(); i++)
        w[i] = static_cast<uint8_t>(i & 1 ? 0x38 | (rng() & 0x83) : rng());
    for (uint32_t type : {TB_F32, TB_F16, TB_BF16}) {
        for (int64_t k : {1, 7, 16, 37, 64}) {
            std::vector<float> p(static_cast<size_t>(32 * k)), q = p;
            t.gemm.pack(type, w.data(), 400, 27, k, p.data());
            reference.gemm.pack(type, w.data(), 400, 27, k, q.data());
            expect(p == q, t.isa, "pack");
        }
        for (int64_t k : {int64_t{1}, int64_t{7}, int64_t{16}, int64_t{37}, int64_t{64}, most_k}) {
            for (int rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 19}) {
                if (k == most_k && rows != 1 && rows != 8 && rows != 13) continue;
                std::vector<float> scratch(static_cast<size_t>(gemm_dot_scratch(rows, k) / 4 + 16));
                void * const aligned =
                    reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(scratch.data()) + 63) & ~uintptr_t{63});
                const auto x = floats(static_cast<size_t>(rows * k));
                const float * at[gemm_max_rows];
                for (int m = 0; m < rows; m++)
                    at[m] = x.data() + m * k;
                const int f = type == TB_F32 ? gemm_f32 : type == TB_F16 ? gemm_f16 : gemm_bf16;
                for (int cols : {1, 2, 3, 4, 7, 32}) {
                    result out(rows), want(rows);
                    t.gemm.dot[f].run({w.data(), stride, cols, rows, k, at, out.at, aligned});
                    reference.gemm.dot[f].run({w.data(), stride, cols, rows, k, at, want.at, aligned});
                    expect(close(out.data, want.data, 1e-3f), t.isa, t.gemm.dot[f].name);
                }
            }
        }
    }
    auto x = floats(77), y = x;
    t.gemm.round_fp16(77, x.data());
    reference.gemm.round_fp16(77, y.data());
    expect(x == y, t.isa, "round_fp16");
}

// The solver's shapes fit, and no shape that fits has fewer loads per dot product.
void shapes() {
    for (int registers = 8; registers <= 64; registers++) {
        for (int panel : {2, 4, 8}) {
            for (int sums : {1, 2}) {
                const gemm_shape s = solve_gemm_shape(registers, panel, sums, 1, 16);
                const auto fits = [&](int r, int v) { return panel % v == 0 && r * v * sums + v + 2 <= registers; };
                const auto loads = [](int r, int v) { return static_cast<double>(r + v) / (r * v); };
                expect(fits(s.rows, s.vectors), "solver", "registers");
                for (int v = 1; v <= panel; v++) {
                    for (int r = 1; r <= 16; r++) {
                        const bool better = fits(r, v) && loads(r, v) < loads(s.rows, s.vectors) - 1e-12;
                        expect(!better, "solver", "loads");
                    }
                }
            }
        }
    }
}

} // namespace

int main() {
    shapes();
    const kernel_table & reference = *find_kernels("portable");
    const kernel_list & list = available_kernels();
    for (int i = 0; i < list.n; i++) {
        integer(*list.tables[i], reference);
        quantizing(*list.tables[i], reference);
        k_quants(*list.tables[i], reference);
        floating(*list.tables[i], reference);
        std::printf("%s: checked\n", list.tables[i]->isa);
    }
    return failures != 0;
}
