// The ggml whose headers the plugin was compiled with.
#ifndef TILEBEAM_PLUGIN_GGML_BUILD_H
#define TILEBEAM_PLUGIN_GGML_BUILD_H

namespace tb::plugin {

extern const char built_version[];
extern const char built_commit[]; // full, or "unknown"

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_GGML_BUILD_H
