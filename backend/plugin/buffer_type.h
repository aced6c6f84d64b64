// Which buffer types are the plugin's own, and of which device: what buffers and graphs must know of them. device.cpp
// makes them.
#ifndef TILEBEAM_PLUGIN_BUFFER_TYPE_H
#define TILEBEAM_PLUGIN_BUFFER_TYPE_H

#include "ggml-backend-impl.h"

namespace tb::plugin {

// `context` of a device and of its buffer types.
struct device_identity {
    int index = 0;
    char name[16] = {};
    char tiled_name[24] = {};
};

// The callbacks `get_name`: ours are known by them.
const char * plain_name(ggml_backend_buffer_type_t buft);
const char * tiled_name(ggml_backend_buffer_type_t buft);

bool is_own_buft(ggml_backend_buffer_type_t buft);
bool is_tiled_buft(ggml_backend_buffer_type_t buft);
int device_of(ggml_backend_buffer_type_t buft); // of one that is ours
inline bool is_own(ggml_backend_buffer_t b) { return b && is_own_buft(b->buft); }

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_BUFFER_TYPE_H
