// The thread's announced file. See manifest.h.
#include "manifest.h"

#include <sys/stat.h>

#include <cstring>
#include <mutex>

#include "ggml.h"
#include "tilebeam/layout.h"
#include "types.h"

namespace tb::plugin {

namespace {

thread_local manifest_ptr current;

bool valid_entry(const tilebeam_tensor & t, uint64_t file_size, std::string & why) {
    if (!t.name || !*t.name || std::strlen(t.name) >= GGML_MAX_NAME) {
        why = "a tensor without a valid name";
        return false;
    }
    why = std::string("tensor '") + t.name + "': ";
    if (!tb_type_is_tiled(t.type)) {
        why += "type " + std::to_string(t.type) + " is not a tiled one";
        return false;
    }
    for (uint64_t n : t.ne) {
        if (n == 0 || n > INT32_MAX) {
            why += "a dimension is out of range";
            return false;
        }
    }
    if (t.ne[1] % TB_TILE_N != 0) {
        why += "rows do not fill whole tiles";
        return false;
    }
    const unsigned __int128 bytes =
        static_cast<unsigned __int128>(tb_tiled_bytes(t.type, t.ne[0], t.ne[1])) * t.ne[2] * t.ne[3];
    if (bytes == 0 || bytes > file_size || t.offset > file_size - static_cast<uint64_t>(bytes)) {
        why += "it is outside the file";
        return false;
    }
    return true;
}

} // namespace

fork_lock & reasons_lock() {
    static auto * const lock = new fork_lock; // never destroyed: see state::get()
    return *lock;
}

void load_counts::note_bad(const std::string & why) {
    if (reason.empty()) reason = why;
    bad++;
}

std::string load_counts::first_reason() const {
    std::lock_guard<fork_lock> hold(reasons_lock());
    return reason;
}

bool identify_file(const char * path, file_id & id, uint64_t & size) {
    struct stat st;
    if (!path || stat(path, &st) != 0 || !S_ISREG(st.st_mode)) return false;
    id.device = st.st_dev;
    id.inode = st.st_ino;
    size = static_cast<uint64_t>(st.st_size);
    return true;
}

const manifest::entry * manifest::find(const ggml_tensor * t, bool * claimed) const {
    const auto it = tensors.find(t->name);
    if (claimed) *claimed = it != tensors.end();
    if (it == tensors.end()) return nullptr;
    const entry & e = it->second;
    const bool same = std::memcmp(e.ne, t->ne, sizeof e.ne) == 0 && tb_tiled_source(e.type) == type_of(t->type);
    return same ? &e : nullptr;
}

tb_status announce(const tilebeam_manifest * m, std::string & why) {
    current.reset();
    if (!m) return TB_OK;
    auto made = std::make_shared<manifest>();
    uint64_t size = 0;
    if (m->n_tensors == 0 && !m->path) {
        current = std::move(made);
        return TB_OK;
    }
    if (!m->path || !identify_file(m->path, made->file, size)) {
        why = std::string("announced file not found: ") + (m->path ? m->path : "(no path)");
        return TB_E_BUFFER;
    }
    made->path = m->path;
    for (uint64_t i = 0; i < m->n_tensors; ++i) {
        const tilebeam_tensor & t = m->tensors[i];
        if (!valid_entry(t, size, why)) {
            why = made->path + ": " + why;
            return TB_E_SHAPE;
        }
        manifest::entry e{t.type, {}, t.offset};
        for (int d = 0; d < 4; ++d)
            e.ne[d] = static_cast<int64_t>(t.ne[d]);
        if (!made->tensors.emplace(t.name, e).second) {
            why = made->path + ": tensor '" + t.name + "' is named twice";
            return TB_E_SHAPE;
        }
    }
    why.clear();
    current = std::move(made);
    return TB_OK;
}

const manifest_ptr & announced() { return current; }

} // namespace tb::plugin
