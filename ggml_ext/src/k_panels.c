// K-quants: block panels in and out of ggml's super-blocks, and the reference dequantize. k_panels.h has the layout.
#include "k_panels.h"

#include "half.h"
#include "tile.h"
#include "tilebeam/k_panels.h"

// Where the fields of ggml's super-blocks begin (ggml-common.h).
enum {
    // Q4_K: d, dmin, scales[12], qs[128]; Q5_K: d, dmin, scales[12], qh[32], qs[128]; Q6_K: ql[128], qh[64],
    // scales[16], d
    Q45_K_SCALES = 4,
    Q4_K_QS = 16,
    Q5_K_QH = 16,
    Q5_K_QS = 48,
    Q6_K_QH = 128,
    Q6_K_SCALES = 192,
    Q6_K_D = 208,
};

// One column's 256 quants, in k order, and what scales them.
typedef struct {
    uint8_t q[TB_K_BLOCK];
    uint8_t scale[16]; // Q6_K: int8
    uint8_t min[8];
    uint16_t d, dmin;
} column;

static size_t block_bytes(uint32_t type) { return tb_type_size(tb_tiled_source(type)); }

static size_t k_panel_bytes(uint32_t type) { return tb_tile_bytes(type) * (TB_K_BLOCK / TILE); }

static uint32_t fields_at(uint32_t type) {
    return type == TB_Q4_K_COL ? TB_Q4_K_FIELDS : type == TB_Q5_K_COL ? TB_Q5_K_FIELDS : TB_Q6_K_FIELDS;
}

// Scale and minimum of sub-block t: bits 0 to 5 of bytes t and t + 4; from sub-block 4 on, four bits of byte t + 4 and
// the top two bits of the bytes before.
static void unpack_scales(const uint8_t * s, column * c) {
    for (int t = 0; t < 4; t++) {
        c->scale[t] = s[t] & 63;
        c->min[t] = s[t + 4] & 63;
        c->scale[t + 4] = (uint8_t)((s[t + 8] & 15) | s[t] >> 6 << 4);
        c->min[t + 4] = (uint8_t)(s[t + 8] >> 4 | s[t + 4] >> 6 << 4);
    }
}

static void pack_scales(const column * c, uint8_t * s) {
    for (int t = 0; t < 4; t++) {
        s[t] = (uint8_t)(c->scale[t] | c->scale[t + 4] >> 4 << 6);
        s[t + 4] = (uint8_t)(c->min[t] | c->min[t + 4] >> 4 << 6);
        s[t + 8] = (uint8_t)((c->scale[t + 4] & 15) | (c->min[t + 4] & 15) << 4);
    }
}

// Quants of Q4_K and Q5_K: 64 k share 32 bytes, the first half in low nibbles. Fifth bits: bit t of byte k % 32.
static void from_q45(const uint8_t * b, column * c, int fifth) {
    const uint8_t * qs = b + (fifth ? Q5_K_QS : Q4_K_QS);
    c->d = tb_load16(b);
    c->dmin = tb_load16(b + 2);
    unpack_scales(b + Q45_K_SCALES, c);
    for (int k = 0; k < TB_K_BLOCK; k++) {
        const uint8_t byte = qs[k / 64 * 32 + k % 32];
        const int high = fifth ? b[Q5_K_QH + k % 32] >> (k / 32) & 1 : 0;
        c->q[k] = (uint8_t)((k / 32 % 2 ? byte >> 4 : byte & 15) | high << 4);
    }
}

static void to_q45(const column * c, uint8_t * b, int fifth) {
    uint8_t * qs = b + (fifth ? Q5_K_QS : Q4_K_QS);
    memset(b, 0, tb_type_size(fifth ? TB_Q5_K : TB_Q4_K));
    tb_store16(b, c->d);
    tb_store16(b + 2, c->dmin);
    pack_scales(c, b + Q45_K_SCALES);
    for (int k = 0; k < TB_K_BLOCK; k++) {
        qs[k / 64 * 32 + k % 32] |= (uint8_t)((c->q[k] & 15) << (k / 32 % 2 * 4));
        if (fifth) b[Q5_K_QH + k % 32] |= (uint8_t)(c->q[k] >> 4 << (k / 32));
    }
}

// Q6_K: 128 k share 64 bytes of low nibbles (k and k + 64) and 32 bytes of bits 4, 5 (k, k + 32, k + 64, k + 96).
static void from_q6(const uint8_t * b, column * c) {
    c->d = tb_load16(b + Q6_K_D);
    memcpy(c->scale, b + Q6_K_SCALES, 16);
    for (int k = 0; k < TB_K_BLOCK; k++) {
        const uint8_t low = b[k / 128 * 64 + k % 64], high = b[Q6_K_QH + k / 128 * 32 + k % 32];
        c->q[k] = (uint8_t)((k % 128 < 64 ? low & 15 : low >> 4) | (high >> (k % 128 / 32 * 2) & 3) << 4);
    }
}

static void to_q6(const column * c, uint8_t * b) {
    memset(b, 0, tb_type_size(TB_Q6_K));
    tb_store16(b + Q6_K_D, c->d);
    memcpy(b + Q6_K_SCALES, c->scale, 16);
    for (int k = 0; k < TB_K_BLOCK; k++) {
        b[k / 128 * 64 + k % 64] |= (uint8_t)((c->q[k] & 15) << (k % 128 < 64 ? 0 : 4));
        b[Q6_K_QH + k / 128 * 32 + k % 32] |= (uint8_t)(c->q[k] >> 4 << (k % 128 / 32 * 2));
    }
}

// Bits `mask` above the low four of a tile's 32 quants, `width` of them a quad, as the words of a plane.
static uint32_t gather_plane(const uint8_t * q, uint32_t first_quad, uint32_t quads, uint32_t width, uint32_t mask) {
    uint32_t w = 0;
    for (uint32_t j = 0; j < quads; j++)
        w |= (load32(q + 4 * (first_quad + j)) >> 4 & mask) << width * j;
    return quad(w);
}

static void scatter_plane(uint8_t * q, uint32_t first_quad, uint32_t quads, uint32_t width, uint32_t mask, uint32_t w) {
    w = quad(w);
    for (uint32_t j = 0; j < quads; j++) {
        uint8_t * at = q + 4 * (first_quad + j);
        store32(at, load32(at) | (w >> width * j & mask) << 4);
    }
}

static void store_column(uint32_t type, const column * c, uint8_t * panel, uint32_t n) {
    for (uint32_t i = 0; i < TB_K_BLOCK / 8; i++)
        store32(panel + i * CHUNK + 4 * n, join8(load64(c->q + 8 * i) & 0x0f0f0f0f0f0f0f0fu));
    uint8_t * plane = panel + TB_K_QUANTS + 4 * n;
    for (uint32_t t = 0; t < 8; t++) {
        const uint8_t * q = c->q + 32 * t;
        if (type == TB_Q5_K_COL) store32(plane + t * TB_Q5_K_PLANE, gather_plane(q, 0, 8, 1, 0x01010101u));
        for (uint32_t h = 0; h < 2 && type == TB_Q6_K_COL; h++)
            store32(plane + t * TB_Q6_K_PLANE + h * CHUNK, gather_plane(q, 4 * h, 4, 2, 0x03030303u));
    }
    uint8_t * fields = panel + fields_at(type);
    if (type == TB_Q6_K_COL) {
        for (uint32_t i = 0; i < 16; i++)
            fields[32 * i + n] = c->scale[i];
        tb_store16(fields + TB_Q6_K_SCALES + 2 * n, c->d);
        return;
    }
    for (uint32_t t = 0; t < 8; t++)
        fields[32 * t + n] = (uint8_t)((c->scale[t] & 15) | (c->min[t] & 15) << 4);
    for (uint32_t r = 0; r < 4; r++)
        fields[TB_K_LOW + 32 * r + n] =
            (uint8_t)(c->scale[r] >> 4 | c->scale[r + 4] >> 4 << 2 | c->min[r] >> 4 << 4 | c->min[r + 4] >> 4 << 6);
    tb_store16(fields + TB_K_LOW + TB_K_HIGH + 2 * n, c->d);
    tb_store16(fields + TB_K_LOW + TB_K_HIGH + TB_K_HALVES + 2 * n, c->dmin);
}

static void load_column(uint32_t type, const uint8_t * panel, uint32_t n, column * c) {
    for (uint32_t i = 0; i < TB_K_BLOCK / 8; i++)
        store64(c->q + 8 * i, split8(load32(panel + i * CHUNK + 4 * n)));
    const uint8_t * plane = panel + TB_K_QUANTS + 4 * n;
    for (uint32_t t = 0; t < 8; t++) {
        uint8_t * q = c->q + 32 * t;
        if (type == TB_Q5_K_COL) scatter_plane(q, 0, 8, 1, 0x01010101u, load32(plane + t * TB_Q5_K_PLANE));
        for (uint32_t h = 0; h < 2 && type == TB_Q6_K_COL; h++)
            scatter_plane(q, 4 * h, 4, 2, 0x03030303u, load32(plane + t * TB_Q6_K_PLANE + h * CHUNK));
    }
    const uint8_t * fields = panel + fields_at(type);
    if (type == TB_Q6_K_COL) {
        for (uint32_t i = 0; i < 16; i++)
            c->scale[i] = fields[32 * i + n];
        c->d = tb_load16(fields + TB_Q6_K_SCALES + 2 * n);
        return;
    }
    for (uint32_t t = 0; t < 8; t++) {
        const uint8_t low = fields[32 * t + n], high = fields[TB_K_LOW + 32 * (t % 4) + n];
        c->scale[t] = (uint8_t)((low & 15) | (high >> (t / 4 * 2) & 3) << 4);
        c->min[t] = (uint8_t)(low >> 4 | (high >> (4 + t / 4 * 2) & 3) << 4);
    }
    c->d = tb_load16(fields + TB_K_LOW + TB_K_HIGH + 2 * n);
    c->dmin = tb_load16(fields + TB_K_LOW + TB_K_HIGH + TB_K_HALVES + 2 * n);
}

static void from_block(uint32_t type, const uint8_t * block, column * c) {
    if (type == TB_Q6_K_COL) {
        from_q6(block, c);
    } else {
        from_q45(block, c, type == TB_Q5_K_COL);
    }
}

void k_pack_panel(uint32_t type, uint64_t k, uint32_t rows, const uint8_t * src, size_t row_stride, uint8_t * panel) {
    const size_t block = block_bytes(type), bytes = k_panel_bytes(type);
    for (uint64_t b = 0; b < k / TB_K_BLOCK; b++) {
        memset(panel + b * bytes, 0, bytes);
        for (uint32_t n = 0; n < rows; n++) {
            column c;
            from_block(type, src + n * row_stride + b * block, &c);
            store_column(type, &c, panel + b * bytes, n);
        }
    }
}

void k_unpack_panel(uint32_t type, uint64_t k, uint32_t rows, const uint8_t * panel, uint8_t * dst, size_t row_stride) {
    const size_t block = block_bytes(type), bytes = k_panel_bytes(type);
    for (uint64_t b = 0; b < k / TB_K_BLOCK; b++) {
        for (uint32_t n = 0; n < rows; n++) {
            column c;
            uint8_t * out = dst + n * row_stride + b * block;
            load_column(type, panel + b * bytes, n, &c);
            if (type == TB_Q6_K_COL) {
                to_q6(&c, out);
            } else {
                to_q45(&c, out, type == TB_Q5_K_COL);
            }
        }
    }
}

// In the order in which ggml multiplies: d * scale first, then by the quant.
static void column_values(uint32_t type, const column * c, float * out) {
    const float d = tb_half_to_float(c->d), dmin = tb_half_to_float(c->dmin);
    for (int k = 0; k < TB_K_BLOCK; k++) {
        if (type == TB_Q6_K_COL) {
            out[k] = d * (float)(int8_t)c->scale[k / 16] * (float)(c->q[k] - 32);
        } else {
            const float scale = d * (float)c->scale[k / 32], min = dmin * (float)c->min[k / 32];
            out[k] = scale * (float)c->q[k] - min;
        }
    }
}

void k_dequantize_panel(uint32_t type, uint64_t k, uint32_t rows, const uint8_t * panel, float * dst) {
    for (uint64_t b = 0; b < k / TB_K_BLOCK; b++) {
        for (uint32_t n = 0; n < rows; n++) {
            column c;
            load_column(type, panel + b * k_panel_bytes(type), n, &c);
            column_values(type, &c, dst + n * k + b * TB_K_BLOCK);
        }
    }
}

void k_dequantize_row(uint32_t type, uint64_t n, const uint8_t * src, float * dst) {
    for (uint64_t b = 0; b < n / TB_K_BLOCK; b++) {
        column c;
        from_block(type, src + b * block_bytes(type), &c);
        column_values(type, &c, dst + b * TB_K_BLOCK);
    }
}
