// Device memory. Three kinds of buffer, two buffer types per device:
//
//   HMX0        plain   shared memory, ggml's own layouts: KV cache, activations, norms, float and plain quantized
//                       weights
//   HMX0        mapped  a GGUF file that llama.cpp has mapped, read-only and without a copy; tensors that the thread's
//                       manifest names are tiles, all others plain
//   HMX0_TILED  tiled   shared memory, quantized weights packed into tiles as they are written, unpacked as they are
//                       read; tensors of other types plain (llama.cpp puts an adapter's matrices where the weight is
//                       that they belong to, without asking)
//
// None of them is "host" memory to ggml: the CPU backend would read tiles as plain blocks.
//
// The CPU side has a buffer in one piece; the NPU side maps windows of it. Without a limit on address space that is one
// window for the whole buffer. With a limit, weights are mapped tensor by tensor: a mapped file spans tensors of other
// devices.
#ifndef TILEBEAM_PLUGIN_BUFFER_H
#define TILEBEAM_PLUGIN_BUFFER_H

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "file_watch.h"
#include "fork.h"
#include "ggml-backend-impl.h"
#include "manifest.h"
#include "shared_state.h"
#include "tiles.h"
#include "window.h"

namespace tb::plugin {

// What graphs must know of a buffer. `bad` is set when something went wrong that a callback without a result could not
// report: graphs on this buffer then fail.
struct buffer_health {
    std::atomic<bool> bad{false};
    std::string reason;               // once it is bad
    std::unique_ptr<file_watch> file; // of a mapped buffer
    std::shared_ptr<load_counts> load;

    void spoil(const std::string & why);
    std::string complaint() const { return "a device buffer is not valid: " + reason; } // of one that is bad
};

class buffer {
  public:
    enum class kind { plain, mapped, tiled };

    ~buffer();
    buffer(const buffer &) = delete;
    buffer & operator=(const buffer &) = delete;

    // nullptr for the zero-size dummies that the loader probes with. The caller knows that `b` is ours (is_own).
    static buffer * of(ggml_backend_buffer_t b) { return static_cast<buffer *>(b->context); }

    // False: it belongs to the process that forked this one. It must be asked before anything that takes `lock`.
    bool is_here() const { return made_in.is_here(); }

    // nullptr: the reason is in state's last error.
    static ggml_backend_buffer_t allocate(ggml_backend_buffer_type_t buft, size_t size);
    static ggml_backend_buffer_t map_file(ggml_backend_buffer_type_t buft, void * ptr, size_t size);

    // enum tb_type of a tensor (not a view) that the manifest names; TB_TYPE_COUNT for a plain one.
    uint32_t tiled_type(const ggml_tensor * t) const;
    // The window that holds the whole tensor (for a view: the tensor that it looks at); nullptr if none.
    const window * window_of(const ggml_tensor * t) const;
    uint64_t offset_of(const void * data) const {
        return static_cast<uint64_t>(static_cast<const uint8_t *>(data) - base);
    }

    const kind what;
    const int device;
    const std::shared_ptr<buffer_health> health = std::make_shared<buffer_health>();
    uint8_t * base = nullptr;
    uint64_t size = 0;

    // Callbacks of ggml_backend_buffer_i.
    ggml_status init(ggml_tensor * t);
    void write(const ggml_tensor * t, const void * data, size_t offset, size_t n);
    void fill(const ggml_tensor * t, uint8_t value, size_t offset, size_t n);
    void read(const ggml_tensor * t, void * data, size_t offset, size_t n);
    void clear(uint8_t value);
    void spoil(const std::string & why); // no graph can use it any more

  private:
    buffer(kind what, int device, session_ptr session);
    static ggml_backend_buffer_t publish(std::unique_ptr<buffer> b, ggml_backend_buffer_type_t buft);
    void belongs_to(const manifest_ptr & load);
    bool may_hold_tiles() const { return what == kind::tiled || (manifest && !manifest->tensors.empty()); }
    bool tiles_of(const ggml_tensor * t, tiled_tensor & tiles, size_t & offset) const;
    // Remember how the tensor that begins at `at` is stored: enum tb_type, or TB_TYPE_COUNT if plain.
    void note_tiled(const ggml_tensor * t, uint64_t at, uint32_t type);
    bool pack(const tiled_tensor & tiles, const uint8_t * data, size_t offset, size_t n);
    bool map_range(uint64_t first, uint64_t last, std::string & why);

    const home made_in;
    const session_ptr session; // of this device
    std::unique_ptr<tb::session::shared_memory> memory;
    backing file;           // mapped: a descriptor of its own
    manifest_ptr manifest;  // of the load that it belongs to; nullptr: nobody announced one
    bool published = false; // and counted
    bool by_tensor = false; // windows are made as tensors arrive
    uint64_t backed = 0;    // bytes of a tiled buffer that have got their huge pages, if there are any to be had

    struct tiled_entry {
        uint32_t type;
        int64_t ne[4];
    };
    mutable std::mutex lock;
    std::map<uint64_t, tiled_entry> tiled; // by offset from base
    std::vector<std::unique_ptr<window>> windows;
    std::atomic<bool> written{false}; // plain memory
};

// Bytes of a tensor as stored: `type` is enum tb_type if it is tiled, else TB_TYPE_COUNT.
uint64_t stored_bytes(const ggml_tensor * t, uint32_t type);

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_BUFFER_H
