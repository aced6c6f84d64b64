// See types.h.
#include "types.h"

#include "tilebeam/types.h"

namespace tb::plugin {

uint32_t type_of(ggml_type type) {
    switch (type) {
#define TILEBEAM_CASE(NAME, LABEL, GGML, BLOCK, BYTES, WEIGHTS)                                                        \
    case GGML_TYPE_##NAME:                                                                                             \
        static_assert(GGML_TYPE_##NAME == GGML, "ggml's number of " LABEL);                                            \
        return TB_##NAME;
        TB_PLAIN_TYPES(TILEBEAM_CASE)
#undef TILEBEAM_CASE
    default:
        return TB_TYPE_COUNT;
    }
}

std::string device_name(int device) { return "HMX" + std::to_string(device); }

} // namespace tb::plugin
