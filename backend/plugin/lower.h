// From ggml's tensors to the NPU's descriptors. One function does it for both questions: "could you run this op?"
// (supports_op, nothing allocated yet) and "run this graph".
#ifndef TILEBEAM_PLUGIN_LOWER_H
#define TILEBEAM_PLUGIN_LOWER_H

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "buffer.h"
#include "ggml.h"
#include "tilebeam/ops.h"

struct ggml_cgraph;

namespace tb::plugin {

// Could the device run this op, with operands where they are now (or where the loader thinks of putting them)?
bool can_run(const ggml_tensor * node);

// A graph ready to be sent.
struct lowered_graph {
    uint64_t uid = 0;     // ggml's number for it, or one of our own
    int32_t numerics = 0; // that its ops were told of
    session_ptr session;  // nullptr: nothing to compute
    std::vector<tb_op> ops;
    bool sent = false; // as they are
    std::vector<std::shared_ptr<buffer_health>> buffers;
};

// False: `why` says which op cannot be run and why.
bool lower(const ggml_cgraph * graph, int device, int32_t numerics, lowered_graph & out, std::string & why);

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_LOWER_H
