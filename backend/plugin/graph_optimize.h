// What ggml's allocator is asked for before it places a graph's tensors.
#ifndef TILEBEAM_PLUGIN_GRAPH_OPTIMIZE_H
#define TILEBEAM_PLUGIN_GRAPH_OPTIMIZE_H

#include "ggml_release.h"

namespace tb::plugin {

// A graph_optimize callback: products of the same activations (Q, K and V) get places of their own, so that the NPU can
// run them at the same time, and what is done to each of them next. llama.cpp computes Q, rotates it, and then V, which
// the allocator puts where Q was before it was rotated: V would have to wait for that. What an op with states in the
// cache (state_updates.h) reads later than the graph says keeps its place until then.
void keep_products_apart(ggml_backend_t backend, ggml_cgraph * graph, optimize_params * params);

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_GRAPH_OPTIMIZE_H
