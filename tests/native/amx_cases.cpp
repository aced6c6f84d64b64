// The amx set's kernels over emulated tiles against those that it replaces (amx_kernels.cpp), on random shapes and
// data: equal bits, and the tiles' configuration where it should be. Prints what differs; exit status 1 if anything
// does.
#include "amx_emulated.h"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "gemm_data.h"

using namespace tb::npu;

namespace {

constexpr int few_rows = 4; // for the kernels that are replaced: kernels/amx/matrix_unit.h
int failures = 0, cases = 0;
const gemm_kernels & amx = find_kernels("amx")->gemm;
const gemm_kernels & vnni = find_kernels("vnni")->gemm;

int up_to(int n) { return 1 + static_cast<int>(rng() % static_cast<unsigned>(n)); }

bool same(const std::vector<float> & a, const std::vector<float> & b) {
    for (size_t i = 0; i < a.size(); i++) {
        if (std::isnan(a[i]) && std::isnan(b[i])) continue;
        if (std::memcmp(&a[i], &b[i], sizeof(float)) != 0) return false;
    }
    return true;
}

// A kernel of each set on the same random activations, those of the second a row at a time. `convert` makes a row's
// part of a group, of `record` bytes for each row and piece of the k; few rows are to leave the matrix unit alone.
template <class Run, class Convert>
void compare(const char * name, Run fast, Run slow, const Convert & convert, const std::vector<uint8_t> & panel,
             int64_t k_tiles, int rows, size_t row_bytes, bool few) {
    const bool add = rng() % 2 == 0;
    result out(rows), want(rows);
    // what no row's conversion writes is anything
    std::vector<uint8_t> group(row_bytes * static_cast<size_t>(rows), 0x5a), one(row_bytes, 0x5a);
    for (int m = 0; m < rows; m++) {
        auto x = floats(static_cast<size_t>(TB_TILE_K * k_tiles));
        if (rng() % 8 == 0) std::fill(x.begin(), x.begin() + TB_TILE_K, 0.0f);
        if (rng() % 32 == 0) x[rng() % x.size()] = NAN;
        if (rng() % 4 == 0) { // as large as integers get
            for (float & v : x)
                v = std::copysign(1.0f, v);
        }
        convert(x.data(), k_tiles, group.data(), rows, m);
        convert(x.data(), k_tiles, one.data(), 1, 0);
        slow({panel.data(), one.data(), k_tiles, 1, add, want.at + m});
    }
    const int configurations = amx_emulated::here.configurations, products = amx_emulated::here.products;
    fast({panel.data(), group.data(), k_tiles, rows, add, out.at});
    const bool used = amx_emulated::here.products > products;
    const bool configured = amx_emulated::here.configurations > configurations;
    const char * wrong = !same(out.data, want.data)         ? "other bits"
                         : used == few || configured == few ? "not the kernel for so many rows"
                         : amx_emulated::here.configured    ? "tiles still configured"
                                                            : nullptr;
    cases++;
    if (wrong == nullptr) return;
    std::printf("%s, %d rows, %d tiles%s: %s\n", name, rows, static_cast<int>(k_tiles), add ? ", added" : "", wrong);
    failures++;
}

void columns(int rows) {
    for (const column_kind & kind : column_kinds) {
        const gemm_int8 &fast = amx.int8[kind.format], &slow = vnni.int8[kind.format];
        const int64_t n = up_to(9);
        const auto convert = [&](const float * x, int64_t k_tiles, uint8_t * group, int of, int row) {
            amx.quantize(x, k_tiles, fast.offset, group, of, row);
        };
        compare(fast.name, fast.run, slow.run, convert, column_panel(kind, n), n, rows,
                gemm_record_bytes(1) * static_cast<size_t>(n), rows <= few_rows);
    }
}

void blocks_of_256(int rows) {
    for (const k_kind & kind : k_kinds) {
        const gemm_int8 &fast = amx.int8[kind.format], &slow = vnni.int8[kind.format];
        const int64_t blocks = up_to(3);
        compare(fast.name, fast.run, slow.run, amx.quantize_k, k_panel(kind, blocks), gemm_k_tiles * blocks, rows,
                gemm_k_record_bytes(1) * static_cast<size_t>(blocks), rows <= few_rows);
    }
}

} // namespace

int main() {
    for (int round = 0; round < 3; round++) {
        for (int rows = 1; rows <= gemm_max_rows; rows++) {
            columns(rows);
            blocks_of_256(rows);
        }
    }
    std::printf("%d cases, %d of them wrong\n", cases, failures);
    return failures != 0;
}
