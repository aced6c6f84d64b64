// The functions of control.h by name.
#ifndef TILEBEAM_PLUGIN_CONTROL_FUNCTIONS_H
#define TILEBEAM_PLUGIN_CONTROL_FUNCTIONS_H

namespace tb::plugin {

// nullptr: control.h has no function of this name.
void * control_function(const char * name);

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_CONTROL_FUNCTIONS_H
