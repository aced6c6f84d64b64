// See state_updates.h.
#include "state_updates.h"

#include <algorithm>

#include "ggml-impl.h"
#include "types.h"

namespace tb::plugin {

namespace {

constexpr int most_between = 128; // nodes from one of the ops to another

bool is_floats(const ggml_tensor * t) { return t->type == GGML_TYPE_F32 && ggml_is_contiguous(t); }

size_t offset_of(const ggml_tensor * t) { return t->view_src ? t->view_offs : 0; }

class finder {
  public:
    finder(const ggml_cgraph * of, bool with_places) : graph(of), placed(with_places) {}

    bool find(int node, state_update & out) {
        const ggml_tensor * t = graph->nodes[node];
        if (is_idle(t)) return false;
        out = state_update();
        out.node = node;
        switch (t->op) {
        case GGML_OP_SSM_CONV:
            return convolution(t, out);
        case GGML_OP_SSM_SCAN:
            out.states = t->src[0];
            out.numbers = t->src[6];
            return op_with_states(t, out, t->src[1]->ne[3], ggml_nelements(t->src[1]), node);
        case GGML_OP_GATED_DELTA_NET:
            return with_gathered(t, 5, t->src[2]->ne[3], out);
        case GGML_OP_RWKV_WKV6:
            return with_gathered(t, 5, t->src[5]->ne[1], out);
        case GGML_OP_RWKV_WKV7:
            return with_gathered(t, 6, t->src[6]->ne[1], out);
        case GGML_OP_GATED_LINEAR_ATTN:
            return with_gathered(t, 4, t->src[4]->ne[1], out);
        default:
            return false;
        }
    }

  private:
    const ggml_cgraph * graph;
    const bool placed;

    int index_before(const ggml_tensor * t, int node) const {
        for (int i = node - 1; i >= std::max(0, node - most_between); --i)
            if (graph->nodes[i] == t) return i;
        return -1;
    }

    // Do only so many nodes read it, and nobody after the graph?
    bool has_uses(const ggml_tensor * t, int n) const {
        if (graph->visited_hash_set.size == 0) return false; // a graph without counts
        const size_t at = ggml_hash_find(&graph->visited_hash_set, t);
        return at != GGML_HASHSET_FULL && ggml_bitset_get(graph->visited_hash_set.used, at) &&
               graph->use_counts[at] == n && (t->flags & GGML_TENSOR_FLAG_OUTPUT) == 0;
    }

    // Is t, or what it is another shape of, the rows of a cache that GET_ROWS picks by number, for this one reader?
    // Then its node, else -1.
    int gathered(const ggml_tensor * t, int reader, state_update & out) const {
        const ggml_tensor * rows = root_of(t);
        const int node = index_before(rows, reader);
        if (t != rows && !(t->op == GGML_OP_RESHAPE && t->src[0] == rows)) return -1;
        if (node < 0 || rows->op != GGML_OP_GET_ROWS || offset_of(t) != 0 || !is_floats(t) || !has_uses(t, 1) ||
            !has_uses(rows, 1) || ggml_nelements(t) != ggml_nelements(rows) || is_idle(rows)) {
            return -1;
        }
        out.states = rows->src[0];
        out.numbers = rows->src[1];
        out.skipped.push_back(node);
        return node;
    }

    // The CPY that takes `from` to where the states of out.states are, and nothing else, near `node`; or -1.
    int copied(const ggml_tensor * op, size_t offset, int64_t elements, int begin, state_update & out) const {
        const ggml_tensor * cache = root_of(out.states);
        for (int i = begin + 1; i < std::min(graph->n_nodes, out.node + most_between); ++i) {
            const ggml_tensor * copy = graph->nodes[i];
            if (copy->op != GGML_OP_CPY || is_idle(copy) || root_of(copy->src[0]) != op) continue;
            const ggml_tensor * from = copy->src[0];
            if (from->op != GGML_OP_VIEW || from->src[0] != op) return -1;
            const int64_t size = elements / out.numbers->ne[0]; // of a state
            const size_t bytes = static_cast<size_t>(size) * sizeof(float);
            const size_t base = offset_of(out.states);
            const size_t to = offset_of(copy);
            if (offset_of(from) != offset || ggml_nelements(from) != elements || !has_uses(from, 1) ||
                !is_floats(copy) || !has_uses(copy, 0) || root_of(copy) != cache || to < base ||
                (to - base) % bytes != 0) {
                return -1;
            }
            out.first = static_cast<int64_t>((to - base) / bytes);
            out.skipped.push_back(i);
            return i;
        }
        return -1;
    }

    static bool are_numbers(const ggml_tensor * t, int64_t sequences) {
        return t->type == GGML_TYPE_I32 && ggml_is_contiguous(t) && t->ne[0] == sequences &&
               ggml_nelements(t) == sequences;
    }

    // May what is done at node `from` or at node `to` be done at out.node instead?
    bool is_undisturbed(int from, int to, const state_update & out) const {
        const ggml_tensor * cache = root_of(out.states);
        for (int i = from + 1; i < to; ++i) {
            const ggml_tensor * t = graph->nodes[i];
            if (i == out.node || is_idle(t) || std::count(out.skipped.begin(), out.skipped.end(), i) != 0) continue;
            if (root_of(t) == cache) return false;
            for (const ggml_tensor * s : t->src)
                if (s && root_of(s) == cache) return false;
        }
        return !placed || (is_kept(out.numbers, from, out.node) && (!out.fresh || is_kept(out.fresh, from, out.node)));
    }

    // Does nothing write over it between its making and `until`, which itself must not, either?
    bool is_kept(const ggml_tensor * t, int from, int until) const {
        const auto * begin = static_cast<const char *>(t->data);
        const int made = std::max(from, index_before(root_of(t), until));
        for (int i = made + 1; i <= until; ++i) {
            const ggml_tensor * w = graph->nodes[i];
            const auto * at = static_cast<const char *>(w->data);
            if (!is_idle(w) && at < begin + ggml_nbytes(t) && begin < at + ggml_nbytes(w)) return false;
        }
        return true;
    }

    // An op whose operand `states` has those of so many sequences, and which gives their values' elements and new
    // states.
    bool with_gathered(const ggml_tensor * t, int states, int64_t sequences, state_update & out) const {
        const int rows = gathered(t->src[states], out.node, out);
        return rows >= 0 && op_with_states(t, out, sequences, ggml_nelements(t->src[2]), rows);
    }

    // SSM_SCAN or one as above, whose states are read at node `from`: `results` elements, then the new states.
    bool op_with_states(const ggml_tensor * t, state_update & out, int64_t sequences, int64_t results, int from) const {
        const int64_t elements = ggml_nelements(t) - results;
        if (!is_floats(out.states) || !are_numbers(out.numbers, sequences) || !has_uses(t, 2)) return false;
        const auto offset = static_cast<size_t>(results) * sizeof(float);
        const int to = copied(t, offset, elements, out.node, out);
        return to >= 0 && is_floats(graph->nodes[to]->src[0]) && other_view_ends(t, out.node, offset) &&
               is_undisturbed(from, to, out);
    }

    // Does the one other user of t's results look at bytes before `end` only?
    bool other_view_ends(const ggml_tensor * t, int node, size_t end) const {
        for (int i = node + 1; i < std::min(graph->n_nodes, node + most_between); ++i) {
            const ggml_tensor * view = graph->nodes[i];
            if (view->src[0] != t || offset_of(view) >= end) continue;
            return view->op == GGML_OP_VIEW && offset_of(view) + ggml_nbytes(view) <= end;
        }
        return false;
    }

    bool convolution(const ggml_tensor * t, state_update & out) const {
        const ggml_tensor * both = t->src[0];
        const int at = index_before(both, out.node);
        if (at < 0 || both->op != GGML_OP_CONCAT || ggml_get_op_params_i32(both, 0) != 0 || !has_uses(both, 2))
            return false;
        const ggml_tensor * before = both->src[0];
        out.fresh = both->src[1];
        const int rows = gathered(before, at, out);
        const auto element = static_cast<size_t>(sizeof(float));
        if (rows < 0 || !is_floats(out.states) || !are_numbers(out.numbers, both->ne[2]) ||
            before->ne[0] != t->src[1]->ne[0] - 1 || out.fresh->type != GGML_TYPE_F32 || out.fresh->nb[1] != element) {
            return false;
        }
        out.skipped.push_back(at);
        const int to = copied(both, static_cast<size_t>(out.fresh->ne[0]) * element, ggml_nelements(before), at, out);
        if (to < 0) return false;
        const ggml_tensor * last = graph->nodes[to]->src[0];
        return last->ne[0] == before->ne[0] && last->ne[1] == before->ne[1] && last->nb[0] == element &&
               last->nb[1] == both->nb[1] && last->nb[2] == both->nb[2] &&
               is_undisturbed(rows, std::max(to, out.node), out);
    }
};

} // namespace

std::vector<state_update> find_state_updates(const ggml_cgraph * graph, bool placed) {
    std::vector<state_update> found;
    state_update next;
    finder look(graph, placed);
    for (int i = 0; i < graph->n_nodes; ++i)
        if (look.find(i, next)) found.push_back(next);
    return found;
}

} // namespace tb::plugin
