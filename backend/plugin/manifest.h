// The load that a thread is making: which tensors of the file lie there as tiles, and what became of it. ggml shows a
// plugin no metadata, so Python reads it from the repacked file and announces it to the thread that is about to load
// (control.h). Buffers keep the manifest that they were made under and count what they hold there, so that a load can
// be judged by what it made itself, whatever other threads load, close or break meanwhile.
#ifndef TILEBEAM_PLUGIN_MANIFEST_H
#define TILEBEAM_PLUGIN_MANIFEST_H

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include "control.h"
#include "fork.h"
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

// Of the buffers of one load that live.
class load_counts {
  public:
    std::atomic<uint64_t> announced{0};     // tensors held as tiles that the manifest names
    std::atomic<uint64_t> tiled{0};         // all tensors held as tiles
    std::atomic<uint64_t> bad{0};           // buffers that no graph can use
    void note_bad(const std::string & why); // under reasons_lock()
    std::string first_reason() const;       // of a bad buffer

  private:
    std::string reason;
};

// Guards why buffers and loads are bad.
fork_lock & reasons_lock();

struct manifest {
    struct entry {
        uint32_t type; // enum tb_type, tiled
        int64_t ne[4];
        uint64_t offset; // in the file
    };
    std::string path; // empty: an ordinary file, whichever
    file_id file;
    std::unordered_map<std::string, entry> tensors;

    const std::shared_ptr<load_counts> made = std::make_shared<load_counts>();

    // The entry of this tensor if name, type and shape agree; else nullptr. `claimed` says whether the name is there.
    const entry * find(const ggml_tensor * t, bool * claimed = nullptr) const;
};

using manifest_ptr = std::shared_ptr<const manifest>;

// Replace this thread's manifest; nullptr ends it. On failure there is none, and `why` says what is wrong.
tb_status announce(const tilebeam_manifest * m, std::string & why);
const manifest_ptr & announced();

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_MANIFEST_H
