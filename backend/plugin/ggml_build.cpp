// See ggml_build.h. In a file of their own, so that they stand in the library once and as they are: a test puts another
// commit there.
#include "ggml_build.h"

namespace tb::plugin {

const char built_version[] = TILEBEAM_GGML_VERSION;
const char built_commit[] = TILEBEAM_GGML_COMMIT;

} // namespace tb::plugin
