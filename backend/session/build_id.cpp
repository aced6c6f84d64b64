// See build_id.h. The digest is made at build time by backend/cmake/build_id.cmake.
#include "build_id.h"

#include "tilebeam_build_id.h"

namespace tb::session {

const uint8_t build_id[TB_BUILD_ID_BYTES] = {TILEBEAM_BUILD_ID_BYTES};
const char * const build_id_text = TILEBEAM_BUILD_ID;

} // namespace tb::session
