// See graph_optimize.h.
#include "graph_optimize.h"

#include <algorithm>

#include "ggml-impl.h"
#include "state_updates.h"
#include "types.h"

namespace tb::plugin {

namespace {

constexpr int most_between = 32; // nodes from one product to the next of the same activations

bool is_product(const ggml_tensor * t) { return t->op == GGML_OP_MUL_MAT; }

// Ops that leave their operand's place and are no part of a product's own step (schedule.h).
bool moves_on(const ggml_tensor * t) {
    return t->op == GGML_OP_ROPE || t->op == GGML_OP_RMS_NORM || t->op == GGML_OP_NORM;
}

// The last op of that kind on what these products gave: the next ones, and attention, begin something new.
int last_move(const ggml_cgraph * graph, int last) {
    int until = last;
    for (int i = last + 1; i < std::min(graph->n_nodes, last + most_between); ++i) {
        const ggml_tensor * node = graph->nodes[i];
        if (is_product(node) || node->op == GGML_OP_FLASH_ATTN_EXT) break;
        if (moves_on(node)) until = i;
    }
    return until;
}

// The last product of node `first`'s activations, or `first` if there is no other nearby.
int last_product(const ggml_cgraph * graph, int first) {
    int last = first;
    for (int i = first + 1; i < std::min(graph->n_nodes, last + most_between); ++i) {
        if (is_product(graph->nodes[i]) && graph->nodes[i]->src[1] == graph->nodes[first]->src[1]) last = i;
    }
    return last;
}

} // namespace

void keep_products_apart(ggml_backend_t, ggml_cgraph * graph, optimize_params * params) {
    // ggml asks for tensors that it may change, and does not.
    const auto keep = [&](const ggml_tensor * t, ggml_tensor * until) {
        params->add_alloc_dep(params->user_data, const_cast<ggml_tensor *>(t), until);
    };
    for (int first = 0; first < graph->n_nodes; ++first) {
        if (!is_product(graph->nodes[first])) continue;
        const int last = last_product(graph, first);
        ggml_tensor * until = graph->nodes[last_move(graph, last)];
        for (int i = first + 1; i < last; ++i) {
            const ggml_tensor * node = graph->nodes[i];
            const ggml_tensor * left = moves_on(node) ? root_of(node->src[0]) : nullptr;
            if (left && left->op != GGML_OP_NONE) keep(left, until);
        }
        first = last;
    }
    for (const state_update & u : find_state_updates(graph, false)) {
        for (const ggml_tensor * t : {u.numbers, u.fresh}) {
            const ggml_tensor * root = t ? root_of(t) : nullptr;
            if (root && (root->op != GGML_OP_NONE || t == u.numbers)) keep(root, graph->nodes[u.node]);
        }
    }
}

} // namespace tb::plugin
