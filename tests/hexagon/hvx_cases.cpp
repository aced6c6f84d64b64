// Runs kernels on what it is sent: the far end of tests/test_hvx.py. Compiled for Hexagon (run by qemu-hexagon) and for
// the host over the emulated intrinsics, so that one request can be answered by both.
//
// stdin: requests, each eight uint32 (op, set, five parameters, bytes) and that many bytes. stdout: answers, each a
// uint32 with the number of bytes and the bytes. Ends with its input; exit status 1 for a request that makes no sense.
#include <cstdint>
#include <cstring>
#include <unistd.h>

#include "hvx_intrinsic_cases.h"
#include "kernels/hvx/dequantize.h"
#include "kernels/hvx/hmx_model.h"
#include "kernels/kernels.h"

using namespace tb::npu;

namespace {

constexpr size_t capacity = 8 << 20;

// Operands lie at the end of their memory, 64-byte aligned like tiles, so that a sanitizer sees what is read past them.
alignas(128) uint8_t storage[capacity];
uint8_t * input;
alignas(128) uint8_t output[capacity];
alignas(128) uint8_t work[capacity];

enum op : uint32_t {
    op_gemm,
    op_dequantize,
    op_tiles,
    op_exp2,
    op_to_half,
    op_to_float,
    op_round,
    op_intrinsic,
    op_fp16,
    op_attention,
};
enum set : uint32_t { set_portable, set_hvx };

struct request {
    uint32_t op, set, p[5], bytes;
};

bool read_all(void * to, size_t n) {
    for (uint8_t * at = static_cast<uint8_t *>(to); n != 0;) {
        const ssize_t got = read(0, at, n);
        if (got <= 0) return false;
        at += got;
        n -= static_cast<size_t>(got);
    }
    return true;
}

bool write_all(const void * from, size_t n) {
    for (const uint8_t * at = static_cast<const uint8_t *>(from); n != 0;) {
        const ssize_t put = write(1, at, n);
        if (put <= 0) return false;
        at += put;
        n -= static_cast<size_t>(put);
    }
    return true;
}

// p: format, rows, k_tiles, add. in: panel, float x[rows][32 * k_tiles], float out[rows][32]. out: the last again.
size_t gemm(const kernel_table & t, const request & r) {
    const gemm_int8 & kernel = t.gemm.int8[r.p[0]];
    const int rows = static_cast<int>(r.p[1]);
    const int64_t tiles = r.p[2];
    const size_t row_bytes = static_cast<size_t>(tiles) * 128, out_bytes = r.p[1] * size_t{128};
    const uint8_t * out = input + r.bytes - out_bytes;
    std::memcpy(output, out, out_bytes);
    // groups of as many rows as the kernel takes
    for (int first = 0, n; first < rows; first += n) {
        n = rows - first < kernel.rows ? rows - first : kernel.rows;
        float * at[gemm_max_rows];
        for (int m = 0; m < n; m++) {
            at[m] = reinterpret_cast<float *>(output) + 32 * (first + m);
            const uint8_t * row = out - static_cast<size_t>(rows - first - m) * row_bytes;
            const float * x = reinterpret_cast<const float *>(row);
            if (r.p[0] >= gemm_q4_k) {
                t.gemm.quantize_k(x, tiles, work, n, m);
            } else {
                t.gemm.quantize(x, tiles, kernel.offset, work, n, m);
            }
        }
        kernel.run({input, work, tiles, n, r.p[3] != 0, at});
    }
    return out_bytes;
}

// p: type, tiles. To floats [k][32], or to FP16 tiles.
size_t dequantize(const kernel_table & t, const uint32_t (&p)[5]) {
    t.gemm.dequantize(p[0], input, p[1], reinterpret_cast<float *>(output));
    return p[1] * 4096;
}

size_t tiles(const uint32_t (&p)[5]) {
    const hvx::dequantize_function f = hvx::dequantize_of(p[0]);
    if (f == nullptr) return 0;
    f(input, p[1], reinterpret_cast<uint16_t *>(output));
    return p[1] * 2048;
}

// The two products of the FP16 numerics. p: rows, cells, dim, type of K and V. in: float q[rows][dim], k[cells][dim],
// v[cells][dim], float p[rows][attention_tile_cells]. out: float s[rows][cells], o[rows][dim].
size_t attention(const kernel_table & t, const uint32_t (&p)[5]) {
    const int rows = static_cast<int>(p[0]), cells = static_cast<int>(p[1]), dim = static_cast<int>(p[2]);
    const cell_type type = p[3] == TB_F16 ? cell_type::f16 : cell_type::f32;
    const size_t cell_bytes = p[2] * (p[3] == TB_F16 ? sizeof(uint16_t) : sizeof(float));
    const float * q[attention_tile_rows];
    const void *k[attention_tile_cells], *v[attention_tile_cells];
    float * o[attention_tile_rows];
    const uint8_t * from = input;
    float * out = reinterpret_cast<float *>(output);
    for (int r = 0; r < rows; r++, from += p[2] * sizeof(float)) {
        q[r] = reinterpret_cast<const float *>(from);
        o[r] = out + rows * cells + r * dim;
    }
    for (int c = 0; c < cells; c++) {
        k[c] = from + static_cast<size_t>(c) * cell_bytes;
        v[c] = from + static_cast<size_t>(cells + c) * cell_bytes;
    }
    float * s = reinterpret_cast<float *>(work);
    float * scratch = s + attention_tile_rows * attention_tile_cells;
    t.attention.fp16.scores({rows, cells, dim, q, k, type, s, scratch, {}});
    for (int r = 0; r < rows; r++)
        std::memcpy(out + r * cells, s + r * attention_tile_cells, p[1] * sizeof(float));
    from += 2 * p[1] * cell_bytes;
    t.attention.fp16.products(
        {rows, cells, dim, reinterpret_cast<const float *>(from), nullptr, v, type, o, scratch, {}});
    return static_cast<size_t>(rows) * static_cast<size_t>(cells + dim) * sizeof(float);
}

// p: type, rows, k_tiles. in: panel, float x[rows][32 * k_tiles]. out: float [rows][32].
size_t fp16(const kernel_table & t, const uint32_t (&p)[5]) {
    const gemm_fp16 & unit = t.gemm.fp16;
    const int rows = static_cast<int>(p[1]);
    const int64_t tiles = p[2];
    const size_t tile_bytes = tile_of(p[0]).bytes;
    uint16_t * panel = reinterpret_cast<uint16_t *>(work);
    uint16_t * group = panel + tiles * hmx::tile_halves;
    unit.dequantize(p[0], input, tiles, panel);
    const float * x = reinterpret_cast<const float *>(input + static_cast<size_t>(tiles) * tile_bytes);
    float * at[32];
    for (int m = 0; m < rows; m++) {
        unit.activations(x + m * tiles * 32, tiles, group, m);
        at[m] = reinterpret_cast<float *>(output) + 32 * m;
    }
    unit.run({panel, group, tiles, rows, at});
    return static_cast<size_t>(rows) * 128;
}

// Filled here, not by dispatch.cpp: on the host that knows nothing of emulated HVX.
const kernel_table & kernels_of(uint32_t set) {
    static const struct tables {
        kernel_table portable{}, hvx{};
        tables() {
            fill_portable(portable);
            fill_portable(hvx);
            fill_hvx(hvx);
        }
    } all;
    return set == set_hvx ? all.hvx : all.portable;
}

size_t answer(const request & r) {
    const kernel_table * t = &kernels_of(r.set);
    switch (r.op) {
    case op_gemm:
        return gemm(*t, r);
    case op_dequantize:
        return dequantize(*t, r.p);
    case op_tiles:
        return tiles(r.p);
    case op_exp2:
        t->attention.exp2_fp16(reinterpret_cast<uint16_t *>(input), reinterpret_cast<uint16_t *>(output), r.bytes / 2);
        return r.bytes;
    case op_to_half:
        t->vec.from_f32[TB_F16](r.bytes / 4, reinterpret_cast<float *>(input), output);
        return r.bytes / 2;
    case op_to_float:
        t->vec.to_f32[TB_F16](r.bytes / 2, input, reinterpret_cast<float *>(output));
        return r.bytes * 2;
    case op_round:
        std::memcpy(output, input, r.bytes);
        t->gemm.round_fp16(r.bytes / 4, reinterpret_cast<float *>(output));
        return r.bytes;
    case op_intrinsic:
        return hvx_cases::run(r.p[0], static_cast<int32_t>(r.p[1]), input, output);
    case op_fp16:
        return fp16(*t, r.p);
    case op_attention:
        return attention(*t, r.p);
    default:
        return 0;
    }
}

} // namespace

int main() {
    request r;
    while (read_all(&r, sizeof(r))) {
        if (r.bytes > capacity) return 1;
        input = storage + ((capacity - r.bytes) & ~size_t{63});
        if (!read_all(input, r.bytes)) return 1;
        const size_t n = answer(r);
        const uint32_t bytes = static_cast<uint32_t>(n);
        if (n == 0 || !write_all(&bytes, sizeof(bytes)) || !write_all(output, n)) return 1;
    }
    return 0;
}
