// Which sources this binary was built from: both sides of a channel must come from the same.
#ifndef TILEBEAM_SESSION_BUILD_ID_H
#define TILEBEAM_SESSION_BUILD_ID_H

#include <cstdint>

#include "tilebeam/protocol.h"

namespace tb::session {

extern const uint8_t build_id[TB_BUILD_ID_BYTES];
extern const char * const build_id_text; // the same in hexadecimal digits

} // namespace tb::session

#endif // TILEBEAM_SESSION_BUILD_ID_H
