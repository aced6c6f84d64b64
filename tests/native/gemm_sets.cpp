// Every kernel set of this CPU against the portable one, GEMM kernels only, on random data: for machines where Python
// cannot follow (aarch64 under emulation; see tests/test_aarch64.py). Prints one line per set; exit status 1 on a
// difference.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "gemm_data.h"
#include "kernels/gemm_shape.h"

using namespace tb::npu;

namespace {

int failures = 0;

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

void compare(const kernel_table & t, const kernel_table & reference, gemm_format f, const std::vector<uint8_t> & panel,
             gemm_format as, const std::vector<uint8_t> & same_panel, int64_t n) {
    const gemm_int8 &fast = t.gemm.int8[f], &slow = reference.gemm.int8[as];
    for (int rows = 1; rows <= fast.rows; rows++) {
        const auto x = floats(static_cast<size_t>(rows * n) * 32);
        result out(rows), want(rows);
        for (bool add : {false, true}) {
            const auto group = groups(t.gemm, f, x, rows, n);
            fast.run({panel.data(), group.data(), n, rows, add, out.at});
            for (int m = 0; m < rows; m++) {
                const std::vector<float> row(x.begin() + m * n * 32, x.begin() + (m + 1) * n * 32);
                const auto one = groups(reference.gemm, as, row, 1, n);
                slow.run({same_panel.data(), one.data(), n, 1, add, want.at + m});
            }
            expect(close(out.data, want.data, 2e-3f), t.isa, fast.name);
        }
    }
}

void integer(const kernel_table & t, const kernel_table & reference) {
    for (const column_kind & kind : column_kinds) {
        const auto panel = column_panel(kind, 5);
        compare(t, reference, kind.format, panel, kind.format, panel, 5);
    }
}

// One column half of a tile each: zeros, a negative zero among others, subnormal, infinite, no number.
void special_scales(std::vector<uint8_t> & panel, size_t quants) {
    const auto set = [&](size_t tile, size_t half, size_t first, size_t n, uint16_t value) {
        for (size_t pair = first; pair < first + n; pair++)
            std::memcpy(panel.data() + (tile * (quants + TB_HALF_SCALES)) + quants + 2 * (2 * pair + half), &value, 2);
    };
    set(0, 1, 0, 16, 0);
    set(1, 0, 5, 1, 0x8000);
    set(2, 1, 0, 16, 0x0003);
    set(3, 0, 0, 16, 0x8001);
    set(5, 0, 7, 1, 0x7c00);
    set(8, 1, 15, 1, 0xfe01);
}

// `tile` grouping against the portable set, which prepares it; numbers of tiles around those that are looked at at
// once.
void tile_groups(const kernel_table & t, const kernel_table & reference) {
    constexpr struct {
        gemm_format format;
        uint32_t type;
    } kinds[] = {{gemm_q4_tile, TB_Q4_0_TILE}, {gemm_q8_tile, TB_Q8_0_TILE}, {gemm_iq4nl_tile, TB_IQ4_NL_TILE}};
    for (const auto & kind : kinds) {
        if (t.gemm.int8[kind.format].name == nullptr) continue;
        for (int64_t n : {1, 2, 3, 4, 5, 7, 8, 9, 13}) {
            auto panel = tiles(tile_of(kind.type).quants, n, false);
            if (n == 9) special_scales(panel, tile_of(kind.type).quants);
            std::vector<uint8_t> prepared(static_cast<size_t>(n) * gemm_prepared_bytes);
            reference.gemm.prepare(kind.type, panel.data(), n, prepared.data());
            compare(t, reference, kind.format, panel, gemm_prepared, prepared, n);
        }
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
        for (int rows = 1; rows <= fast.rows; rows++) {
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
    std::vector<uint8_t> w(32 * 4200);
    for (size_t i = 0; i < w.size(); i++)
        w[i] = static_cast<uint8_t>(i & 1 ? 0x38 | (rng() & 0x83) : rng());
    for (uint32_t type : {TB_F32, TB_F16, TB_BF16}) {
        for (int64_t k : {1, 7, 16, 37, 64}) {
            std::vector<float> p(static_cast<size_t>(32 * k)), q = p;
            t.gemm.pack(type, w.data(), 400, 27, k, p.data());
            reference.gemm.pack(type, w.data(), 400, 27, k, q.data());
            expect(p == q, t.isa, "pack");
        }
        // 1030 k are more than a stretch
        for (int64_t k : {1, 7, 16, 37, 64, 1030}) {
            for (int rows : {1, 2, 3, 4, 5, 6, 7, 13}) {
                const auto x = floats(static_cast<size_t>(rows * k));
                const float * at[gemm_max_rows];
                for (int m = 0; m < rows; m++)
                    at[m] = x.data() + m * k;
                const int f = type == TB_F32 ? gemm_f32 : type == TB_F16 ? gemm_f16 : gemm_bf16;
                for (int cols : {1, 2, 3, 4, 7, 32}) {
                    result out(rows), want(rows);
                    t.gemm.dot[f].run({w.data(), 4200, cols, rows, k, at, out.at});
                    reference.gemm.dot[f].run({w.data(), 4200, cols, rows, k, at, want.at});
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
        tile_groups(*list.tables[i], reference);
        quantizing(*list.tables[i], reference);
        k_quants(*list.tables[i], reference);
        floating(*list.tables[i], reference);
        std::printf("%s: checked\n", list.tables[i]->isa);
    }
    return failures != 0;
}
