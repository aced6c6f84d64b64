// The devices HMX0 to HMX14 and their buffer types, as ggml sees them. ggml is told of the first only, or of as many as
// TILEBEAM_DEVICES says; any of them can be used by handing its pointer to llama.cpp.
#ifndef TILEBEAM_PLUGIN_DEVICE_H
#define TILEBEAM_PLUGIN_DEVICE_H

#include <string>

#include "ggml-backend-impl.h"

namespace tb::plugin {

void adopt_devices(ggml_backend_reg_t reg); // before anything else of this file
ggml_backend_dev_t device(int index);       // below TILEBEAM_MAX_DEVICES
int index_of(ggml_backend_dev_t dev);
std::string device_name(int index);
std::string device_description(int index);
ggml_backend_buffer_type_t * extra_bufts(ggml_backend_dev_t dev); // NULL-terminated

// backend.cpp. nullptr: the NPU did not start, the reason is in state's last error.
ggml_backend_t new_backend(ggml_backend_dev_t dev);
void set_n_threads(ggml_backend_t backend, int n_threads);

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_DEVICE_H
