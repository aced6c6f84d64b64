// The backend (ggml's word for a stream on a device): computes graphs, synchronously.
#ifndef TILEBEAM_PLUGIN_BACKEND_H
#define TILEBEAM_PLUGIN_BACKEND_H

#include "ggml-backend-impl.h"

namespace tb::plugin {

// On device `index`, which ggml knows as `dev`. nullptr: the NPU did not start, the reason is in state's last error.
ggml_backend_t new_backend(ggml_backend_dev_t dev, int index);
void set_n_threads(ggml_backend_t backend, int n_threads);

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_BACKEND_H
