// Tile layout: panels in and out of ggml blocks, and the reference dequantize.
//
// A 32-bit word of a tile is one column's four bytes of one chunk. In k order its bytes are 0, 2, 1, 3 (quad order:
// row pair before position in the pair), so packing one ggml block is: pick four (8 bit) or eight (4 bit) quants,
// swap the middle bytes, store at 128c + 4n. All words are little-endian, as are the machines this runs on.
#include "tilebeam/layout.h"

#include "half.h"
#include "k_panels.h"
#include "tile.h"

uint32_t tb_layout_version(void) { return TB_LAYOUT_VERSION; }

uint64_t tb_tiled_bytes(uint32_t type, uint64_t k, uint64_t n) {
    const uint64_t tile = tb_tile_bytes(type);
    if (tile == 0 || n == 0 || bad_panel(type, k, TILE)) return 0;
    const uint64_t kt = k / TILE;
    const uint64_t nt = n / TILE + (n % TILE != 0);
    if (kt > UINT64_MAX / tile || nt > UINT64_MAX / (kt * tile)) return 0;
    return kt * nt * tile;
}

// ggml's blocks of 4 and 5 bits: FP16 scale, or MXFP4's exponent of one byte; maybe FP16 minimum; maybe 32 fifth bits,
// bit k of a little-endian word; 16 bytes, of which byte j holds k = j in its low and k = j + 16 in its high nibble.
typedef struct {
    uint32_t quants; // bytes of a tile's
    int power, fifth, minimum;
    uint32_t low; // where a block's nibbles begin
} nibble_format;

static nibble_format nibbles_of(uint32_t type) {
    const tb_type_info * info = tb_type_of(type);
    const int fifth = info->quant_bytes > Q4_QUANTS, minimum = info->tile_bytes - info->quant_bytes > SCALES;
    const int power = info->tile_bytes - info->quant_bytes == TB_POWER_SCALES;
    return (nibble_format){info->quant_bytes, power, fifth, minimum,
                           (power ? 1u : 2u) + (minimum ? 2 : 0) + (fifth ? 4 : 0)};
}

// Scale `i` of those at p.
static float scale_at(nibble_format f, const uint8_t * p, uint32_t i) {
    return f.power ? tb_power_to_float(p[i]) : tb_half_to_float(tb_load16(p + 2 * i));
}

// Fifth bits of one block, k order, to the word of a tile's plane, bit j of a byte being quad j's; and back.
static uint32_t gather_fifth(uint32_t bits) {
    uint32_t w = 0;
    for (uint32_t j = 0; j < 8; j++)
        w |= ((bits >> 4 * j & 15u) * 0x00204081u & 0x01010101u) << j; // four bits to a byte each
    return quad(w);
}

static uint32_t scatter_fifth(uint32_t plane) {
    const uint32_t w = quad(plane);
    uint32_t bits = 0;
    for (uint32_t j = 0; j < 8; j++)
        bits |= ((w >> j & 0x01010101u) * 0x01020408u >> 24 & 15u) << 4 * j;
    return bits;
}

static inline void pack_nibbles(nibble_format f, const uint8_t * block, uint8_t * tile, uint32_t n) {
    const uint64_t low = 0x0f0f0f0f0f0f0f0fu;
    const uint64_t a = load64(block + f.low);
    const uint64_t b = load64(block + f.low + 8);
    uint8_t * q = tile + 4 * n;
    store32(q, join8(a & low));
    store32(q + CHUNK, join8(b & low));
    store32(q + 2 * CHUNK, join8(a >> 4 & low));
    store32(q + 3 * CHUNK, join8(b >> 4 & low));
    if (f.fifth) store32(q + Q4_QUANTS, gather_fifth(load32(block + f.low - 4)));
    if (f.power) {
        tile[f.quants + n] = block[0];
        return;
    }
    memcpy(tile + f.quants + 2 * n, block, 2);
    if (f.minimum) memcpy(tile + f.quants + SCALES + 2 * n, block + 2, 2);
}

static inline void unpack_nibbles(nibble_format f, const uint8_t * tile, uint32_t n, uint8_t * block) {
    const uint8_t * q = tile + 4 * n;
    if (f.power) {
        block[0] = tile[f.quants + n];
    } else {
        memcpy(block, tile + f.quants + 2 * n, 2);
    }
    if (f.minimum) memcpy(block + 2, tile + f.quants + SCALES + 2 * n, 2);
    if (f.fifth) store32(block + f.low - 4, scatter_fifth(load32(q + Q4_QUANTS)));
    store64(block + f.low, split8(load32(q)) | split8(load32(q + 2 * CHUNK)) << 4);
    store64(block + f.low + 8, split8(load32(q + CHUNK)) | split8(load32(q + 3 * CHUNK)) << 4);
}

static const int8_t MXFP4_VALUES[16] = {TB_MXFP4_VALUES(0)};

// Q1_0, Q2_0 and NVFP4, whose blocks are several tiles long: `part` is one of them, 32 k. Blocks of the first two are
// an FP16 scale, then quants in k order from the lowest bits on; one of 1 bit is worth 2q - 1, one of 2 bits q - 1.
// Those of NVFP4 are four scales, then eight bytes for each 16 k, of which byte j holds k = j and, above it, k = j + 8.
static uint32_t parts_of(uint32_t type) { return is_k_quant(type) ? 1 : tb_tile_k(type) / TILE; }

// Four pairs of bits to a byte each, and back.
static uint32_t spread_pairs(uint32_t x) { return (x | x << 6 | x << 12 | x << 18) & 0x03030303u; }

static uint32_t join_pairs(uint32_t x) { return (x | x >> 6 | x >> 12 | x >> 18) & 0xffu; }

// A part into column n of its tile, and back into a block that may have other parts already.
static void pack_part(uint32_t type, const uint8_t * block, uint32_t part, uint8_t * tile, uint32_t n) {
    const uint64_t low = 0x0f0f0f0f0f0f0f0fu;
    uint8_t *to = tile + 4 * n, *scale = tile + tb_type_of(type)->quant_bytes;
    if (type == TB_NVFP4_COL) {
        for (uint32_t h = 0; h < 2; h++, to += 2 * CHUNK) {
            const uint64_t q = load64(block + 4 + 16 * part + 8 * h);
            store32(to, join8(q & low));
            store32(to + CHUNK, join8(q >> 4 & low));
            scale[32 * h + n] = block[2 * part + h];
        }
        return;
    }
    memcpy(scale + 2 * n, block, 2);
    if (type == TB_Q1_0_COL) {
        store32(to, gather_fifth(load32(block + 2 + 4 * part)));
        return;
    }
    for (uint32_t c = 0; c < 2; c++) {
        uint32_t w = 0;
        for (uint32_t j = 0; j < 4; j++)
            w |= spread_pairs(block[2 + 8 * part + 4 * c + j]) << 2 * j;
        store32(to + CHUNK * c, quad(w));
    }
}

static void unpack_part(uint32_t type, const uint8_t * tile, uint32_t n, uint32_t part, uint8_t * block) {
    const uint8_t *from = tile + 4 * n, *scale = tile + tb_type_of(type)->quant_bytes;
    if (type == TB_NVFP4_COL) {
        for (uint32_t h = 0; h < 2; h++, from += 2 * CHUNK) {
            store64(block + 4 + 16 * part + 8 * h, split8(load32(from)) | split8(load32(from + CHUNK)) << 4);
            block[2 * part + h] = scale[32 * h + n];
        }
        return;
    }
    memcpy(block, scale + 2 * n, 2);
    if (type == TB_Q1_0_COL) {
        store32(block + 2 + 4 * part, scatter_fifth(load32(from)));
        return;
    }
    for (uint32_t c = 0; c < 2; c++) {
        const uint32_t w = quad(load32(from + CHUNK * c));
        for (uint32_t j = 0; j < 4; j++)
            block[2 + 8 * part + 4 * c + j] = (uint8_t)join_pairs(w >> 2 * j & 0x03030303u);
    }
}

static void part_values(uint32_t type, const uint8_t * block, uint32_t part, float * out) {
    if (type == TB_NVFP4_COL) {
        for (uint32_t i = 0; i < TILE; i++) {
            const uint8_t byte = block[4 + 16 * part + i / 16 * 8 + i % 8];
            out[i] = tb_small_to_float(block[2 * part + i / 16]) * (float)MXFP4_VALUES[i & 8 ? byte >> 4 : byte & 15];
        }
        return;
    }
    const uint32_t bits = type == TB_Q1_0_COL ? 1 : 2;
    const uint8_t * q = block + 2 + 4 * bits * part;
    const float d = tb_half_to_float(tb_load16(block));
    for (uint32_t i = 0; i < TILE; i++) {
        const int value = q[i * bits / 8] >> i * bits % 8 & (bits == 1 ? 1 : 3);
        out[i] = d * (float)(bits == 1 ? 2 * value - 1 : value - 1);
    }
}

// What the bits of a quant stand for: their value less an offset, or what a table has.
typedef struct {
    int offset;
    const int8_t * table; // of 16 entries, or NULL
} code_book;

static code_book code_book_of(uint32_t source) {
    switch (source) {
    case TB_Q4_0:
        return (code_book){8, NULL};
    case TB_Q5_0:
        return (code_book){16, NULL};
    case TB_IQ4_NL:
        return (code_book){0, IQ4_NL_VALUES};
    case TB_MXFP4:
        return (code_book){0, MXFP4_VALUES};
    default: // Q4_1, Q5_1
        return (code_book){0, NULL};
    }
}

// ggml 8-bit block: FP16 scale, 32 signed bytes in k order.
static void pack_block_8(const uint8_t * block, uint8_t * tile, uint32_t n) {
    for (uint32_t c = 0; c < 8; c++) {
        store32(tile + CHUNK * c + 4 * n, quad(load32(block + 2 + 4 * c)));
    }
    memcpy(tile + Q8_QUANTS + 2 * n, block, 2);
}

static void unpack_block_8(const uint8_t * tile, uint32_t n, uint8_t * block) {
    memcpy(block, tile + Q8_QUANTS + 2 * n, 2);
    for (uint32_t c = 0; c < 8; c++) {
        store32(block + 2 + 4 * c, quad(load32(tile + CHUNK * c + 4 * n)));
    }
}

// Of those formats that most files have, which the compiler then knows.
static const nibble_format USUAL_NIBBLES = {TB_QUANTS(4), 0, 0, 0, 2};

static int is_usual(nibble_format f) { return !f.power && !f.fifth && !f.minimum; }

int tb_pack_panel(uint32_t type, uint64_t k, uint32_t rows, const void * src, size_t row_stride, void * panel) {
    if (!is_column(type)) return TB_E_UNSUPPORTED;
    if (bad_panel(type, k, rows)) return TB_E_SHAPE;
    if (is_k_quant(type)) {
        k_pack_panel(type, k, rows, (const uint8_t *)src, row_stride, (uint8_t *)panel);
        return TB_OK;
    }
    const size_t tile_bytes = tb_tile_bytes(type);
    const size_t block_bytes = tb_type_size(tb_tiled_source(type));
    const int wide = is_8bit(type);
    const uint32_t parts = parts_of(type);
    const nibble_format nibbles = nibbles_of(type);
    for (uint64_t kt = 0; kt < k / TILE; kt++) {
        uint8_t * tile = (uint8_t *)panel + kt * tile_bytes;
        const uint8_t * block = (const uint8_t *)src + kt / parts * block_bytes;
        if (rows < TILE) memset(tile, 0, tile_bytes);
        if (parts > 1) {
            for (uint32_t n = 0; n < rows; n++)
                pack_part(type, block + n * row_stride, (uint32_t)(kt % parts), tile, n);
        } else if (wide) {
            for (uint32_t n = 0; n < rows; n++)
                pack_block_8(block + n * row_stride, tile, n);
        } else if (is_usual(nibbles)) {
            for (uint32_t n = 0; n < rows; n++)
                pack_nibbles(USUAL_NIBBLES, block + n * row_stride, tile, n);
        } else {
            for (uint32_t n = 0; n < rows; n++)
                pack_nibbles(nibbles, block + n * row_stride, tile, n);
        }
    }
    return TB_OK;
}

int tb_unpack_panel(uint32_t type, uint64_t k, uint32_t rows, const void * panel, void * dst, size_t row_stride) {
    if (!is_column(type)) return TB_E_UNSUPPORTED;
    if (bad_panel(type, k, rows)) return TB_E_SHAPE;
    if (is_k_quant(type)) {
        k_unpack_panel(type, k, rows, (const uint8_t *)panel, (uint8_t *)dst, row_stride);
        return TB_OK;
    }
    const size_t tile_bytes = tb_tile_bytes(type);
    const size_t block_bytes = tb_type_size(tb_tiled_source(type));
    const int wide = is_8bit(type);
    const uint32_t parts = parts_of(type);
    const nibble_format nibbles = nibbles_of(type);
    for (uint64_t kt = 0; kt < k / TILE; kt++) {
        const uint8_t * tile = (const uint8_t *)panel + kt * tile_bytes;
        uint8_t * block = (uint8_t *)dst + kt / parts * block_bytes;
        if (parts > 1) {
            for (uint32_t n = 0; n < rows; n++)
                unpack_part(type, tile, n, (uint32_t)(kt % parts), block + n * row_stride);
        } else if (wide) {
            for (uint32_t n = 0; n < rows; n++)
                unpack_block_8(tile, n, block + n * row_stride);
        } else if (is_usual(nibbles)) {
            for (uint32_t n = 0; n < rows; n++)
                unpack_nibbles(USUAL_NIBBLES, tile, n, block + n * row_stride);
        } else {
            for (uint32_t n = 0; n < rows; n++)
                unpack_nibbles(nibbles, tile, n, block + n * row_stride);
        }
    }
    return TB_OK;
}

// Of a row of the ggml type that a tiled type holds.
static size_t row_bytes(uint32_t type, uint64_t k) {
    const uint32_t source = tb_tiled_source(type);
    return k / tb_type_block(source) * tb_type_size(source);
}

int tb_pack(uint32_t type, uint64_t k, uint64_t n, const void * src, void * tiles) {
    if (!is_column(type)) return TB_E_UNSUPPORTED;
    if (tb_tiled_bytes(type, k, n) == 0) return TB_E_SHAPE;
    const size_t row = row_bytes(type, k);
    const size_t panel = k / TILE * tb_tile_bytes(type);
    for (uint64_t nt = 0; nt * TILE < n; nt++) {
        const uint32_t rows = n - nt * TILE < TILE ? (uint32_t)(n - nt * TILE) : TILE;
        const int st =
            tb_pack_panel(type, k, rows, (const uint8_t *)src + nt * TILE * row, row, (uint8_t *)tiles + nt * panel);
        if (st != TB_OK) return st;
    }
    return TB_OK;
}

int tb_unpack(uint32_t type, uint64_t k, uint64_t n, const void * tiles, void * dst) {
    if (!is_column(type)) return TB_E_UNSUPPORTED;
    if (tb_tiled_bytes(type, k, n) == 0) return TB_E_SHAPE;
    const size_t row = row_bytes(type, k);
    const size_t panel = k / TILE * tb_tile_bytes(type);
    for (uint64_t nt = 0; nt * TILE < n; nt++) {
        const uint32_t rows = n - nt * TILE < TILE ? (uint32_t)(n - nt * TILE) : TILE;
        const int st =
            tb_unpack_panel(type, k, rows, (const uint8_t *)tiles + nt * panel, (uint8_t *)dst + nt * TILE * row, row);
        if (st != TB_OK) return st;
    }
    return TB_OK;
}

// Where the scale of element (k, n) of a tile is, by grouping.
static inline uint32_t group_of(int column, uint32_t k, uint32_t n) {
    return column ? n : ((k >> 1) * 64 + 2 * n + (k & 1)) >> 5;
}

int tb_dequantize_panel(uint32_t type, uint64_t k, uint32_t rows, const void * panel, float * dst) {
    if (!tb_type_is_tiled(type)) return TB_E_UNSUPPORTED;
    if (bad_panel(type, k, rows)) return TB_E_SHAPE;
    if (is_k_quant(type)) {
        k_dequantize_panel(type, k, rows, (const uint8_t *)panel, dst);
        return TB_OK;
    }
    const tb_type_info * info = tb_type_of(type);
    const int column = is_column(type), wide = is_8bit(type);
    const nibble_format nibbles = nibbles_of(type);
    const uint32_t parts = parts_of(type);
    const code_book book = code_book_of(info->source);
    float values[32];
    for (int q = 0; q < 32; q++)
        values[q] = (float)(book.table ? book.table[q & 15] : q - book.offset);
    for (uint64_t kt = 0; kt < k / TILE; kt++) {
        const uint8_t * tile = (const uint8_t *)panel + kt * info->tile_bytes;
        for (uint32_t n = 0; n < rows && parts > 1; n++) {
            uint8_t block[4 + 16]; // with one part
            unpack_part(type, tile, n, 0, block);
            part_values(type, block, 0, dst + n * k + kt * TILE);
        }
        if (parts > 1) continue;
        float d[32], minimum[32];
        for (uint32_t g = 0; g < 32; g++) {
            const uint8_t * scales = tile + info->quant_bytes;
            d[g] = scale_at(nibbles, scales, g);
            minimum[g] = nibbles.minimum ? scale_at(nibbles, scales + SCALES, g) : 0.0f;
        }
        for (uint32_t n = 0; n < rows; n++) {
            float * out = dst + n * k + kt * TILE;
            for (uint32_t i = 0; i < TILE; i++) {
                const float scale = d[group_of(column, i, n)];
                if (wide) {
                    const uint32_t kk = i & 3;
                    out[i] = scale * (float)(int8_t)tile[CHUNK * (i >> 2) + 4 * n + 2 * (kk & 1) + (kk >> 1)];
                    continue;
                }
                const uint32_t v = (i & 7) >> 1, at = 4 * n + 2 * (i & 1) + (v & 1);
                const uint8_t byte = tile[CHUNK * (i >> 3) + at];
                const uint32_t fifth = nibbles.fifth ? tile[Q4_QUANTS + at] >> (i >> 2) & 1u : 0;
                const uint32_t q = (v >> 1 ? byte >> 4 : byte & 15u) | fifth << 4;
                out[i] = scale * values[q];
                if (nibbles.minimum) out[i] += minimum[n];
            }
        }
    }
    return TB_OK;
}

int tb_dequantize_row(uint32_t ggml_type, uint64_t n, const void * src, float * dst) {
    const uint8_t * p = (const uint8_t *)src;
    if (ggml_type == TB_F32) {
        memcpy(dst, src, n * 4);
        return TB_OK;
    }
    if (ggml_type == TB_F16 || ggml_type == TB_BF16) {
        for (uint64_t i = 0; i < n; i++) {
            const uint16_t h = tb_load16(p + 2 * i);
            dst[i] = ggml_type == TB_F16 ? tb_half_to_float(h) : tb_bf16_to_float(h);
        }
        return TB_OK;
    }
    const uint32_t tiled = tb_tiled_column(ggml_type);
    if (tiled == TB_TYPE_COUNT) return TB_E_UNSUPPORTED;
    if (n % tb_type_block(ggml_type) != 0) return TB_E_SHAPE;
    if (is_k_quant(tiled)) {
        k_dequantize_row(tiled, n, p, dst);
        return TB_OK;
    }
    const size_t block_bytes = tb_type_size(ggml_type);
    const uint32_t parts = parts_of(tiled);
    for (uint64_t part = 0; part < n / TILE && parts > 1; part++)
        part_values(tiled, p + part / parts * block_bytes, (uint32_t)(part % parts), dst + part * TILE);
    if (parts > 1) return TB_OK;
    const nibble_format f = nibbles_of(tiled);
    const code_book book = code_book_of(ggml_type);
    for (uint64_t b = 0; b < n / TILE; b++, p += block_bytes, dst += TILE) {
        const float d = scale_at(f, p, 0);
        if (ggml_type == TB_Q8_0) {
            for (uint32_t i = 0; i < TILE; i++)
                dst[i] = d * (float)(int8_t)p[2 + i];
            continue;
        }
        uint8_t q[TILE];
        for (uint32_t i = 0; i < 16; i++) {
            q[i] = p[f.low + i] & 15;
            q[i + 16] = p[f.low + i] >> 4;
        }
        if (f.fifth) {
            const uint32_t bits = load32(p + f.low - 4);
            for (uint32_t i = 0; i < TILE; i++)
                q[i] |= (uint8_t)((bits >> i & 1u) << 4);
        }
        if (book.table) {
            for (uint32_t i = 0; i < TILE; i++)
                dst[i] = d * (float)book.table[q[i]];
        } else {
            for (uint32_t i = 0; i < TILE; i++)
                dst[i] = d * (float)((int)q[i] - book.offset);
        }
        if (f.minimum) {
            const float minimum = tb_half_to_float(tb_load16(p + 2));
            for (uint32_t i = 0; i < TILE; i++)
                dst[i] += minimum;
        }
    }
    return TB_OK;
}
