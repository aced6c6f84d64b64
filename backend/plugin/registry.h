// Registration with ggml, and the check that this is the ggml the plugin was built for.
#ifndef TILEBEAM_PLUGIN_REGISTRY_H
#define TILEBEAM_PLUGIN_REGISTRY_H

#include <string>

namespace tb::plugin {

// The ggml whose headers this was compiled with (control.cpp).
extern const char built_version[];
extern const char built_commit[]; // full, or "unknown"

// "" if a ggml of this version and commit has the vtables that this plugin was compiled with; else a sentence.
// `version` and `commit` are what ggml_version() and ggml_commit() return.
std::string check_ggml(const std::string & version, const std::string & commit);

// control.cpp: the function of this name from control.h, or nullptr.
void * control_function(const char * name);

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_REGISTRY_H
