// What all files of the plugin call things: ggml's types as the NPU's, a device's name, a running session.
#ifndef TILEBEAM_PLUGIN_TYPES_H
#define TILEBEAM_PLUGIN_TYPES_H

#include <cstdint>
#include <memory>
#include <string>

#include "ggml.h"
#include "session.h"

namespace tb::plugin {

using session_ptr = std::shared_ptr<tb::session::session>;

// enum tb_type of a ggml type; TB_TYPE_COUNT if the NPU does not know it.
uint32_t type_of(ggml_type type);

// The tensor whose memory it is in.
inline const ggml_tensor * root_of(const ggml_tensor * t) { return t->view_src ? t->view_src : t; }

// Views and the like: nothing to compute.
bool is_free(const ggml_tensor * node);

// .. in this graph: neither there, nor where there are no elements or nobody needs them.
bool is_idle(const ggml_tensor * node);

// HMX0, HMX1, ...
std::string device_name(int device);

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_TYPES_H
