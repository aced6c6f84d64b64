// The devices HMX0 to HMX14 and their buffer types, as ggml sees them. ggml is told of the first only; any of them can
// be used by handing its pointer to llama.cpp.
#ifndef TILEBEAM_PLUGIN_DEVICE_H
#define TILEBEAM_PLUGIN_DEVICE_H

#include <string>

#include "ggml-backend-impl.h"

namespace tb::plugin {

void adopt_devices(ggml_backend_reg_t reg); // before anything else of this file
ggml_backend_dev_t device(int index);       // below TILEBEAM_MAX_DEVICES
std::string device_description(int index);
ggml_backend_buffer_type_t * extra_bufts(ggml_backend_dev_t dev); // NULL-terminated

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_DEVICE_H
