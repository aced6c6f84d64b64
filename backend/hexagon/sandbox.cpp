// session/sandbox.h for Hexagon: the emulator makes system calls of its own that a filter set from in here would have
// to know, and it holds descriptors of its own. What the program had open is closed before the emulator starts
// (session/peer_process.cpp).
#include "sandbox.h"

namespace tb::session {

uint32_t enter_sandbox() { return 0; }

void close_above(int) {}

} // namespace tb::session
