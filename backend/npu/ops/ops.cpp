// The op table, and what ops.h declares for all op files.
#include "ops/ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace tb::npu {

const op_entry & op_table(uint32_t code) {
    static const op_entry none = {nullptr, nullptr};
    switch (code) {
#define TILEBEAM_CASE(CODE, NAME)                                                                                      \
    case TB_OP_##CODE:                                                                                                 \
        return NAME##_entry;
        TILEBEAM_OPS(TILEBEAM_CASE)
#undef TILEBEAM_CASE
    default:
        return none;
    }
}

bool dense_rows(const view & v) { return v.ne(0) <= 1 || v.nb(0) == tb_type_size(v.type()); }

namespace {

const uint8_t * element(const view & v, const uint8_t * row, int64_t i) {
    return row + i / tb_type_block(v.type()) * v.nb(0);
}

uint8_t * element(const view & v, uint8_t * row, int64_t i) { return row + i / tb_type_block(v.type()) * v.nb(0); }

template <class T> void copy_strided(int64_t n, const void * src, int64_t src_stride, void * dst, int64_t dst_stride) {
    for (int64_t i = 0; i < n; i++) {
        std::memcpy(static_cast<uint8_t *>(dst) + i * dst_stride, static_cast<const uint8_t *>(src) + i * src_stride,
                    sizeof(T));
    }
}

// Elements of `size` bytes: 2 or 4.
void copy_elements(unsigned size, int64_t n, const void * src, int64_t src_stride, void * dst, int64_t dst_stride) {
    (size == 2 ? copy_strided<uint16_t> : copy_strided<uint32_t>)(n, src, src_stride, dst, dst_stride);
}

} // namespace

const float * load_run(const kernel_table & k, const view & v, const uint8_t * row, int64_t first, int64_t n,
                       float * buffer) {
    const uint8_t * src = element(v, row, first);
    if (dense_rows(v)) {
        if (v.type() == TB_F32) {
            return reinterpret_cast<const float *>(src);
        }
        k.vec.to_f32[v.type()](n, src, buffer);
        return buffer;
    }
    const unsigned size = tb_type_size(v.type());
    uint32_t bits[run_elements];
    for (int64_t i = 0; i < n; i += run_elements) {
        const int64_t m = std::min(n - i, run_elements);
        copy_elements(size, m, src + i * v.nb(0), v.nb(0), bits, size);
        k.vec.to_f32[v.type()](m, bits, buffer + i);
    }
    return buffer;
}

float * run_target(const view & v, uint8_t * row, int64_t first, float * buffer) {
    return v.type() == TB_F32 && dense_rows(v) ? reinterpret_cast<float *>(element(v, row, first)) : buffer;
}

void store_run(const kernel_table & k, const view & v, uint8_t * row, int64_t first, int64_t n, const float * x) {
    uint8_t * dst = element(v, row, first);
    if (dense_rows(v)) {
        if (static_cast<const void *>(dst) != x) {
            k.vec.from_f32[v.type()](n, x, dst);
        }
        return;
    }
    const unsigned size = tb_type_size(v.type());
    uint32_t bits[run_elements];
    for (int64_t i = 0; i < n; i += run_elements) {
        const int64_t m = std::min(n - i, run_elements);
        k.vec.from_f32[v.type()](m, x + i, bits);
        copy_elements(size, m, bits, size, dst + i * v.nb(0), v.nb(0));
    }
}

void copy_run(const kernel_table & k, const view & from, const uint8_t * src, int64_t src_at, const view & to,
              uint8_t * dst, int64_t dst_at, int64_t n) {
    if (from.type() == to.type()) {
        const uint8_t * x = element(from, src, src_at);
        uint8_t * y = element(to, dst, dst_at);
        const unsigned size = tb_type_size(from.type());
        if (dense_rows(from) && dense_rows(to)) {
            std::memmove(y, x, static_cast<size_t>(n / tb_type_block(from.type()) * size));
        } else {
            copy_elements(size, n, x, from.nb(0), y, to.nb(0));
        }
        return;
    }
    float buffer[run_elements];
    for (int64_t at = 0; at < n; at += run_elements) {
        const int64_t m = std::min(n - at, run_elements);
        if (to.type() == TB_F32 && dense_rows(to)) {
            float * out = reinterpret_cast<float *>(element(to, dst, dst_at + at));
            const float * x = load_run(k, from, src, src_at + at, m, out);
            if (x != out) {
                std::memmove(out, x, static_cast<size_t>(m) * sizeof(float));
            }
        } else {
            store_run(k, to, dst, dst_at + at, m, load_run(k, from, src, src_at + at, m, buffer));
        }
    }
}

float alibi_slope(float max_bias, int64_t h, int64_t n_head) {
    if (!(max_bias > 0.0f)) {
        return 1.0f;
    }
    // heads up to the largest power of two get powers of one base, the rest the odd powers of its square root's base
    const int64_t power = int64_t{1} << static_cast<int>(std::floor(std::log2(static_cast<double>(n_head))));
    const float steps = static_cast<float>(power);
    if (h < power) {
        return std::pow(std::pow(2.0f, -max_bias / steps), static_cast<float>(h + 1));
    }
    return std::pow(std::pow(2.0f, -(max_bias / 2.0f) / steps), static_cast<float>(2 * (h - power) + 1));
}

} // namespace tb::npu
