// See types.h.
#include "types.h"

#include "tilebeam/types.h"

namespace tb::plugin {

uint32_t type_of(ggml_type type) {
    switch (type) {
    case GGML_TYPE_F32:
        return TB_F32;
    case GGML_TYPE_F16:
        return TB_F16;
    case GGML_TYPE_BF16:
        return TB_BF16;
    case GGML_TYPE_I32:
        return TB_I32;
    case GGML_TYPE_I64:
        return TB_I64;
    case GGML_TYPE_Q4_0:
        return TB_Q4_0;
    case GGML_TYPE_Q8_0:
        return TB_Q8_0;
    case GGML_TYPE_IQ4_NL:
        return TB_IQ4_NL;
    default:
        return TB_TYPE_COUNT;
    }
}

std::string device_name(int device) { return "HMX" + std::to_string(device); }

} // namespace tb::plugin
