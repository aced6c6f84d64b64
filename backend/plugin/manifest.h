// Which tensors of the file being loaded lie there as tiles. ggml shows a plugin no metadata, so Python reads it from
// the repacked file and announces it to the thread that is about to load (control.h).
#ifndef TILEBEAM_PLUGIN_MANIFEST_H
#define TILEBEAM_PLUGIN_MANIFEST_H

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include "control.h"
#include "tilebeam/types.h"

struct ggml_tensor;

namespace tb::plugin {

// A file, whatever its path.
struct file_id {
    dev_t device = 0;
    ino_t inode = 0;
    bool operator==(const file_id & o) const { return device == o.device && inode == o.inode; }
};

bool identify_file(const char * path, file_id & id, uint64_t & size);

struct manifest {
    struct entry {
        uint32_t type; // enum tb_type, tiled
        int64_t ne[4];
        uint64_t offset; // in the file
    };
    std::string path;
    file_id file;
    std::unordered_map<std::string, entry> tensors;

    // The entry of this tensor if name, type and shape agree; else nullptr. `claimed` says whether the name is there.
    const entry * find(const ggml_tensor * t, bool * claimed = nullptr) const;
};

using manifest_ptr = std::shared_ptr<const manifest>;

// Replace this thread's manifest; nullptr ends it. On failure there is none, and `why` says what is wrong.
tb_status announce(const tilebeam_manifest * m, std::string & why);
const manifest_ptr & announced();

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_MANIFEST_H
