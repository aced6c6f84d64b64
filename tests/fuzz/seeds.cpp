// Inputs that do something sensible: every op with many types and shapes, and the other messages.
#include <cstring>
#include <initializer_list>

#include "unit.h"

namespace tb::fuzz {

namespace {

constexpr uint32_t work_file = 0, weight_file = 1, small_file = 2, result_file = 3;

int32_t bits(float x) {
    int32_t b;
    std::memcpy(&b, &x, sizeof b);
    return b;
}

// Builds one op; operands follow each other in their files.
class builder {
  public:
    builder(uint32_t code, const char * name) {
        std::memset(&op, 0, sizeof op);
        op.code = code;
        std::strncpy(op.name, name, sizeof op.name - 1);
        for (tb_tensor & t : op.src) {
            t.buffer = TB_NO_BUFFER;
        }
    }

    builder & dst(uint32_t type, std::initializer_list<uint32_t> ne) {
        op.dst = place(result_file, type, ne);
        return *this;
    }
    builder & src(uint32_t type, std::initializer_list<uint32_t> ne, uint32_t file = work_file) {
        op.src[op.n_src++] = place(file, type, ne);
        return *this;
    }
    builder & weights(uint32_t type, std::initializer_list<uint32_t> ne) { return src(type, ne, weight_file); }
    builder & absent() {
        op.n_src++;
        return *this;
    }
    builder & param(int i, int32_t value) {
        op.params[i] = value;
        return *this;
    }
    builder & param(int i, float value) { return param(i, bits(value)); }
    builder & fp16() {
        op.flags |= TB_FLAG_FP16;
        return *this;
    }
    // dst becomes the very elements of an operand.
    builder & in_place(int i) {
        op.dst = op.src[i];
        return *this;
    }
    // An operand's dimensions 0 and 1 change places, in its shape and in memory.
    builder & transposed(int i) {
        tb_tensor & t = op.src[i];
        std::swap(t.ne[0], t.ne[1]);
        std::swap(t.nb[0], t.nb[1]);
        return *this;
    }

    tb_op op;

  private:
    tb_tensor place(uint32_t file, uint32_t type, std::initializer_list<uint32_t> ne) {
        tb_tensor t{};
        t.buffer = file;
        t.type = type;
        int i = 0;
        for (const uint32_t n : ne) {
            t.ne[i++] = n;
        }
        while (i < 4) {
            t.ne[i++] = 1;
        }
        set_dense(t);
        t.offset = used[file];
        int empty;
        used[file] = (used[file] + tb_tensor_span(&t, &empty) + 63) / 64 * 64;
        return t;
    }

    uint64_t used[n_files] = {};
};

void add_mul_mats(std::vector<tb_op> & ops) {
    for (const uint32_t type :
         {TB_F32, TB_F16, TB_BF16, TB_Q4_0, TB_Q8_0, TB_IQ4_NL, TB_Q4_0_COL, TB_Q8_0_COL, TB_IQ4_NL_COL, TB_Q4_0_TILE,
          TB_Q8_0_TILE, TB_IQ4_NL_TILE, TB_Q5_0, TB_Q5_1_COL, TB_MXFP4_COL, TB_Q2_0, TB_NVFP4_COL}) {
        ops.push_back(builder(TB_OP_MUL_MAT_ID, "experts")
                          .dst(TB_F32, {64, 2, 5})
                          .weights(type, {64, 64, 4})
                          .src(TB_F32, {64, 1, 5})
                          .src(TB_I32, {2, 5})
                          .op);
        for (const uint32_t rows : {1u, 3u, 15u, 20u}) {
            const auto matrix = [&] {
                return builder(TB_OP_MUL_MAT, "mul_mat").dst(TB_F32, {64, rows}).weights(type, {64, 64});
            };
            ops.push_back(matrix().src(TB_F32, {64, rows}).op);
            ops.push_back(matrix().src(TB_F32, {64, rows}).fp16().op);
        }
    }
    // Few columns, many rows (the float panel), a long k (several stages), several matrices that repeat.
    ops.push_back(builder(TB_OP_MUL_MAT, "odd").dst(TB_F32, {7, 2}).weights(TB_F16, {33, 7}).src(TB_F16, {33, 2}).op);
    ops.push_back(
        builder(TB_OP_MUL_MAT, "rows").dst(TB_F32, {33, 100}).weights(TB_F16, {40, 33}).src(TB_F16, {40, 100}).op);
    ops.push_back(
        builder(TB_OP_MUL_MAT, "long").dst(TB_F32, {32, 1}).weights(TB_Q4_0, {1088, 32}).src(TB_F32, {1088, 1}).op);
    ops.push_back(builder(TB_OP_MUL_MAT, "batch")
                      .dst(TB_F32, {32, 2, 4, 3})
                      .weights(TB_Q8_0, {32, 32, 2, 1})
                      .src(TB_F32, {32, 2, 4, 3})
                      .op);
}

void add_attention(std::vector<tb_op> & ops) {
    for (const uint32_t type : {TB_F16, TB_F32, TB_BF16, TB_Q8_0, TB_Q4_0, TB_IQ4_NL}) {
        const auto attention = [&](uint32_t tokens, uint32_t heads, uint32_t cells) {
            return builder(TB_OP_FLASH_ATTN, "attention")
                .param(0, 0.125f)
                .dst(TB_F32, {32, heads, tokens})
                .src(TB_F32, {32, tokens, heads})
                .weights(type, {32, cells, 2})
                .weights(type, {32, cells, 2});
        };
        ops.push_back(attention(3, 4, 100).op);
        ops.push_back(attention(2, 2, 64).src(TB_F16, {64, 2}).param(1, 8.0f).op);
        ops.push_back(attention(1, 6, 120).src(TB_F16, {120, 1}).src(TB_F32, {6}).param(2, 30.0f).op);
    }
    ops.push_back(builder(TB_OP_FLASH_ATTN, "split") // few rows, many cells: threads share the cells
                      .param(0, 0.25f)
                      .dst(TB_F32, {16, 2, 1})
                      .src(TB_F32, {16, 1, 2})
                      .weights(TB_F16, {16, 640, 1})
                      .weights(TB_F16, {16, 640, 1})
                      .src(TB_F16, {640, 1})
                      .op);
    ops.push_back(builder(TB_OP_FLASH_ATTN, "streams")
                      .param(0, 1.0f)
                      .dst(TB_F32, {16, 2, 2, 2})
                      .src(TB_F32, {24, 2, 2, 2})
                      .weights(TB_F16, {24, 70, 1, 2})
                      .weights(TB_F16, {16, 70, 2, 1})
                      .src(TB_F16, {70, 4, 2, 2})
                      .op);
}

void add_rows(std::vector<tb_op> & ops) {
    for (const uint32_t type : {TB_F32, TB_F16, TB_BF16, TB_Q4_0, TB_Q8_0}) {
        ops.push_back(builder(TB_OP_SET_ROWS, "set_rows").dst(type, {64, 4}).src(TB_F32, {64, 2}).src(TB_I64, {2}).op);
        ops.push_back(
            builder(TB_OP_SET_ROWS, "cache").dst(type, {32, 8, 2}).src(TB_F16, {32, 3, 2}).src(TB_I32, {3}).op);
    }
    for (const uint32_t type : {TB_F32, TB_F16, TB_BF16, TB_Q4_0, TB_Q8_0, TB_IQ4_NL}) {
        ops.push_back(builder(TB_OP_GET_ROWS, "get_rows")
                          .dst(TB_F32, {32, 3, 2})
                          .weights(type, {32, 4, 2})
                          .src(TB_I32, {3, 2})
                          .op);
    }
    ops.push_back(builder(TB_OP_GET_ROWS, "numbers").dst(TB_I32, {5, 2}).weights(TB_I32, {5, 4}).src(TB_I32, {2}).op);
}

void add_elementwise(std::vector<tb_op> & ops) {
    for (const uint32_t code : {TB_OP_MUL, TB_OP_ADD}) {
        for (const uint32_t type : {TB_F32, TB_F16, TB_BF16}) {
            ops.push_back(builder(code, "repeat").dst(type, {48, 6}).src(TB_F32, {48, 6}).weights(type, {16, 1}).op);
        }
        ops.push_back(builder(code, "long").dst(TB_F32, {1500, 2}).src(TB_F32, {1500, 2}).src(TB_F16, {1, 2}).op);
        ops.push_back(builder(code, "in_place").src(TB_F32, {33, 3}).src(TB_F32, {33, 3}).in_place(0).op);
    }
    for (const uint32_t code : {TB_OP_RMS_NORM, TB_OP_NORM, TB_OP_L2_NORM}) {
        ops.push_back(builder(code, "norm").param(0, 1e-6f).dst(TB_F32, {70, 3}).src(TB_F32, {70, 3}).op);
    }
    ops.push_back(builder(TB_OP_SCALE, "scale").param(0, 2.0f).dst(TB_F16, {35, 3}).src(TB_F32, {35, 3}).op);
    ops.push_back(
        builder(TB_OP_SCALE, "across").param(1, 1.0f).dst(TB_F32, {9, 5}).src(TB_BF16, {5, 9}).transposed(0).op);
    for (int32_t kind = 0; kind < 7; ++kind) {
        const uint32_t type = kind % 3 == 0 ? TB_F32 : kind % 3 == 1 ? TB_F16 : TB_BF16;
        const auto glu = [&] { return builder(TB_OP_GLU, "glu").param(0, kind).param(2, 1.7f).param(3, 7.0f); };
        ops.push_back(glu().dst(type, {40, 3}).src(type, {80, 3}).param(1, kind % 2).op);
        ops.push_back(glu().dst(type, {41, 3}).src(type, {41, 3}).src(type, {41, 3}).op);
    }
    for (const uint32_t type : {TB_F32, TB_F16}) {
        ops.push_back(builder(TB_OP_SOFT_MAX, "soft_max")
                          .param(0, 0.5f)
                          .param(1, 8.0f)
                          .dst(TB_F32, {90, 3, 4})
                          .src(TB_F32, {90, 3, 4})
                          .src(type, {90, 4, 2})
                          .src(TB_F32, {4})
                          .op);
    }
    ops.push_back(builder(TB_OP_SOFT_MAX, "plain").param(0, 1.0f).dst(TB_F32, {1100}).src(TB_F32, {1100}).op);
}

// What sampling needs, and activations that stand alone.
void add_sampling(std::vector<tb_op> & ops) {
    for (const uint32_t code : {TB_OP_SUB, TB_OP_DIV}) {
        ops.push_back(builder(code, "repeat").dst(TB_F32, {48, 6}).src(TB_F16, {48, 6}).weights(TB_BF16, {48, 1}).op);
    }
    for (int32_t kind = 0; kind < TB_UNARY_KINDS; ++kind) {
        const uint32_t type = kind % 3 == 0 ? TB_F32 : kind % 3 == 1 ? TB_F16 : TB_BF16;
        const tb_op op = builder(TB_OP_UNARY, "unary").param(0, kind).dst(type, {37, 3}).src(type, {37, 3}).op;
        if (tb_op_check_shape(&op, nullptr) == TB_OK) { // some kinds have params of their own
            ops.push_back(op);
        }
    }
    const auto row = [](uint32_t code, const char * name) {
        return builder(code, name).param(0, -1.0f).param(1, 1.0f).dst(TB_F32, {1100, 2}).src(TB_F32, {1100, 2});
    };
    ops.push_back(row(TB_OP_LOG, "log").op);
    ops.push_back(row(TB_OP_SQR, "sqr").op);
    ops.push_back(row(TB_OP_SQRT, "sqrt").op);
    ops.push_back(row(TB_OP_CLAMP, "clamp").op);
    ops.push_back(row(TB_OP_FILL, "fill").op);
    ops.push_back(row(TB_OP_CUMSUM, "cumsum").op);
    ops.push_back(builder(TB_OP_SUM, "sum").dst(TB_F32, {1}).src(TB_F32, {300, 3}).op);
    for (const uint32_t type : {TB_F32, TB_F16, TB_BF16, TB_I32}) {
        ops.push_back(builder(TB_OP_REPEAT, "repeat").dst(type, {1100, 3, 2}).src(type, {1, 3}).op);
        ops.push_back(builder(TB_OP_REPEAT, "tile").dst(type, {35, 4, 1, 2}).src(type, {7, 2}).op);
        const auto concat = [type](int32_t dim) { return builder(TB_OP_CONCAT, "concat").param(0, dim); };
        ops.push_back(concat(0).dst(type, {1100, 2}).src(type, {1000, 2}).src(type, {100, 2}).op);
        ops.push_back(concat(2).dst(type, {33, 2, 3}).src(type, {33, 2, 1}).src(type, {33, 2, 2}).op);
    }
    ops.push_back(builder(TB_OP_SUM_ROWS, "sum_rows").dst(TB_F32, {1, 3}).src(TB_F32, {300, 3}).op);
    ops.push_back(builder(TB_OP_ARGMAX, "argmax").dst(TB_I32, {3}).src(TB_F32, {300, 3}).op);
    for (int32_t order = 0; order < 2; ++order) {
        ops.push_back(builder(TB_OP_ARGSORT, "argsort").param(0, order).dst(TB_I32, {260, 3}).src(TB_F32, {260, 3}).op);
        ops.push_back(builder(TB_OP_TOP_K, "top_k").dst(TB_I32, {5, 3}).src(TB_F32, {260, 3}).op);
        ops.push_back(builder(TB_OP_PAD, "pad")
                          .param(0, int32_t{2})
                          .param(1, int32_t{3})
                          .param(3, int32_t{1})
                          .param(8, order)
                          .dst(TB_F32, {45, 4})
                          .src(TB_F32, {40, 3})
                          .op);
    }
}

void add_ropes(std::vector<tb_op> & ops) {
    for (const int32_t mode : {0, 2}) {
        for (const uint32_t type : {TB_F32, TB_F16}) {
            const auto rope = [&] {
                return builder(TB_OP_ROPE, "rope")
                    .param(1, int32_t{24})
                    .param(2, mode)
                    .param(4, int32_t{2048})
                    .param(5, 10000.0f)
                    .param(6, 1.0f)
                    .param(8, 1.0f)
                    .param(9, 32.0f)
                    .param(10, 1.0f)
                    .dst(type, {32, 2, 3})
                    .src(type, {32, 2, 3})
                    .src(TB_I32, {3});
            };
            ops.push_back(rope().op);
            ops.push_back(ops.back());
            ops.back().code = TB_OP_ROPE_BACK;
            ops.push_back(rope().src(TB_F32, {12}).param(7, 1.0f).param(15, int32_t{8}).op);
        }
    }
    for (const int32_t mode : {TB_ROPE_MROPE, TB_ROPE_VISION, TB_ROPE_IMROPE}) {
        ops.push_back(builder(TB_OP_ROPE, "sections")
                          .param(1, int32_t{16})
                          .param(2, mode)
                          .param(5, 10000.0f)
                          .param(6, 1.0f)
                          .param(8, 1.0f)
                          .param(11, int32_t{4})
                          .param(12, int32_t{6})
                          .param(13, int32_t{6})
                          .dst(TB_F32, {32, 2, 3})
                          .src(TB_F32, {32, 2, 3})
                          .src(TB_I32, {12})
                          .op);
    }
}

// Ops of recurrent states, experts' biases, sparse attention and residual streams.
void add_families(std::vector<tb_op> & ops) {
    ops.push_back(builder(TB_OP_ADD_ID, "add_id")
                      .dst(TB_F32, {33, 2, 3})
                      .src(TB_F32, {33, 2, 3})
                      .weights(TB_F32, {33, 4})
                      .src(TB_I32, {2, 3})
                      .op);
    ops.push_back(
        builder(TB_OP_SSM_CONV, "conv").dst(TB_F32, {20, 5, 2}).src(TB_F32, {8, 20, 2}).weights(TB_F32, {4, 20}).op);
    for (const uint32_t type : {TB_F32, TB_F16, TB_BF16, TB_Q4_0, TB_Q8_0, TB_IQ4_NL}) {
        ops.push_back(builder(TB_OP_LIGHTNING_INDEXER, "indexer")
                          .dst(TB_F32, {70, 3, 1, 2})
                          .src(TB_F32, {32, 2, 3, 2})
                          .weights(type, {32, 1, 70, 2})
                          .src(TB_F32, {2, 3, 1, 2})
                          .src(TB_F16, {70, 3})
                          .op);
    }
    for (int32_t gated = 0; gated < 2; ++gated) {
        const auto pre = [&] {
            return builder(TB_OP_DSV4_HC_PRE, "pre")
                .param(0, 1.0f)
                .param(1, gated)
                .dst(TB_F32, {33, 3})
                .src(TB_F32, {33, 4, 3});
        };
        ops.push_back((gated != 0 ? pre().src(TB_F32, {33, 4, 3}) : pre().src(TB_F32, {4, 3})).op);
        const auto post = [] {
            return builder(TB_OP_DSV4_HC_POST, "post")
                .dst(TB_F32, {33, 4, 3})
                .src(TB_F32, {33, 3})
                .src(TB_F32, {33, 4, 3})
                .src(TB_F32, {4, 3});
        };
        ops.push_back((gated != 0 ? post().src(TB_F32, {4, 4, 3}) : post()).op);
        ops.push_back(builder(TB_OP_POOL_2D, "pool")
                          .param(0, gated)
                          .param(1, int32_t{3})
                          .param(2, int32_t{2})
                          .param(3, int32_t{2})
                          .param(4, int32_t{1})
                          .param(5, int32_t{1})
                          .dst(TB_F32, {5, 4, 2})
                          .src(gated != 0 ? TB_F16 : TB_F32, {10, 5, 2})
                          .op);
    }
    ops.push_back(builder(TB_OP_DSV4_HC_COMB, "comb")
                      .param(0, 1e-6f)
                      .param(1, int32_t{3})
                      .dst(TB_F32, {4, 4, 5})
                      .src(TB_F32, {24, 5})
                      .weights(TB_F32, {3})
                      .weights(TB_F32, {24})
                      .op);
    ops.push_back(builder(TB_OP_ARANGE, "arange").param(2, 0.5f).dst(TB_F32, {1100}).op);
    for (const uint32_t decays : {1u, 5u}) {
        ops.push_back(builder(TB_OP_SSM_SCAN, "scan")
                          .param(0, decays == 1 ? int32_t{2} : int32_t{1})
                          .param(1, decays == 1 ? int32_t{0} : int32_t{3})
                          .dst(TB_F32, {decays == 1 ? 192u : 132u})
                          .src(TB_F32, {5, 3, 2, 4})
                          .src(TB_F32, {3, 2, 6, 2})
                          .src(TB_F32, {2, 6, 2})
                          .weights(TB_F32, {decays, 2})
                          .src(TB_F32, {5, 1, 6, 2})
                          .src(TB_F32, {5, 1, 6, 2})
                          .src(TB_I32, {2})
                          .op);
        ops.push_back(builder(TB_OP_GATED_DELTA_NET, "delta")
                          .param(0, int32_t{2})
                          .dst(TB_F32, {20, 6 + 20})
                          .src(TB_F32, {5, 2, 3, 1})
                          .src(TB_F32, {5, 2, 3, 1})
                          .src(TB_F32, {5, 4, 3, 2})
                          .src(TB_F32, {decays, 4, 3, 2})
                          .src(TB_F32, {1, 4, 3, 2})
                          .src(TB_F32, {5, 5, 4, 2})
                          .op);
    }
    for (const uint32_t code : {TB_OP_RWKV_WKV6, TB_OP_RWKV_WKV7, TB_OP_GATED_LINEAR_ATTN}) {
        for (const uint32_t known : {2u, 4u}) { // of four states two are picked, by numbers, and two replaced
            builder op(code, "linear");
            op.dst(TB_F32, {20, 6 + 10}).param(1, known == 4 ? int32_t{3} : int32_t{0});
            for (int i = 0; i < tb_op_states(code); ++i) {
                if (code == TB_OP_RWKV_WKV6 && i == 3) {
                    op.weights(TB_F32, {5, 4});
                } else {
                    op.src(TB_F32, {5, 4, 3, 2});
                }
            }
            op.src(TB_F32, {5, 5, 4, known});
            ops.push_back(known == 4 ? op.src(TB_I32, {2}).op : op.op);
        }
    }
}

void add_copies(std::vector<tb_op> & ops) {
    for (const uint32_t from : {TB_F32, TB_F16, TB_BF16, TB_Q4_0, TB_Q8_0, TB_IQ4_NL, TB_I32}) {
        for (const uint32_t to : {TB_F32, TB_F16, TB_BF16, TB_Q4_0, TB_Q8_0, TB_IQ4_NL, TB_I32}) {
            const tb_op same = builder(TB_OP_CPY, "copy").dst(to, {64, 3}).src(from, {64, 3}).op;
            if (tb_op_check_shape(&same, nullptr) == TB_OK) {
                ops.push_back(same);
                ops.push_back(builder(TB_OP_CPY, "reshape").dst(to, {32, 6}).src(from, {96, 2}).op);
            }
        }
        if (from == TB_F32 || from == TB_F16 || from == TB_BF16 || from == TB_I32) {
            ops.push_back(
                builder(TB_OP_CPY, "transpose").dst(from, {70, 66}).src(from, {66, 70}, weight_file).transposed(0).op);
        }
    }
}

message plain(uint8_t kind) { return {{kind, damage_none, 0}, {}}; }

template <class T> message with(uint8_t kind, const T & payload) {
    message m = plain(kind);
    m.payload.resize(sizeof payload);
    std::memcpy(m.payload.data(), &payload, sizeof payload);
    return m;
}

std::vector<message> map_files() {
    std::vector<message> maps;
    for (uint32_t f = 0; f < n_files; ++f) {
        maps.push_back(with(TB_REQ_MAP, tb_map{f, f == weight_file ? 0u : 1u, 0, file_bytes[f]}));
    }
    return maps;
}

message make_compute(const std::vector<tb_op> & ops, uint32_t slot, uint64_t serial) {
    message m = with(TB_REQ_COMPUTE, tb_graph{slot, static_cast<uint32_t>(ops.size()), serial});
    for (const tb_op & op : ops) {
        const auto * bytes = reinterpret_cast<const uint8_t *>(&op);
        m.payload.insert(m.payload.end(), bytes, bytes + sizeof op);
    }
    return m;
}

std::vector<tb_op> valid_ops() {
    std::vector<tb_op> ops;
    ops.push_back(builder(TB_OP_NOP, "nop").op);
    add_mul_mats(ops);
    add_attention(ops);
    add_rows(ops);
    add_elementwise(ops);
    add_sampling(ops);
    add_ropes(ops);
    add_families(ops);
    add_copies(ops);
    return ops;
}

message make_patch(const std::vector<tb_patch> & patches, uint32_t slot, uint64_t serial) {
    message m = with(TB_REQ_PATCH, tb_graph{slot, static_cast<uint32_t>(patches.size()), serial});
    for (const tb_patch & p : patches) {
        const auto * bytes = reinterpret_cast<const uint8_t *>(&p);
        m.payload.insert(m.payload.end(), bytes, bytes + sizeof p);
    }
    return m;
}

// No 64-bit row numbers: see good_seeds.
std::vector<tb_op> some_of(const std::vector<tb_op> & ops) {
    std::vector<tb_op> some;
    for (size_t i = 0; i < ops.size(); i += 13) {
        if (ops[i].code != TB_OP_SET_ROWS) {
            some.push_back(ops[i]);
        }
    }
    return some;
}

unit unit_of(uint8_t fill, std::initializer_list<message> messages) {
    unit u;
    u.head.fill = fill;
    u.messages = map_files();
    u.messages.insert(u.messages.end(), messages);
    return u;
}

} // namespace

std::vector<unit> good_seeds() {
    const std::vector<tb_op> ops = valid_ops();
    std::vector<unit> all;
    for (const tb_op & op : ops) {
        // 64-bit row numbers are good ones only where the upper half is zero
        const uint8_t fill = op.code == TB_OP_SET_ROWS ? fill_zero : fill_small;
        all.push_back(unit_of(fill, {make_compute({op}, 0, 0)}));
        all.back().head.threads = op.code == TB_OP_FLASH_ATTN ? 6 : 0; // two workers
    }
    // A graph that is kept, sent again, patched, and outlives a change of threads; traced for a while, at last into the
    // smallest buffer, which holds fewer events than the graph has ops.
    const auto trace_to = [](uint32_t buffer) { return with(TB_REQ_TRACE, tb_map{buffer, 0, 0, 0}); };
    all.push_back(unit_of(fill_small, {make_compute(some_of(ops), 2, 77), make_patch({}, 2, 77), trace_to(result_file),
                                       make_patch({{1, 0, ops[5]}}, 2, 77), with(TB_REQ_THREADS, tb_graph{0, 3, 0}),
                                       make_patch({}, 2, 77), trace_to(small_file), make_patch({}, 2, 77),
                                       trace_to(TB_NO_BUFFER), plain(TB_REQ_NOOP), plain(TB_REQ_STOP)}));
    return all;
}

std::vector<unit> seeds() {
    const std::vector<tb_op> ops = valid_ops();
    std::vector<unit> all = good_seeds();
    all.push_back(
        unit_of(fill_small, {make_compute(some_of(ops), 2, 77), with(TB_REQ_UNMAP, tb_map{work_file, 0, 0, 0}),
                             make_patch({}, 2, 77), make_patch({}, 2, 78), plain(TB_REQ_NONE), plain(TB_REQ_COUNT)}));
    all.push_back(unit_of(fill_bytes, {make_patch({{0, 0, ops[5]}}, 9, 5), make_compute({}, 0, 1)}));
    all.push_back(unit_of(fill_ones, {make_compute(some_of(ops), 0, 0)}));
    return all;
}

} // namespace tb::fuzz
