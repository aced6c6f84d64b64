// base/bus_guard.h for Hexagon: no signal is handled on this side. A mapped file that loses pages ends the emulator
// with SIGBUS when they are touched, and the CPU side says so.
#include "bus_guard.h"

namespace tb {

struct guarded_range::node {};

guarded_range::guarded_range(const void *, size_t, int, repair) : self(nullptr) {}
guarded_range::~guarded_range() = default;
bool guarded_range::hit() const { return self != nullptr; }
bool any_range_hit() { return false; }
bool can_shrink(int) { return false; }

} // namespace tb
