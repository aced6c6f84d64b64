// AMX's instructions over tiles in memory, in place of the intrinsics that kernels/amx/ uses, for CPUs without them: to
// be included before that. As strict as a CPU: what would fault there ends the program (Intel's Software Developer's
// Manual, volume 2: LDTILECFG, TILELOADD, TDPBSSD). It does not emulate permissions or interrupts.
#ifndef TILEBEAM_TESTS_AMX_EMULATED_H
#define TILEBEAM_TESTS_AMX_EMULATED_H

#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace amx_emulated {

constexpr int tiles = 8, most_rows = 16, most_row_bytes = 64; // of palette 1

struct tile {
    int rows, row_bytes;
    uint8_t bytes[most_rows][most_row_bytes];
};

struct unit {
    bool configured;
    tile tiles[amx_emulated::tiles];
};

inline thread_local unit here = {};

[[noreturn]] inline void fault(const char * what) {
    std::printf("AMX: %s\n", what);
    std::exit(2);
}

inline void release() {
    here.configured = false;
    std::memset(here.tiles, 0, sizeof(here.tiles));
}

inline void load_configuration(const void * from) {
    uint8_t c[64];
    std::memcpy(c, from, sizeof(c));
    const auto unused = [&](int first, int last) {
        for (int i = first; i < last; i++) {
            if (c[i] != 0) fault("a reserved byte of the configuration is not 0");
        }
    };
    if (c[0] == 0) return release();
    if (c[0] != 1) fault("no palette 1");
    unused(1, 16); // the first row to go on with after a fault, and what is reserved
    unused(16 + 2 * tiles, 48);
    unused(48 + tiles, 64);
    release();
    for (int i = 0; i < tiles; i++) {
        tile & t = here.tiles[i];
        t.row_bytes = c[16 + 2 * i] | c[17 + 2 * i] << 8;
        t.rows = c[48 + i];
        if (t.rows > most_rows || t.row_bytes > most_row_bytes) fault("a tile is too large");
        if ((t.rows == 0) != (t.row_bytes == 0)) fault("a tile has rows or bytes only");
    }
    here.configured = true;
}

inline void store_configuration(void * to) {
    uint8_t c[64] = {};
    c[0] = here.configured;
    for (int i = 0; i < tiles && here.configured; i++) {
        c[16 + 2 * i] = static_cast<uint8_t>(here.tiles[i].row_bytes);
        c[48 + i] = static_cast<uint8_t>(here.tiles[i].rows);
    }
    std::memcpy(to, c, sizeof(c));
}

inline tile & used(int i) {
    if (!here.configured || i < 0 || i >= tiles || here.tiles[i].rows == 0) fault("a tile is not configured");
    return here.tiles[i];
}

inline void zero(int i) {
    tile & t = used(i);
    std::memset(t.bytes, 0, sizeof(t.bytes));
}

inline void load(int to, const void * from, int64_t stride) {
    zero(to);
    tile & t = used(to);
    for (int m = 0; m < t.rows; m++)
        std::memcpy(t.bytes[m], static_cast<const uint8_t *>(from) + m * stride, static_cast<size_t>(t.row_bytes));
}

inline void store(int from, void * to, int64_t stride) {
    const tile & t = used(from);
    for (int m = 0; m < t.rows; m++)
        std::memcpy(static_cast<uint8_t *>(to) + m * stride, t.bytes[m], static_cast<size_t>(t.row_bytes));
}

// sum[m][n] += a[m][4 k + i] * b[k][4 n + i], of signed bytes and of others.
template <class Byte> void multiply(int sums, int rows, int columns) {
    tile & sum = used(sums);
    const tile &a = used(rows), &b = used(columns);
    if (sums == rows || sums == columns || rows == columns) fault("a tile is used twice");
    if (sum.row_bytes % 4 != 0 || a.row_bytes % 4 != 0 || b.row_bytes % 4 != 0) fault("a row is no whole quads");
    if (sum.rows != a.rows || sum.row_bytes != b.row_bytes || a.row_bytes / 4 != b.rows) fault("tiles do not fit");
    for (int m = 0; m < a.rows; m++) {
        for (int n = 0; n < b.row_bytes / 4; n++) {
            uint32_t x;
            std::memcpy(&x, sum.bytes[m] + 4 * n, 4);
            for (int k = 0; k < b.rows; k++) {
                for (int i = 0; i < 4; i++)
                    x += static_cast<uint32_t>(static_cast<int8_t>(a.bytes[m][4 * k + i]) *
                                               static_cast<Byte>(b.bytes[k][4 * n + i]));
            }
            std::memcpy(sum.bytes[m] + 4 * n, &x, 4);
        }
    }
}

} // namespace amx_emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#undef _tile_dpbsud
#define _tile_loadconfig amx_emulated::load_configuration
#define _tile_storeconfig amx_emulated::store_configuration
#define _tile_loadd amx_emulated::load
#define _tile_stored amx_emulated::store
#define _tile_zero amx_emulated::zero
#define _tile_dpbssd amx_emulated::multiply<int8_t>
#define _tile_dpbsud amx_emulated::multiply<uint8_t>

#endif // TILEBEAM_TESTS_AMX_EMULATED_H
