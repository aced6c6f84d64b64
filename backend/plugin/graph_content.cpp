// See graph_content.h.
#include "graph_content.h"

#include <algorithm>
#include <cstring>

#include "buffer_type.h"
#include "ggml-impl.h"

namespace tb::plugin {

namespace {

// Until `see` says false of a tensor; whether it said so of none.
template <class F> bool each_tensor(const ggml_cgraph * graph, F && see) {
    const auto with_root = [&](const ggml_tensor * t) { return see(t) && (!t->view_src || see(t->view_src)); };
    for (int i = 0; i < graph->n_nodes; ++i) {
        const ggml_tensor * node = graph->nodes[i];
        if (!with_root(node)) return false;
        for (const ggml_tensor * src : node->src)
            if (src && !with_root(src)) return false;
    }
    return true;
}

} // namespace

graph_content::graph_content(const ggml_cgraph * graph) {
    each_tensor(graph, [&](const ggml_tensor * t) {
        tensors.push_back(*t);
        const buffer * b = is_own(t->buffer) ? buffer::of(t->buffer) : nullptr;
        const bool known =
            std::any_of(buffers.begin(), buffers.end(), [&](const auto & pair) { return pair.first == t->buffer; });
        if (b && !known) buffers.emplace_back(t->buffer, b->health);
        return true;
    });
}

bool graph_content::is(const ggml_cgraph * graph) const {
    size_t at = 0;
    const bool same = each_tensor(graph, [&](const ggml_tensor * t) {
        return at < tensors.size() && std::memcmp(&tensors[at++], t, sizeof *t) == 0;
    });
    // The same bytes name buffers of the same addresses, which exist as long as tensors lie in them.
    return same && at > 0 && at == tensors.size() && std::all_of(buffers.begin(), buffers.end(), [](const auto & pair) {
               const buffer * b = is_own(pair.first) ? buffer::of(pair.first) : nullptr;
               return b && b->is_here() && b->health == pair.second;
           });
}

} // namespace tb::plugin
