// See ggml_release.h.
#include "ggml_release.h"

#include "tilebeam/ops.h"

namespace tb::plugin {

// In the library once and as they are: a test puts another commit there.
const char built_version[] = TILEBEAM_GGML_VERSION;
const char built_commit[] = TILEBEAM_GGML_COMMIT;

void set_graph_optimize([[maybe_unused]] ggml_backend_i & callbacks,
                        [[maybe_unused]] void (*optimize)(ggml_backend_t, ggml_cgraph *, optimize_params *)) {
#ifdef TB_GGML_HAS_OPTIMIZE_PARAMS
    callbacks.graph_optimize = optimize;
#endif
}

void set_mmap_support([[maybe_unused]] ggml_backend_dev_caps & caps) {
#ifdef TB_GGML_HAS_MMAP_SUPPORT
    caps.mmap_support = true;
#endif
}

bool find_newer_op(ggml_op op, uint32_t & code, int & n_src) {
    switch (op) {
#ifdef TB_GGML_HAS_SCAN_SNAPSHOTS
    case GGML_OP_SSM_SCAN:
        code = TB_OP_SSM_SCAN, n_src = 7;
        return true;
#endif
#ifdef TB_GGML_HAS_LIGHTNING_INDEXER
    case GGML_OP_LIGHTNING_INDEXER:
        code = TB_OP_LIGHTNING_INDEXER, n_src = 4;
        return true;
#endif
#ifdef TB_GGML_HAS_GATED_HYPER_CONNECTIONS
    case GGML_OP_DSV4_HC_PRE:
        code = TB_OP_DSV4_HC_PRE, n_src = 2;
        return true;
    case GGML_OP_DSV4_HC_POST:
        code = TB_OP_DSV4_HC_POST, n_src = 4;
        return true;
    case GGML_OP_DSV4_HC_COMB:
        code = TB_OP_DSV4_HC_COMB, n_src = 3;
        return true;
#endif
    default:
        return false;
    }
}

} // namespace tb::plugin
