// See types.h.
#include "types.h"

#include "tilebeam/types.h"

namespace tb::plugin {

uint32_t type_of(ggml_type type) {
    // By ggml's numbers, which are those of GGUF files: the oldest releases have no name for Q2_0.
    switch (static_cast<int>(type)) {
#define TILEBEAM_CASE(NAME, LABEL, GGML, BLOCK, BYTES, WEIGHTS)                                                        \
    case GGML:                                                                                                         \
        return TB_##NAME;
        TB_PLAIN_TYPES(TILEBEAM_CASE)
#undef TILEBEAM_CASE
    default:
        return TB_TYPE_COUNT;
    }
}

std::string device_name(int device) { return "HMX" + std::to_string(device); }

bool is_free(const ggml_tensor * node) {
    return node->op == GGML_OP_NONE || node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE ||
           node->op == GGML_OP_PERMUTE || node->op == GGML_OP_TRANSPOSE;
}

bool is_idle(const ggml_tensor * node) {
    return is_free(node) || ggml_is_empty(node) || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0;
}

} // namespace tb::plugin
