// The op table, and what ops.h declares for all op files.
#include "ops/ops.h"

#include <cmath>
#include <cstring>

namespace tb::npu {

const op_entry & op_table(uint32_t code) {
    static const op_entry none = {nullptr, nullptr};
    switch (code) {
    case TB_OP_MUL_MAT:
        return mul_mat_entry;
    case TB_OP_FLASH_ATTN:
        return flash_attn_entry;
    case TB_OP_RMS_NORM:
        return rms_norm_entry;
    case TB_OP_MUL:
        return mul_entry;
    case TB_OP_ADD:
        return add_entry;
    case TB_OP_ROPE:
        return rope_entry;
    case TB_OP_SET_ROWS:
        return set_rows_entry;
    case TB_OP_GLU:
        return glu_entry;
    case TB_OP_SCALE:
        return scale_entry;
    case TB_OP_SOFT_MAX:
        return soft_max_entry;
    case TB_OP_GET_ROWS:
        return get_rows_entry;
    case TB_OP_CPY:
        return cpy_entry;
    case TB_OP_SUB:
        return sub_entry;
    case TB_OP_DIV:
        return div_entry;
    case TB_OP_UNARY:
        return unary_entry;
    case TB_OP_LOG:
        return log_entry;
    case TB_OP_CLAMP:
        return clamp_entry;
    case TB_OP_FILL:
        return fill_entry;
    case TB_OP_SUM:
        return sum_entry;
    case TB_OP_CUMSUM:
        return cumsum_entry;
    case TB_OP_ARGMAX:
        return argmax_entry;
    case TB_OP_ARGSORT:
        return argsort_entry;
    case TB_OP_TOP_K:
        return top_k_entry;
    case TB_OP_PAD:
        return pad_entry;
    case TB_OP_MUL_MAT_ID:
        return mul_mat_id_entry;
    case TB_OP_SUM_ROWS:
        return sum_rows_entry;
    case TB_OP_REPEAT:
        return repeat_entry;
    case TB_OP_NORM:
        return norm_entry;
    case TB_OP_SQR:
        return sqr_entry;
    case TB_OP_SQRT:
        return sqrt_entry;
    case TB_OP_CONCAT:
        return concat_entry;
    case TB_OP_L2_NORM:
        return l2_norm_entry;
    case TB_OP_ADD_ID:
        return add_id_entry;
    case TB_OP_SSM_CONV:
        return ssm_conv_entry;
    case TB_OP_SSM_SCAN:
        return ssm_scan_entry;
    case TB_OP_GATED_DELTA_NET:
        return gated_delta_net_entry;
    case TB_OP_LIGHTNING_INDEXER:
        return lightning_indexer_entry;
    case TB_OP_DSV4_HC_PRE:
        return hc_pre_entry;
    case TB_OP_DSV4_HC_POST:
        return hc_post_entry;
    case TB_OP_DSV4_HC_COMB:
        return hc_comb_entry;
    case TB_OP_ARANGE:
        return arange_entry;
    case TB_OP_POOL_2D:
        return pool_2d_entry;
    case TB_OP_ROPE_BACK:
        return rope_back_entry;
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

// Strided elements to and from a dense run of the same type; size 2 or 4.
template <class T> void gather(int64_t n, const uint8_t * src, int64_t stride, T * dst) {
    for (int64_t i = 0; i < n; i++) {
        std::memcpy(dst + i, src + i * stride, sizeof(T));
    }
}

template <class T> void scatter(int64_t n, const T * src, uint8_t * dst, int64_t stride) {
    for (int64_t i = 0; i < n; i++) {
        std::memcpy(dst + i * stride, src + i, sizeof(T));
    }
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
    if (v.type() == TB_F32) {
        gather(n, src, v.nb(0), buffer);
    } else if (tb_type_size(v.type()) == 4) {
        int32_t bits[run_elements];
        for (int64_t i = 0; i < n; i += run_elements) {
            const int64_t m = n - i < run_elements ? n - i : run_elements;
            gather(m, src + i * v.nb(0), v.nb(0), bits);
            k.vec.to_f32[v.type()](m, bits, buffer + i);
        }
    } else {
        uint16_t bits[run_elements];
        for (int64_t i = 0; i < n; i += run_elements) {
            const int64_t m = n - i < run_elements ? n - i : run_elements;
            gather(m, src + i * v.nb(0), v.nb(0), bits);
            k.vec.to_f32[v.type()](m, bits, buffer + i);
        }
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
    } else if (v.type() == TB_F32) {
        scatter(n, x, dst, v.nb(0));
    } else if (tb_type_size(v.type()) == 4) {
        int32_t bits[run_elements];
        for (int64_t i = 0; i < n; i += run_elements) {
            const int64_t m = n - i < run_elements ? n - i : run_elements;
            k.vec.from_f32[v.type()](m, x + i, bits);
            scatter(m, bits, dst + i * v.nb(0), v.nb(0));
        }
    } else {
        uint16_t bits[run_elements];
        for (int64_t i = 0; i < n; i += run_elements) {
            const int64_t m = n - i < run_elements ? n - i : run_elements;
            k.vec.from_f32[v.type()](m, x + i, bits);
            scatter(m, bits, dst + i * v.nb(0), v.nb(0));
        }
    }
}

namespace {

template <class T>
void copy_strided(int64_t n, const uint8_t * src, int64_t src_stride, uint8_t * dst, int64_t dst_stride) {
    for (int64_t i = 0; i < n; i++) {
        std::memcpy(dst + i * dst_stride, src + i * src_stride, sizeof(T));
    }
}

} // namespace

void copy_run(const kernel_table & k, const view & from, const uint8_t * src, int64_t src_at, const view & to,
              uint8_t * dst, int64_t dst_at, int64_t n) {
    if (from.type() == to.type()) {
        const uint8_t * x = element(from, src, src_at);
        uint8_t * y = element(to, dst, dst_at);
        const unsigned size = tb_type_size(from.type());
        if (dense_rows(from) && dense_rows(to)) {
            std::memmove(y, x, static_cast<size_t>(n / tb_type_block(from.type()) * size));
        } else if (size == 2) {
            copy_strided<uint16_t>(n, x, from.nb(0), y, to.nb(0));
        } else if (size == 4) {
            copy_strided<uint32_t>(n, x, from.nb(0), y, to.nb(0));
        } else {
            copy_strided<uint64_t>(n, x, from.nb(0), y, to.nb(0));
        }
        return;
    }
    float buffer[run_elements];
    for (int64_t at = 0; at < n; at += run_elements) {
        const int64_t m = n - at < run_elements ? n - at : run_elements;
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
