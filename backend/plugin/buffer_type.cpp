// See buffer_type.h.
#include "buffer_type.h"

namespace tb::plugin {

namespace {

const device_identity & of(ggml_backend_buffer_type_t buft) { return *static_cast<device_identity *>(buft->context); }

} // namespace

const char * plain_name(ggml_backend_buffer_type_t buft) { return of(buft).name; }
const char * tiled_name(ggml_backend_buffer_type_t buft) { return of(buft).tiled_name; }

bool is_own_buft(ggml_backend_buffer_type_t buft) {
    return buft->iface.get_name == plain_name || buft->iface.get_name == tiled_name;
}
bool is_tiled_buft(ggml_backend_buffer_type_t buft) { return buft->iface.get_name == tiled_name; }
int device_of(ggml_backend_buffer_type_t buft) { return of(buft).index; }

} // namespace tb::plugin
