// Device memory. Three kinds of buffer, two buffer types:
//
//   HMX0        plain   shared memory, ggml's own layouts: KV cache, activations, norms, float and plain quantized
//   weights HMX0        mapped  a GGUF file that llama.cpp has mapped, read-only and without a copy; tensors that the
//   thread's
//                       manifest names are tiles, all others plain
//   HMX0_TILED  tiled   shared memory, quantized weights packed into tiles as they are written, unpacked as they are
//   read
//
// None of them is "host" memory to ggml: the CPU backend would read tiles as plain blocks.
#ifndef TILEBEAM_PLUGIN_BUFFER_H
#define TILEBEAM_PLUGIN_BUFFER_H

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "ggml-backend-impl.h"
#include "manifest.h"
#include "state.h"
#include "tiles.h"

namespace tb::plugin {

// Set when something went wrong that a callback without a result could not report: graphs on this buffer then fail.
struct buffer_health {
    std::atomic<bool> bad{false};
};

class buffer {
  public:
    enum class kind { plain, mapped, tiled };

    ~buffer();
    buffer(const buffer &) = delete;
    buffer & operator=(const buffer &) = delete;

    // nullptr for the zero-size dummies that the loader probes with. The caller knows that `b` is ours (is_own).
    static buffer * of(ggml_backend_buffer_t b) { return static_cast<buffer *>(b->context); }

    // nullptr: the reason is in state's last error.
    static ggml_backend_buffer_t allocate(ggml_backend_buffer_type_t buft, size_t size);
    static ggml_backend_buffer_t map_file(ggml_backend_buffer_type_t buft, void * ptr, size_t size);

    // enum tb_type of a tensor (not a view) that the manifest names; TB_TYPE_COUNT for a plain one.
    uint32_t tiled_type(const ggml_tensor * t) const;
    uint64_t npu_offset(const void * data) const {
        return npu_base + static_cast<uint64_t>(static_cast<const uint8_t *>(data) - base);
    }

    const kind what;
    const session_ptr session;
    const std::shared_ptr<buffer_health> health = std::make_shared<buffer_health>();
    uint8_t * base = nullptr;
    uint64_t size = 0;
    uint32_t id = 0; // on the NPU side

    // Callbacks of ggml_backend_buffer_i.
    ggml_status init(ggml_tensor * t);
    void write(const ggml_tensor * t, const void * data, size_t offset, size_t n);
    void fill(const ggml_tensor * t, uint8_t value, size_t offset, size_t n);
    void read(const ggml_tensor * t, void * data, size_t offset, size_t n);
    void clear(uint8_t value);
    uint64_t tiled_tensors(const file_id & file) const; // of that file

  private:
    buffer(kind what, session_ptr session);
    static ggml_backend_buffer_t publish(std::unique_ptr<buffer> b, ggml_backend_buffer_type_t buft);
    bool tiles_of(const ggml_tensor * t, tiled_tensor & tiles, size_t & offset) const;
    void spoil(const std::string & why);

    std::unique_ptr<tb::session::shared_memory> memory;
    uint64_t npu_base = 0; // where `base` lies in the region that the NPU maps
    manifest_ptr manifest;
    uint64_t file_offset = 0; // mapped: of `base`

    struct tiled_entry {
        uint32_t type;
        int64_t ne[4];
    };
    mutable std::mutex lock;
    std::map<uint64_t, tiled_entry> tiled; // by offset from base
};

// Tensors of `file` that live buffers hold as tiles.
uint64_t count_tiled(const file_id & file);

// The device's two buffer types (device.cpp).
ggml_backend_buffer_type_t plain_buft();
ggml_backend_buffer_type_t tiled_buft();
inline bool is_tiled_buft(ggml_backend_buffer_type_t t) { return t == tiled_buft(); }
inline bool is_own(ggml_backend_buffer_t b) { return b && (b->buft == plain_buft() || b->buft == tiled_buft()); }

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_BUFFER_H
