// Types with blocks of 256 k: block panels in and out of ggml's super-blocks, and the reference dequantize. k_panels.h
// has the panels' layout.
#include "k_panels.h"

#include "grid_blocks.h"
#include "half.h"
#include "tile.h"
#include "tilebeam/k_panels.h"

#define NONE (-1)
#define DIGIT_BYTES 52 // that 256 digits to the base of 3 take

// Where a super-block of ggml has its parts (ggml-common.h); NONE: it has no such part.
typedef struct {
    int nibbles, half; // two quants, `half` k apart, in each byte; `half` bytes, then the next 2 * half k
    int pairs;         // two bits a quant: 128 k, 32 apart, share 32 bytes
    int ones;          // a bit a quant: 256 k, 32 apart, share 32 bytes
    int digits;        // five quants a byte, to the base of 3
    int scales, n_scales;
    int d, dmin;
} shape;

static const shape SHAPES[] = {
    [TB_Q2_K_COL] = {NONE, 0, 16, NONE, NONE, 0, 16, 80, 82},
    [TB_Q3_K_COL] = {NONE, 0, 32, 0, NONE, 96, 12, 108, NONE},
    [TB_Q4_K_COL] = {16, 32, NONE, NONE, NONE, 4, 12, 0, 2},
    [TB_Q5_K_COL] = {48, 32, NONE, 16, NONE, 4, 12, 0, 2},
    [TB_Q6_K_COL] = {0, 64, 128, NONE, NONE, 192, 16, 208, NONE},
    [TB_IQ4_XS_COL] = {8, 16, NONE, NONE, NONE, 2, 6, 0, NONE},
    [TB_TQ2_0_COL] = {NONE, 0, 0, NONE, NONE, 0, 0, 64, NONE},
    [TB_TQ1_0_COL] = {NONE, 0, NONE, NONE, 0, 0, 0, 52, NONE},
    // of grid types (grid_blocks.h) only which parts a panel has
    [TB_IQ2_XXS_COL] = {NONE, 0, 0, 0, NONE, 0, 4, 0, NONE},
    [TB_IQ2_XS_COL] = {NONE, 0, 0, 0, NONE, 0, 8, 0, NONE},
    [TB_IQ2_S_COL] = {NONE, 0, 0, 0, NONE, 0, 8, 0, NONE},
    [TB_IQ1_M_COL] = {NONE, 0, 0, 0, NONE, 0, 8, 0, NONE},
    [TB_IQ3_XXS_COL] = {0, 0, NONE, NONE, NONE, 0, 4, 0, NONE},
    [TB_IQ3_S_COL] = {0, 0, NONE, NONE, NONE, 0, 4, 0, NONE},
    [TB_IQ1_S_COL] = {NONE, 0, 0, NONE, NONE, 0, 4, 0, NONE},
};

static size_t block_bytes(uint32_t type) { return tb_type_size(tb_tiled_source(type)); }

static size_t k_panel_bytes(uint32_t type) { return tb_tile_bytes(type) * (TB_K_BLOCK / TILE); }

// What the lowest of the pairs of bits, or of the single bits, counts: they stand above the other bits.
static int pairs_shift(const shape * s) { return s->nibbles == NONE ? 0 : 4; }

static int ones_shift(const shape * s) { return s->nibbles == NONE ? 2 : 4; }

// ---- ggml's super-blocks

// Number i of six(h): k_panels.h.
static int six_bits(const uint8_t * s, int h, int i) {
    const int part = i / (h / 2), at = i % (h / 2);
    const int low = s[(part & 1) * (h / 2) + at] >> (part >> 1) * 4 & 15;
    return low | (s[h + at] >> part * 2 & 3) << 4;
}

// The same into bytes that are zero.
static void set_six_bits(uint8_t * s, int h, int i, int value) {
    const int part = i / (h / 2), at = i % (h / 2);
    s[(part & 1) * (h / 2) + at] |= (uint8_t)((value & 15) << (part >> 1) * 4);
    s[h + at] |= (uint8_t)(value >> 4 << part * 2);
}

// ggml's scales as the panel has them. Q4_K, Q5_K: bytes t and t + 4 have six bits of scale and minimum t, and above
// them the top bits of t + 4, whose low bits are byte t + 8. IQ4_XS: two bytes of top bits in order, then four of low
// nibbles. Every other type has the panel's order.
static inline void read_scales(uint32_t type, const uint8_t * in, panel_column * c) {
    if (type == TB_IQ4_XS_COL) {
        memset(c->scales, 0, sizeof(c->scales));
        for (int t = 0; t < 8; t++)
            set_six_bits(c->scales, 4, t, (in[2 + t / 2] >> t % 2 * 4 & 15) | (in[t / 4] >> t % 4 * 2 & 3) << 4);
        return;
    }
    memcpy(c->scales, in, (size_t)SHAPES[type].n_scales);
    if (type != TB_Q4_K_COL && type != TB_Q5_K_COL) return;
    for (int t = 0; t < 4; t++) {
        c->scales[t] = (uint8_t)((in[t] & 15) | in[t + 4] << 4);
        c->scales[t + 4] = in[t + 8];
        c->scales[t + 8] = (uint8_t)(in[t] >> 4 | (in[t + 4] & 0xf0));
    }
}

// Into bytes that are zero.
static void write_scales(uint32_t type, const panel_column * c, uint8_t * out) {
    for (int t = 0; t < 8 && type == TB_IQ4_XS_COL; t++) {
        const int scale = six_bits(c->scales, 4, t);
        out[2 + t / 2] |= (uint8_t)((scale & 15) << t % 2 * 4);
        out[t / 4] |= (uint8_t)(scale >> 4 << t % 4 * 2);
    }
    if (type == TB_IQ4_XS_COL) return;
    memcpy(out, c->scales, (size_t)SHAPES[type].n_scales);
    if (type != TB_Q4_K_COL && type != TB_Q5_K_COL) return;
    for (int t = 0; t < 4; t++) {
        out[t] = (uint8_t)((c->scales[t] & 15) | c->scales[t + 8] << 4);
        out[t + 4] = (uint8_t)(c->scales[t] >> 4 | (c->scales[t + 8] & 0xf0));
        out[t + 8] = c->scales[t + 4];
    }
}

static void read_quants(const shape * s, const uint8_t * b, panel_column * c) {
    memset(c->q, 0, sizeof(c->q));
    if (s->digits != NONE) memcpy(c->q, b + s->digits, DIGIT_BYTES);
    for (int k = 0; k < TB_K_BLOCK && s->nibbles != NONE; k += 2 * s->half) {
        for (int i = 0; i < s->half; i++) {
            c->q[k + i] = b[s->nibbles + k / 2 + i] & 15;
            c->q[k + s->half + i] = b[s->nibbles + k / 2 + i] >> 4;
        }
    }
    for (int t = 0; t < 8 && s->pairs != NONE; t++) {
        const uint8_t * in = b + s->pairs + t / 4 * 32;
        for (int i = 0; i < 32; i++)
            c->q[32 * t + i] |= (uint8_t)((in[i] >> t % 4 * 2 & 3) << pairs_shift(s));
    }
    for (int t = 0; t < 8 && s->ones != NONE; t++) {
        for (int i = 0; i < 32; i++)
            c->q[32 * t + i] |= (uint8_t)((b[s->ones + i] >> t & 1) << ones_shift(s));
    }
}

// Into bytes that are zero.
static void write_quants(const shape * s, const panel_column * c, uint8_t * b) {
    if (s->digits != NONE) memcpy(b + s->digits, c->q, DIGIT_BYTES);
    for (int k = 0; k < TB_K_BLOCK && s->nibbles != NONE; k += 2 * s->half) {
        for (int i = 0; i < s->half; i++)
            b[s->nibbles + k / 2 + i] = (uint8_t)((c->q[k + i] & 15) | c->q[k + s->half + i] << 4);
    }
    for (int t = 0; t < 8 && s->pairs != NONE; t++) {
        uint8_t * out = b + s->pairs + t / 4 * 32;
        for (int i = 0; i < 32; i++)
            out[i] |= (uint8_t)((c->q[32 * t + i] >> pairs_shift(s) & 3) << t % 4 * 2);
    }
    for (int t = 0; t < 8 && s->ones != NONE; t++) {
        for (int i = 0; i < 32; i++)
            b[s->ones + i] |= (uint8_t)((c->q[32 * t + i] >> ones_shift(s) & 1) << t);
    }
}

static void from_block(uint32_t type, const uint8_t * block, panel_column * c) {
    if (grid_from_block(type, block, c)) return;
    const shape * s = &SHAPES[type];
    c->d = tb_load16(block + s->d);
    c->dmin = s->dmin == NONE ? 0 : tb_load16(block + s->dmin);
    read_scales(type, block + s->scales, c);
    read_quants(s, block, c);
}

static void to_block(uint32_t type, const panel_column * c, uint8_t * block) {
    if (grid_to_block(type, c, block)) return;
    const shape * s = &SHAPES[type];
    memset(block, 0, block_bytes(type));
    tb_store16(block + s->d, c->d);
    if (s->dmin != NONE) tb_store16(block + s->dmin, c->dmin);
    write_scales(type, c, block + s->scales);
    write_quants(s, c, block);
}

// ---- block panels

static void scatter_plane(uint8_t * q, uint32_t quads, uint32_t width, uint32_t mask, int shift, uint32_t w) {
    w = quad(w);
    for (uint32_t j = 0; j < quads; j++) {
        uint8_t * at = q + 4 * j;
        store32(at, load32(at) | (w >> width * j & mask) << shift);
    }
}

// Both halves in quad order.
static inline uint64_t quads(uint64_t w) {
    const uint64_t middle = (w ^ w >> 8) & 0x0000ff000000ff00u;
    return w ^ middle ^ middle << 8;
}

// Four bytes of a quad, and of the one 16 k behind it, in quad order.
static inline uint64_t two_quads(const uint8_t * b) { return quads(load32(b) | (uint64_t)load32(b + 16) << 32); }

// One super-block into column n of a panel, word by word: a byte for each quant on the way would cost as much again.
// Inlined for each type, whose shape the compiler then knows.
static inline __attribute__((always_inline)) void pack_column(uint32_t type, const uint8_t * b, uint8_t * panel,
                                                              uint32_t n) {
    const shape * s = &SHAPES[type];
    const uint32_t low = 0x0f0f0f0fu;
    uint8_t * to = panel + 4 * n;
    for (int k = 0; k < TB_K_BLOCK && s->nibbles != NONE; k += 2 * s->half) {
        for (int i = 0; i < s->half; i += 8) {
            const uint64_t both = quads(load64(b + s->nibbles + k / 2 + i));
            const uint32_t first = (uint32_t)both, second = (uint32_t)(both >> 32);
            store32(to + (k + i) / 8 * CHUNK, (first & low) | (second & low) << 4);
            store32(to + (k + s->half + i) / 8 * CHUNK, (first >> 4 & low) | (second & ~low));
        }
    }
    if (s->nibbles != NONE) to += TB_K_NIBBLES;
    for (int t = 0; t < 8 && s->pairs != NONE; t += 4) {
        uint64_t q[4];
        for (int j = 0; j < 4; j++)
            q[j] = two_quads(b + s->pairs + 8 * t + 4 * j);
        for (int i = 0; i < 4; i++) {
            uint64_t w = 0;
            for (int j = 0; j < 4; j++)
                w |= (q[j] >> 2 * i & 0x0303030303030303u) << 2 * j;
            store32(to + 2 * (t + i) * CHUNK, (uint32_t)w);
            store32(to + (2 * (t + i) + 1) * CHUNK, (uint32_t)(w >> 32));
        }
    }
    if (s->pairs != NONE) to += TB_K_PAIRS;
    if (s->ones != NONE) {
        uint64_t q[4];
        for (int j = 0; j < 4; j++)
            q[j] = two_quads(b + s->ones + 4 * j);
        for (int t = 0; t < 8; t++) {
            uint64_t w = 0;
            for (int j = 0; j < 4; j++)
                w |= (q[j] >> t & 0x0101010101010101u) << j;
            store32(to + t * CHUNK, (uint32_t)w | (uint32_t)(w >> 32) << 4);
        }
        to += TB_K_ONES;
    }
    for (int i = 0; i < DIGIT_BYTES && s->digits != NONE; i += 4, to += CHUNK)
        store32(to, quad(load32(b + s->digits + i)));
    uint8_t * fields = to - 4 * n;
    panel_column c;
    read_scales(type, b + s->scales, &c);
    for (int i = 0; i < s->n_scales; i++, fields += 32)
        fields[n] = c.scales[i];
    memcpy(fields + 2 * n, b + s->d, 2);
    if (s->dmin != NONE) memcpy(fields + TB_K_HALVES + 2 * n, b + s->dmin, 2);
}

// A plane of so many bits of 4 * quads quants into a word, as scatter_plane reads it.
static uint32_t gather_plane(const uint8_t * q, uint32_t quads, uint32_t width, uint32_t mask, int shift) {
    uint32_t w = 0;
    for (uint32_t j = 0; j < quads; j++)
        w |= (load32(q + 4 * j) >> shift & mask) << width * j;
    return quad(w);
}

// A panel of a type whose quants are read off a grid.
static void pack_grids(uint32_t type, uint64_t k, uint32_t rows, const uint8_t * src, size_t row_stride,
                       uint8_t * panel) {
    const shape * s = &SHAPES[type];
    const size_t block = block_bytes(type), bytes = k_panel_bytes(type);
    for (uint64_t b = 0; b < k / TB_K_BLOCK; b++) {
        if (rows < TILE) memset(panel + b * bytes, 0, bytes);
        for (uint32_t n = 0; n < rows; n++) {
            panel_column c;
            grid_from_block(type, src + n * row_stride + b * block, &c);
            uint8_t * to = panel + b * bytes;
            for (uint32_t i = 0; i < TB_K_BLOCK / 8 && s->nibbles != NONE; i++, to += CHUNK)
                store32(to + 4 * n, join8(load64(c.q + 8 * i) & 0x0f0f0f0f0f0f0f0fu));
            for (uint32_t i = 0; i < 16 && s->pairs != NONE; i++, to += CHUNK)
                store32(to + 4 * n, gather_plane(c.q + 16 * i, 4, 2, 0x03030303u, pairs_shift(s)));
            for (uint32_t t = 0; t < 8 && s->ones != NONE; t++, to += CHUNK)
                store32(to + 4 * n, gather_plane(c.q + 32 * t, 8, 1, 0x01010101u, ones_shift(s)));
            for (int i = 0; i < s->n_scales; i++, to += 32)
                to[n] = c.scales[i];
            tb_store16(to + 2 * n, c.d);
            if (s->dmin != NONE) tb_store16(to + TB_K_HALVES + 2 * n, c.dmin);
        }
    }
}

static void load_column(uint32_t type, const uint8_t * panel, uint32_t n, panel_column * c) {
    const shape * s = &SHAPES[type];
    memset(c->q, 0, sizeof(c->q));
    for (uint32_t i = 0; i < TB_K_BLOCK / 8 && s->nibbles != NONE; i++)
        store64(c->q + 8 * i, split8(load32(panel + i * CHUNK + 4 * n)));
    if (s->nibbles != NONE) panel += TB_K_NIBBLES;
    for (uint32_t i = 0; i < 16 && s->pairs != NONE; i++)
        scatter_plane(c->q + 16 * i, 4, 2, 0x03030303u, pairs_shift(s), load32(panel + i * CHUNK + 4 * n));
    if (s->pairs != NONE) panel += TB_K_PAIRS;
    for (uint32_t t = 0; t < 8 && s->ones != NONE; t++)
        scatter_plane(c->q + 32 * t, 8, 1, 0x01010101u, ones_shift(s), load32(panel + t * CHUNK + 4 * n));
    if (s->ones != NONE) panel += TB_K_ONES;
    for (uint32_t i = 0; i < DIGIT_BYTES && s->digits != NONE; i += 4, panel += CHUNK)
        store32(c->q + i, quad(load32(panel + 4 * n)));
    for (int i = 0; i < s->n_scales; i++, panel += 32)
        c->scales[i] = panel[n];
    c->d = tb_load16(panel + 2 * n);
    c->dmin = s->dmin == NONE ? 0 : tb_load16(panel + TB_K_HALVES + 2 * n);
}

static inline __attribute__((always_inline)) void pack_panel(uint32_t type, uint64_t k, uint32_t rows,
                                                             const uint8_t * src, size_t row_stride, uint8_t * panel) {
    const size_t block = block_bytes(type), bytes = k_panel_bytes(type);
    for (uint64_t b = 0; b < k / TB_K_BLOCK; b++) {
        if (rows < TILE) memset(panel + b * bytes, 0, bytes);
        for (uint32_t n = 0; n < rows; n++) {
            const uint8_t * from = src + n * row_stride + b * block;
            // Of so many rows the hardware does not foresee what is read next: behind a row's end, that of the next
            // panel.
            const uint8_t * next = b + 1 < k / TB_K_BLOCK ? from + block : src + (n + TILE) * row_stride;
            for (size_t line = 0; line < block + 64; line += 64)
                __builtin_prefetch(next + line);
            pack_column(type, from, panel + b * bytes, n);
        }
    }
}

void k_pack_panel(uint32_t type, uint64_t k, uint32_t rows, const uint8_t * src, size_t row_stride, uint8_t * panel) {
    switch (type) {
    case TB_Q4_K_COL:
        return pack_panel(TB_Q4_K_COL, k, rows, src, row_stride, panel);
    case TB_Q5_K_COL:
        return pack_panel(TB_Q5_K_COL, k, rows, src, row_stride, panel);
    case TB_Q6_K_COL:
        return pack_panel(TB_Q6_K_COL, k, rows, src, row_stride, panel);
    case TB_Q3_K_COL:
        return pack_panel(TB_Q3_K_COL, k, rows, src, row_stride, panel);
    case TB_Q2_K_COL:
        return pack_panel(TB_Q2_K_COL, k, rows, src, row_stride, panel);
    case TB_IQ4_XS_COL:
        return pack_panel(TB_IQ4_XS_COL, k, rows, src, row_stride, panel);
    case TB_TQ2_0_COL:
        return pack_panel(TB_TQ2_0_COL, k, rows, src, row_stride, panel);
    case TB_TQ1_0_COL:
        return pack_panel(TB_TQ1_0_COL, k, rows, src, row_stride, panel);
    default:
        return pack_grids(type, k, rows, src, row_stride, panel);
    }
}

void k_unpack_panel(uint32_t type, uint64_t k, uint32_t rows, const uint8_t * panel, uint8_t * dst, size_t row_stride) {
    const size_t block = block_bytes(type), bytes = k_panel_bytes(type);
    for (uint64_t b = 0; b < k / TB_K_BLOCK; b++) {
        for (uint32_t n = 0; n < rows; n++) {
            panel_column c;
            load_column(type, panel + b * bytes, n, &c);
            to_block(type, &c, dst + n * row_stride + b * block);
        }
    }
}

// ---- values

// Scale and minimum of 16 k, the i-th of the block, and what a quant of 0 means.
typedef struct {
    int scale, min, zero;
} factors;

static factors factors_of(uint32_t type, const uint8_t * s, int i) {
    switch (type) {
    case TB_Q2_K_COL:
        return (factors){s[i] & 15, s[i] >> 4, 0};
    case TB_Q3_K_COL:
        return (factors){six_bits(s, 8, i) - 32, 0, -4};
    case TB_TQ1_0_COL:
    case TB_TQ2_0_COL:
        return (factors){1, 0, -1};
    case TB_IQ4_XS_COL:
        return (factors){six_bits(s, 4, i / 2) - 32, 0, 0};
    case TB_Q6_K_COL:
        return (factors){(int8_t)s[i], 0, -32};
    default:
        return (factors){six_bits(s, 8, i / 2), six_bits(s, 8, 8 + i / 2), 0};
    }
}

// The digit of TQ1_0 that is quant k.
static uint8_t digit(const uint8_t * bytes, int k) {
    static const uint8_t powers[] = {1, 3, 9, 27, 81};
    const int i = k < 160 ? k / 32 : k < 240 ? (k - 160) / 16 : (k - 240) / 4;
    const int at = k < 160 ? k % 32 : k < 240 ? 32 + k % 16 : 48 + k % 4;
    return (uint8_t)((uint8_t)(bytes[at] * powers[i]) * 3 >> 8);
}

// In the order in which ggml multiplies: d * scale first, then by the quant.
static void column_values(uint32_t type, const panel_column * c, float * out) {
    if (grid_values(type, c, out)) return;
    const int minima = SHAPES[type].dmin != NONE;
    const float d = tb_half_to_float(c->d), dmin = tb_half_to_float(c->dmin);
    for (int i = 0; i < TB_K_BLOCK / 16; i++, out += 16) {
        const factors f = factors_of(type, c->scales, i);
        const float scale = d * (float)f.scale, min = dmin * (float)f.min;
        for (int k = 0; k < 16; k++) {
            const uint8_t q = type == TB_TQ1_0_COL ? digit(c->q, 16 * i + k) : c->q[16 * i + k];
            out[k] = scale * (float)(type == TB_IQ4_XS_COL ? IQ4_NL_VALUES[q] : q + f.zero);
            if (minima) out[k] -= min;
        }
    }
}

void k_dequantize_panel(uint32_t type, uint64_t k, uint32_t rows, const uint8_t * panel, float * dst) {
    for (uint64_t b = 0; b < k / TB_K_BLOCK; b++) {
        for (uint32_t n = 0; n < rows; n++) {
            panel_column c;
            load_column(type, panel + b * k_panel_bytes(type), n, &c);
            column_values(type, &c, dst + n * k + b * TB_K_BLOCK);
        }
    }
}

void k_dequantize_row(uint32_t type, uint64_t n, const uint8_t * src, float * dst) {
    for (uint64_t b = 0; b < n / TB_K_BLOCK; b++) {
        panel_column c;
        from_block(type, src + b * block_bytes(type), &c);
        column_values(type, &c, dst + b * TB_K_BLOCK);
    }
}
