// What a graph without a number is, so that it is known again: ggml numbers the graphs of a scheduler, but the parts
// that a callback of its user cuts them into (llama_context_params.cb_eval) have no number, and come with every batch.
#ifndef TILEBEAM_PLUGIN_GRAPH_CONTENT_H
#define TILEBEAM_PLUGIN_GRAPH_CONTENT_H

#include <memory>
#include <utility>
#include <vector>

#include "buffer.h"
#include "ggml.h"

struct ggml_cgraph;

namespace tb::plugin {

// All that lowering looks at: the nodes, their operands and what these are views of, byte for byte; and which buffers
// they lie in, since a new one can have the address of one that is gone.
class graph_content {
  public:
    graph_content() = default;
    explicit graph_content(const ggml_cgraph * graph);

    bool is(const ggml_cgraph * graph) const;

  private:
    std::vector<ggml_tensor> tensors; // empty: of no graph
    std::vector<std::pair<ggml_backend_buffer_t, std::shared_ptr<buffer_health>>> buffers;
};

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_GRAPH_CONTENT_H
