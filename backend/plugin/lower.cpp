// Lowering of ops and graphs. See lower.h.
#include "lower.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "buffer_type.h"
#include "control.h"
#include "ggml-impl.h"
#include "ggml_release.h"
#include "manifest.h"
#include "state_updates.h"
#include "tilebeam/layout.h"
#include "types.h"

namespace tb::plugin {

namespace {

static_assert(GGML_MAX_OP_PARAMS >= sizeof(tb_op::params), "tb_op.params are the first bytes of op_params");

// The channel's op for one of ggml's, and how many of ggml's operands become the descriptor's, in this order.
struct rule {
    ggml_op op;
    uint32_t code;
    int n_src;
};

constexpr rule rules[] = {
    {GGML_OP_MUL_MAT, TB_OP_MUL_MAT, 2},
    {GGML_OP_MUL_MAT_ID, TB_OP_MUL_MAT_ID, 3},
    {GGML_OP_SUM_ROWS, TB_OP_SUM_ROWS, 1},
    {GGML_OP_MEAN, TB_OP_SUM_ROWS, 1},
    {GGML_OP_FLASH_ATTN_EXT, TB_OP_FLASH_ATTN, 5},
    {GGML_OP_RMS_NORM, TB_OP_RMS_NORM, 1},
    {GGML_OP_L2_NORM, TB_OP_L2_NORM, 1},
    {GGML_OP_NORM, TB_OP_NORM, 1},
    {GGML_OP_MUL, TB_OP_MUL, 2},
    {GGML_OP_ADD, TB_OP_ADD, 2},
    {GGML_OP_ROPE, TB_OP_ROPE, 3},
    // src[2] is the tensor written into, of which the node itself is a view.
    {GGML_OP_SET_ROWS, TB_OP_SET_ROWS, 2},
    {GGML_OP_GLU, TB_OP_GLU, 2},
    {GGML_OP_SCALE, TB_OP_SCALE, 1},
    {GGML_OP_SOFT_MAX, TB_OP_SOFT_MAX, 3},
    {GGML_OP_GET_ROWS, TB_OP_GET_ROWS, 2},
    // CPY's src[1] is the tensor written into, of which the node itself is a view.
    {GGML_OP_CPY, TB_OP_CPY, 1},
    {GGML_OP_CONT, TB_OP_CPY, 1},
    {GGML_OP_DUP, TB_OP_CPY, 1},
    {GGML_OP_SUB, TB_OP_SUB, 2},
    {GGML_OP_DIV, TB_OP_DIV, 2},
    {GGML_OP_UNARY, TB_OP_UNARY, 1},
    {GGML_OP_CONCAT, TB_OP_CONCAT, 2},
    {GGML_OP_SQR, TB_OP_SQR, 1},
    {GGML_OP_SQRT, TB_OP_SQRT, 1},
    {GGML_OP_LOG, TB_OP_LOG, 1},
    {GGML_OP_CLAMP, TB_OP_CLAMP, 1},
    {GGML_OP_FILL, TB_OP_FILL, 1},
    {GGML_OP_SUM, TB_OP_SUM, 1},
    {GGML_OP_CUMSUM, TB_OP_CUMSUM, 1},
    {GGML_OP_ARGMAX, TB_OP_ARGMAX, 1},
    {GGML_OP_ARGSORT, TB_OP_ARGSORT, 1},
    {GGML_OP_TOP_K, TB_OP_TOP_K, 1},
    {GGML_OP_PAD, TB_OP_PAD, 1},
    // REPEAT's src[1], where there is one, gives the shape only.
    {GGML_OP_REPEAT, TB_OP_REPEAT, 1},
    {GGML_OP_ADD_ID, TB_OP_ADD_ID, 3},
    {GGML_OP_SSM_CONV, TB_OP_SSM_CONV, 2},
    {GGML_OP_GATED_DELTA_NET, TB_OP_GATED_DELTA_NET, 6},
    {GGML_OP_RWKV_WKV6, TB_OP_RWKV_WKV6, 6},
    {GGML_OP_RWKV_WKV7, TB_OP_RWKV_WKV7, 7},
    {GGML_OP_GATED_LINEAR_ATTN, TB_OP_GATED_LINEAR_ATTN, 5},
    {GGML_OP_ARANGE, TB_OP_ARANGE, 0},
    {GGML_OP_POOL_2D, TB_OP_POOL_2D, 1},
    {GGML_OP_ROPE_BACK, TB_OP_ROPE_BACK, 3},
};

bool find_rule(ggml_op op, uint32_t & code, int & n_src) {
    for (const rule & r : rules) {
        if (r.op != op) continue;
        code = r.code;
        n_src = r.n_src;
        return true;
    }
    return find_newer_op(op, code, n_src);
}

// How a tensor is stored: enum tb_type, or TB_TYPE_COUNT if no op can use it where it lies.
uint32_t stored_type(const ggml_tensor * t, const ggml_tensor * user) {
    const uint32_t plain = type_of(t->type);
    const ggml_tensor * root = root_of(t);
    if (!is_own(root->buffer)) return plain; // not allocated yet, or the scheduler will copy it here
    const buffer * placed = buffer::of(root->buffer);
    const bool asks_tiled = !placed && is_tiled_buft(root->buffer->buft);
    uint32_t tiled = TB_TYPE_COUNT;
    if (placed) {
        tiled = placed->tiled_type(root);
    } else if (asks_tiled) {
        tiled = tb_tiled_column(plain);
    } else if (const manifest_ptr & m = announced(); m) {
        // The loader asks with a dummy buffer: only the name tells what the file holds.
        bool claimed = false;
        const manifest::entry * e = m->find(root, &claimed);
        if (claimed && !e) return TB_TYPE_COUNT;
        if (e) tiled = e->type;
    }
    if (tiled != TB_TYPE_COUNT) return t == root ? tiled : static_cast<uint32_t>(TB_TYPE_COUNT);
    if (asks_tiled) return TB_TYPE_COUNT; // the loader gets the tiled buffer type for what becomes tiles only
    // A plain quantized weight belongs into the tiled buffer type, which the loader tries next.
    const bool product = user->op == GGML_OP_MUL_MAT || user->op == GGML_OP_MUL_MAT_ID;
    if (!placed && product && tb_tiled_column(plain) != TB_TYPE_COUNT) {
        return TB_TYPE_COUNT;
    }
    return plain;
}

// Everything but the place.
bool describe(const ggml_tensor * t, const ggml_tensor * user, tb_tensor & out, const char ** why) {
    std::memset(&out, 0, sizeof out);
    out.type = stored_type(t, user);
    if (out.type == TB_TYPE_COUNT) {
        *why = "a type or tiling that the op does not support";
        return false;
    }
    for (int i = 0; i < 4; ++i) {
        if (t->ne[i] < 0 || t->ne[i] > static_cast<int64_t>(UINT32_MAX)) {
            *why = "a dimension is too large";
            return false;
        }
        out.ne[i] = static_cast<uint32_t>(t->ne[i]);
        out.nb[i] = t->nb[i];
    }
    if (tb_type_is_tiled(out.type)) {
        out.nb[2] = tb_tiled_bytes(out.type, out.ne[0], out.ne[1]);
        out.nb[3] = out.nb[2] * out.ne[2];
    }
    out.offset = t->view_src ? t->view_offs : 0;
    return true;
}

// How an op is to compute, by enum tilebeam_numerics.
uint32_t flags_of(uint32_t code, int32_t numerics) {
    const bool deterministic = (numerics & TILEBEAM_NUMERICS_DETERMINISTIC) != 0;
    switch (code) {
    case TB_OP_MUL_MAT:
    case TB_OP_MUL_MAT_ID:
        if (deterministic) return TB_FLAG_DETERMINISTIC;
        return (numerics & TILEBEAM_NUMERICS_FP16) != 0 ? TB_FLAG_FP16 : 0;
    case TB_OP_SSM_SCAN:
    case TB_OP_GATED_DELTA_NET:
    case TB_OP_RWKV_WKV7:
        return deterministic ? TB_FLAG_DETERMINISTIC : 0;
    case TB_OP_FLASH_ATTN: // exact exponentials are for attention in float32
        if (deterministic) return TB_FLAG_DETERMINISTIC;
        return (numerics & TILEBEAM_NUMERICS_EXACT_EXP) != 0 ? TB_FLAG_EXACT_EXP
               : (numerics & TILEBEAM_NUMERICS_FP16) != 0    ? TB_FLAG_FP16
                                                             : 0;
    default:
        return 0;
    }
}

void set_dense(tb_tensor & t) {
    for (int i = 1; i < 4; ++i)
        t.nb[i] = t.nb[i - 1] * t.ne[i - 1];
}

bool is_linear_attention(uint32_t code) {
    return code == TB_OP_RWKV_WKV6 || code == TB_OP_RWKV_WKV7 || code == TB_OP_GATED_LINEAR_ATTN;
}

// Their operands have no gaps, the tokens of all sequences in dimension 2 and a state's elements in dimension 0.
void split_sequences(tb_op & op) {
    const int at = tb_op_states(op.code);
    tb_tensor & states = op.src[at];
    const uint32_t sequences = states.ne[1], n = op.src[1].ne[0], heads = op.src[1].ne[1], tokens = op.src[1].ne[2];
    if (sequences == 0 || tokens % sequences != 0 || uint64_t{n} * n * heads != states.ne[0]) return; // does not fit
    states.ne[0] = states.ne[1] = n;
    states.ne[2] = heads;
    states.ne[3] = sequences;
    set_dense(states);
    for (tb_tensor * t = op.src; t < &states; ++t) {
        if (t->ne[2] == tokens && t->ne[3] == 1) {
            t->ne[2] = tokens / sequences;
            t->ne[3] = sequences;
            set_dense(*t);
        }
    }
}

// The descriptor of a node but for buffers and offsets: buffer 0 stands for "present".
bool describe_op(const ggml_tensor * node, int32_t numerics, tb_op & op, const char ** why) {
    uint32_t code = 0;
    int n_src = 0;
    if (!find_rule(node->op, code, n_src)) {
        *why = "no such op on the NPU";
        return false;
    }
    std::memset(&op, 0, sizeof op);
    op.code = code;
    op.flags = flags_of(code, numerics);
    std::memcpy(op.params, node->op_params, sizeof op.params);
    if (code == TB_OP_SUM_ROWS) op.params[0] = node->op == GGML_OP_MEAN;
    std::memcpy(op.name, node->name, std::min(sizeof op.name - 1, strnlen(node->name, sizeof node->name)));
    if (!describe(node, node, op.dst, why)) return false;
    for (int i = 0; i < TB_MAX_SRC; ++i) {
        op.src[i].buffer = TB_NO_BUFFER;
        if (i >= n_src || !node->src[i]) continue;
        if (!describe(node->src[i], node, op.src[i], why)) return false;
        op.n_src = static_cast<uint32_t>(i) + 1;
    }
    if (is_linear_attention(code)) split_sequences(op);
    // Rows of one element each, as draft heads fill them with -inf: the same bytes as a single row.
    const ggml_tensor * shape = node->src[0];
    if (op.code == TB_OP_FILL && ggml_is_contiguous(node) && ggml_is_contiguous(shape) &&
        ggml_nelements(node) <= static_cast<int64_t>(UINT32_MAX)) {
        for (tb_tensor * t : {&op.dst, &op.src[0]}) {
            t->ne[0] = static_cast<uint32_t>(ggml_nelements(node));
            t->ne[1] = t->ne[2] = t->ne[3] = 1;
            t->nb[0] = tb_type_size(t->type); // of rows of one element it may be anything
            set_dense(*t);
        }
    }
    // Half-precision values fall onto rounding ties often, and which way ggml's own Q8_0 goes there depends on the CPU:
    // leave these copies to it, so that a cache holds the same bits whoever wrote it.
    if (op.code == TB_OP_CPY && op.dst.type == TB_Q8_0 && (op.src[0].type == TB_F16 || op.src[0].type == TB_BF16)) {
        *why = "a conversion that depends on the CPU";
        return false;
    }
    return tb_op_check_shape(&op, why) == TB_OK;
}

// Will this op, not allocated yet, run where a weight is that lies elsewhere? The scheduler asks the weights first,
// except for two ops.
bool follows_other_weight(const ggml_tensor * node) {
    if (node->op == GGML_OP_ROPE || node->op == GGML_OP_FLASH_ATTN_EXT) return false;
    return std::any_of(std::begin(node->src), std::end(node->src), [](const ggml_tensor * s) {
        return s && s->buffer && s->buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS && !is_own(s->buffer);
    });
}

// Is it in a buffer of ggml's meta device (LLAMA_SPLIT_MODE_TENSOR)? That asks what the device can run with its own
// tensors, and hands over ops on the parts that are in the device's buffers.
bool is_meta(ggml_backend_buffer_t buffer) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(buffer));
    return dev && ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_META;
}

// Does the node write into the device's memory, as far as can be known now? An op that writes into another tensor
// (SET_ROWS, CPY, everything in place) is placed without regard to where that tensor is. So where it is not allocated
// yet, it must be one that will be placed here too; refused, the op follows its destination.
bool lands_here(const ggml_tensor * node) {
    const ggml_tensor * root = root_of(node);
    if (root->buffer) return is_own(root->buffer) || is_meta(root->buffer);
    if (root == node) return true;
    if ((root->flags & GGML_TENSOR_FLAG_INPUT) != 0) return false; // inputs of graphs are on the CPU
    return can_run(root) && !follows_other_weight(root);
}

// Of an op that has its states in the cache, by its position: which operands are others than the node's own.
struct other_operands {
    const ggml_tensor * tensors[TB_MAX_SRC] = {};
};

// Turn an op's descriptor into that of the update (tilebeam/ops.h). False: the op does not do this one.
bool describe_update(const ggml_tensor * node, const state_update & u, tb_op & op, other_operands & others) {
    const char * why = "";
    const int states = tb_op_states(op.code);
    const int numbers = op.code == TB_OP_SSM_SCAN ? 6 : states + 1;
    if (u.first >= INT32_MAX || !describe(u.states, node, op.src[states], &why) ||
        !describe(u.numbers, node, op.src[numbers], &why)) {
        return false;
    }
    others.tensors[states] = u.states;
    others.tensors[numbers] = u.numbers;
    op.n_src = static_cast<uint32_t>(numbers) + 1;
    op.params[1] = static_cast<int32_t>(u.first) + 1;
    tb_tensor & s = op.src[states];
    const uint64_t all = uint64_t{s.ne[0]} * s.ne[1] * s.ne[2] * s.ne[3];
    if (node->op == GGML_OP_SSM_CONV) {
        tb_tensor & x = op.src[0];
        if (!describe(u.fresh, node, x, &why)) return false;
        others.tensors[0] = u.fresh;
        std::swap(x.ne[0], x.ne[1]);
        std::swap(x.nb[0], x.nb[1]);
        s.ne[0] = op.src[1].ne[0] - 1;
        s.ne[1] = op.dst.ne[0];
        s.ne[2] = 1;
    } else if (node->op != GGML_OP_SSM_SCAN) {
        const tb_tensor & values = op.src[op.code == TB_OP_GATED_DELTA_NET ? 2 : 1];
        s.ne[0] = s.ne[1] = values.ne[0];
        s.ne[2] = values.ne[1];
    }
    const int last = node->op == GGML_OP_SSM_CONV ? 2 : 3;
    const uint64_t state = uint64_t{s.ne[0]} * s.ne[1] * (last == 3 ? s.ne[2] : 1);
    s.ne[3] = 1;
    if (state == 0 || all % state != 0) return false;
    s.ne[last] = static_cast<uint32_t>(all / state);
    set_dense(s);
    return tb_op_check_shape(&op, &why) == TB_OK;
}

// One graph on its way to descriptors.
struct lowering {
    const int device;
    lowered_graph & out;

    const buffer * buffer_of(const ggml_tensor * t, std::string & why) {
        const ggml_tensor * root = root_of(t);
        const buffer * b = is_own(root->buffer) ? buffer::of(root->buffer) : nullptr;
        if (!b || !t->data) {
            why = std::string("tensor '") + t->name + "' is not on the device";
            return nullptr;
        }
        if (!b->is_here()) {
            why = forked_text;
            return nullptr;
        }
        if (b->health->bad) { // else what it lacks would be said, and not why
            why = b->health->complaint();
            return nullptr;
        }
        if (std::find(out.buffers.begin(), out.buffers.end(), b->health) == out.buffers.end()) {
            out.buffers.push_back(b->health);
        }
        return b;
    }

    // Fill in where a tensor lies in the device's session, which all tensors of a graph share.
    bool place(const ggml_tensor * t, tb_tensor & d, std::string & why) {
        const buffer * b = buffer_of(t, why);
        if (!b) return false;
        const window * w = b->window_of(t);
        if (!w) {
            why = std::string("tensor '") + t->name + "' is not mapped in one piece in the session of " +
                  device_name(device);
            return false;
        }
        if (out.session && out.session != w->session) {
            why = w->session->alive() != out.session->alive() ? "its NPU session is gone; load the model again"
                                                              : "its buffers belong to different NPU sessions";
            return false;
        }
        out.session = w->session;
        d.buffer = w->id;
        d.offset = w->npu_offset(b->offset_of(t->data));
        return true;
    }

    bool add(const ggml_tensor * node, const other_operands & others, tb_op op, std::string & why) {
        if (!place(node, op.dst, why)) return false;
        for (uint32_t s = 0; s < op.n_src; ++s) {
            const ggml_tensor * t = others.tensors[s] ? others.tensors[s] : node->src[s];
            if (t && !place(t, op.src[s], why)) return false;
        }
        out.ops.push_back(op);
        return true;
    }
};

struct described_update {
    int node;
    tb_op op;
    other_operands others;
};

// All updates of a graph that their ops do; `done` becomes true for the nodes that need not be.
std::vector<described_update> describe_updates(const ggml_cgraph * graph, int32_t numerics, std::vector<bool> & done) {
    std::vector<described_update> out;
    for (const state_update & u : find_state_updates(graph, true)) {
        described_update d{u.node, {}, {}};
        const ggml_tensor * node = graph->nodes[u.node];
        const char * why = "";
        if (!describe_op(node, numerics, d.op, &why) || !describe_update(node, u, d.op, d.others)) continue;
        out.push_back(d);
        for (const int i : u.skipped)
            done[static_cast<size_t>(i)] = true;
    }
    return out;
}

} // namespace

bool can_run(const ggml_tensor * node) {
    if (is_free(node)) return true;
    // llama.cpp's loader asks for the place of RWKV_WKV6's weight with other operands that do not fit it.
    if (node->op == GGML_OP_RWKV_WKV6 && !node->src[0]->data && node->src[3]->ne[0] != node->src[0]->ne[0])
        return stored_type(node->src[3], node) == TB_F32;
    tb_op op;
    const char * why = "";
    return describe_op(node, TILEBEAM_NUMERICS_INT8, op, &why) && lands_here(node);
}

bool lower(const ggml_cgraph * graph, int device, int32_t numerics, lowered_graph & out, std::string & why) {
    out.numerics = numerics;
    lowering work{device, out};
    std::vector<bool> done(static_cast<size_t>(graph->n_nodes));
    std::vector<described_update> updates = describe_updates(graph, numerics, done);
    auto update = updates.begin();
    for (int i = 0; i < graph->n_nodes; ++i) {
        const ggml_tensor * node = graph->nodes[i];
        if (done[static_cast<size_t>(i)] || is_idle(node)) continue;
        tb_op op;
        const char * reason = "";
        std::string text;
        other_operands others;
        bool ok = true;
        if (update != updates.end() && update->node == i) {
            op = update->op;
            others = update++->others;
        } else {
            ok = describe_op(node, numerics, op, &reason);
        }
        if (!ok) text = reason;
        op.tag = static_cast<uint32_t>(i);
        ok = ok && work.add(node, others, op, text);
        if (!ok) {
            why = std::string(ggml_op_name(node->op)) + " '" + node->name + "': " + text;
            return false;
        }
    }
    out.uid = graph->uid; // last: without memory for all of it nobody finds the part
    return true;
}

} // namespace tb::plugin
