// Plain, mapped and tiled buffers. See buffer.h.
#include "buffer.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>

#include "buffer_type.h"
#include "file_map.h"
#include "huge_pages.h"
#include "tilebeam/layout.h"
#include "types.h"
#include "usable_memory.h"

namespace tb::plugin {

namespace {

// Of a matrix, that are packed before their pages are given back; below the second, looking a mapping up costs more.
constexpr size_t bytes_at_once = 32 << 20, least_released = 256 << 10;

buffer & self(ggml_backend_buffer_t b) { return *buffer::of(b); }

// ggml calls these from C: nothing may be thrown through it. A forked child neither reads nor writes its parent's
// buffers.
template <class Work> void guarded(ggml_backend_buffer_t b, const Work & work) {
    try {
        if (!self(b).is_here()) return self(b).spoil(forked_text);
        work(self(b));
    } catch (const std::exception & e) {
        self(b).spoil(std::string("device buffer: ") + e.what());
    }
}

void free_buffer(ggml_backend_buffer_t b) { delete buffer::of(b); }
void * get_base(ggml_backend_buffer_t b) { return self(b).base; }

ggml_status init_tensor(ggml_backend_buffer_t b, ggml_tensor * t) {
    ggml_status status = GGML_STATUS_FAILED;
    guarded(b, [&](buffer & mine) { status = mine.init(t); });
    return status;
}

void memset_tensor(ggml_backend_buffer_t b, ggml_tensor * t, uint8_t value, size_t offset, size_t size) {
    guarded(b, [&](buffer & mine) { mine.fill(t, value, offset, size); });
}

void set_tensor(ggml_backend_buffer_t b, ggml_tensor * t, const void * data, size_t offset, size_t size) {
    guarded(b, [&](buffer & mine) { mine.write(t, data, offset, size); });
}

void get_tensor(ggml_backend_buffer_t b, const ggml_tensor * t, void * data, size_t offset, size_t size) {
    if (!self(b).is_here()) std::memset(data, 0, size);
    guarded(b, [&](buffer & mine) { mine.read(t, data, offset, size); });
}

void clear(ggml_backend_buffer_t b, uint8_t value) {
    guarded(b, [&](buffer & mine) { mine.clear(value); });
}

const ggml_backend_buffer_i callbacks = {
    free_buffer, get_base, init_tensor, memset_tensor, set_tensor, get_tensor,
    nullptr, // set_tensor_2d and get_tensor_2d: ggml takes the copies one by one
    nullptr,
    nullptr, // cpy_tensor: ggml copies by way of the host
    clear,
    nullptr, // reset
};

} // namespace

buffer::buffer(kind w, int d, session_ptr s) : what(w), device(d), session(std::move(s)) {}

buffer::~buffer() {
    if (health->file) health->file->unguard();
    if (what == kind::mapped && file.fd >= 0) close(file.fd);
    if (!published) return;
    counters & count = state::get().count;
    count.buffers--;
    count.buffer_bytes -= size;
    if (what == kind::mapped) count.mapped_bytes -= size;
    if (health->bad) count.bad_buffers--;
    count.tiled_tensors -= tiled.size();
    if (!manifest) return;
    if (health->bad) manifest->made->bad--;
    manifest->made->tiled -= tiled.size();
    if (what != kind::tiled) manifest->made->announced -= tiled.size();
}

void buffer::belongs_to(const manifest_ptr & load) {
    manifest = load;
    if (load) health->load = load->made;
}

ggml_backend_buffer_t buffer::publish(std::unique_ptr<buffer> b, ggml_backend_buffer_type_t buft) {
    counters & count = state::get().count;
    count.buffers++;
    count.buffer_bytes += b->size;
    if (b->what == kind::mapped) count.mapped_bytes += b->size;
    b->published = true;
    const uint64_t bytes = b->size;
    return ggml_backend_buffer_init(buft, callbacks, b.release(), bytes);
}

ggml_backend_buffer_t buffer::allocate(ggml_backend_buffer_type_t buft, size_t bytes) try {
    state & st = state::get();
    const int device = device_of(buft);
    const std::string need = "cannot allocate " + std::to_string(bytes) + " bytes on " + device_name(device) + ": ";
    session_ptr session = st.acquire(device);
    if (!session) return nullptr;
    std::unique_ptr<buffer> b(new buffer(is_tiled_buft(buft) ? kind::tiled : kind::plain, device, session));
    if (const uint64_t most = usable_memory().with_swap; b->what == kind::tiled && bytes > most) {
        st.fail(need + "they would all be filled, and there are " + std::to_string(most) +
                " bytes of memory to be had");
        return nullptr;
    }
    std::string why;
    b->memory = tb::session::shared_memory::create("tilebeam", bytes, why);
    if (!b->memory) {
        st.fail(need + why);
        return nullptr;
    }
    b->base = static_cast<uint8_t *>(b->memory->data());
    b->size = bytes;
    b->file = {b->memory->fd(), 0, true};
    b->belongs_to(announced());
    b->by_tensor = b->what == kind::tiled && st.limit_of(device) != 0;
    if (!b->by_tensor && !b->map_range(0, bytes, why)) {
        st.fail(need + why);
        return nullptr;
    }
    return publish(std::move(b), buft);
} catch (const std::exception & e) {
    state::get().fail(std::string("cannot allocate device memory: ") + e.what());
    return nullptr;
}

ggml_backend_buffer_t buffer::map_file(ggml_backend_buffer_type_t buft, void * ptr, size_t bytes) try {
    state & st = state::get();
    const int device = device_of(buft);
    session_ptr session = st.acquire(device);
    if (!session) return nullptr;
    std::unique_ptr<buffer> b(new buffer(kind::mapped, device, session));
    const manifest_ptr & m = announced();
    mapped_file file;
    std::string why;
    if (!find_mapped_file(ptr, bytes, m ? m->path : "", file, why)) {
        st.fail("cannot map the model file: " + why);
        return nullptr;
    }
    b->file = {file.fd, file.offset, false};
    // What was announced for one file says nothing about another: reading its tiles as plain blocks, or the other way
    // round, would go unnoticed.
    if (m && !m->path.empty() && !(m->file == file.id)) {
        st.fail("announced " + m->path + " but " + file.path + " is being loaded");
        return nullptr;
    }
    // An override of the architecture alone has llama.cpp read the tiles as ggml's blocks.
    if ((!m || m->tensors.empty()) && says_repacked(file.fd)) {
        st.fail(file.path + " is repacked, and its tiles were not announced: load it with tilebeam.load, or call " +
                "tilebeam.register() before llama_cpp loads it");
        return nullptr;
    }
    b->health->file = std::make_unique<file_watch>(file);
    b->base = static_cast<uint8_t *>(ptr);
    b->size = bytes;
    b->belongs_to(m);
    b->by_tensor = st.limit_of(device) != 0;
    if (!b->by_tensor && !b->map_range(0, bytes, why)) {
        st.fail("cannot map " + file.path + " on the NPU side: " + why);
        return nullptr;
    }
    return publish(std::move(b), buft);
} catch (const std::exception & e) {
    state::get().fail(std::string("cannot map the model file: ") + e.what());
    return nullptr;
}

void buffer_health::spoil(const std::string & why) {
    {
        std::lock_guard<fork_lock> hold(reasons_lock());
        if (!bad) {
            reason = why;
            bad = true;
            state::get().count.bad_buffers++;
            if (load) load->note_bad(why);
        }
    }
    state::get().fail(why);
}

void buffer::spoil(const std::string & why) { health->spoil(why); }

// Windows whose pages touch become one: no page is then charged twice, and few are needed.
bool buffer::map_range(uint64_t first, uint64_t last, std::string & why) {
    std::lock_guard<std::mutex> hold(lock);
    for (auto it = windows.begin(); it != windows.end();) {
        const window & w = **it;
        if (!w.touches(file, first, last)) {
            ++it;
            continue;
        }
        if (w.covers(first, last)) return true;
        first = std::min(first, w.first);
        last = std::max(last, w.last);
        it = windows.erase(it);
    }
    std::unique_ptr<window> made = window::open(device, session, file, first, last, why);
    if (!made) return false;
    windows.push_back(std::move(made));
    return true;
}

const window * buffer::window_of(const ggml_tensor * t) const {
    const ggml_tensor * root = t->view_src ? t->view_src : t;
    const uint64_t first = offset_of(root->data), last = first + stored_bytes(root, tiled_type(root));
    std::lock_guard<std::mutex> hold(lock);
    for (const std::unique_ptr<window> & w : windows)
        if (w->covers(first, last)) return w.get();
    return nullptr;
}

// llama.cpp aborts the process when the device that holds a KV cache cannot write rows of its type. Refusing the memory
// instead makes it an error that the caller sees.
static bool is_unusable_cache(const ggml_tensor * t) {
    if (t->op != GGML_OP_NONE || std::strncmp(t->name, "cache_", 6) != 0) return false;
    tb_op op;
    std::memset(&op, 0, sizeof op);
    op.code = TB_OP_SET_ROWS;
    op.n_src = 2;
    op.dst = {0, type_of(t->type), 0, {TB_TILE_K, 1, 1, 1}, {ggml_type_size(t->type)}};
    op.src[0] = {0, TB_F32, 0, {TB_TILE_K, 1, 1, 1}, {4}};
    op.src[1] = {0, TB_I64, 0, {1, 1, 1, 1}, {8}};
    for (uint32_t i = op.n_src; i < TB_MAX_SRC; ++i)
        op.src[i].buffer = TB_NO_BUFFER;
    return tb_op_check_shape(&op, nullptr) != TB_OK;
}

// A file's general.alignment may be less than the size of an element, and the NPU reads whole elements only.
static bool is_misaligned(const ggml_tensor * t, uint64_t file_offset) {
    const uint64_t alignment = ggml_blck_size(t->type) > 1 ? 2 : ggml_type_size(t->type);
    return file_offset % alignment != 0;
}

// Called for every tensor of every graph as well, so the common case is a test and a return.
ggml_status buffer::init(ggml_tensor * t) {
    if (t->view_src) return GGML_STATUS_SUCCESS;
    if (is_unusable_cache(t)) {
        state::get().fail(std::string("the NPU cannot hold a KV cache of type ") + ggml_type_name(t->type) +
                          "; use f16, bf16, f32, q8_0 or q4_0");
        return GGML_STATUS_FAILED;
    }
    uint32_t type = TB_TYPE_COUNT;
    const uint64_t at = offset_of(t->data);
    if (what == kind::mapped && is_misaligned(t, file.offset + at)) {
        spoil(std::string("tensor '") + t->name + "' begins at byte " + std::to_string(file.offset + at) +
              " of its file, inside an element: load the model without mmap");
        return GGML_STATUS_FAILED;
    }
    if (what == kind::tiled) {
        type = tb_tiled_column(type_of(t->type)); // of an adapter's floats: none, they stay as they are
    } else if (may_hold_tiles()) {
        bool claimed = false;
        const manifest::entry * e = manifest->find(t, &claimed);
        if (claimed && (!e || (what == kind::mapped && file.offset + at != e->offset))) {
            spoil(std::string("tensor '") + t->name + "' is not what was announced for " + manifest->path);
            return GGML_STATUS_FAILED;
        }
        if (e) type = e->type;
    }
    note_tiled(t, at, type);
    if (std::string why; by_tensor && !map_range(at, at + stored_bytes(t, type), why)) {
        spoil(std::string("cannot place tensor '") + t->name + "' of " + std::to_string(stored_bytes(t, type)) +
              " bytes on " + device_name(device) + ": " + why);
        return GGML_STATUS_FAILED;
    }
    return GGML_STATUS_SUCCESS;
}

void buffer::note_tiled(const ggml_tensor * t, uint64_t at, uint32_t type) {
    if (!may_hold_tiles()) return;
    std::lock_guard<std::mutex> hold(lock);
    const uint64_t before = tiled.size();
    if (type == TB_TYPE_COUNT) {
        tiled.erase(at);
    } else {
        tiled_entry entry{type, {}};
        std::memcpy(entry.ne, t->ne, sizeof entry.ne);
        tiled.insert_or_assign(at, entry);
    }
    const uint64_t more = tiled.size() - before; // or less: then it wraps, and so do the sums
    state::get().count.tiled_tensors += more;
    if (!manifest) return;
    manifest->made->tiled += more;
    if (what != kind::tiled) manifest->made->announced += more;
}

uint64_t stored_bytes(const ggml_tensor * t, uint32_t type) {
    if (type == TB_TYPE_COUNT) return ggml_nbytes(t);
    return tb_tiled_bytes(type, static_cast<uint64_t>(t->ne[0]), static_cast<uint64_t>(t->ne[1])) *
           static_cast<uint64_t>(t->ne[2] * t->ne[3]);
}

uint32_t buffer::tiled_type(const ggml_tensor * t) const {
    if (!t->data || !may_hold_tiles() || !is_here()) return TB_TYPE_COUNT;
    std::lock_guard<std::mutex> hold(lock);
    const auto it = tiled.find(offset_of(t->data));
    if (it == tiled.end() || std::memcmp(it->second.ne, t->ne, sizeof it->second.ne) != 0) return TB_TYPE_COUNT;
    return it->second.type;
}

// If `t` is tiled, or a view of a tensor that is: the whole matrix, and where `offset` of t lies in its plain bytes.
bool buffer::tiles_of(const ggml_tensor * t, tiled_tensor & tiles, size_t & offset) const {
    const ggml_tensor * root = t->view_src ? t->view_src : t;
    const uint32_t type = tiled_type(root);
    if (type == TB_TYPE_COUNT) return false;
    tiles.type = type;
    tiles.k = static_cast<uint64_t>(root->ne[0]);
    tiles.n = static_cast<uint64_t>(root->ne[1]);
    tiles.data = static_cast<uint8_t *>(root->data);
    offset += static_cast<size_t>(static_cast<const uint8_t *>(t->data) - tiles.data);
    return true;
}

// Of a large matrix a part at a time, whose pages of the model's file are given back before the next: a load then never
// holds much more than the weights, which are in the file's pages before, and in tiles afterwards.
bool buffer::pack(const tiled_tensor & tiles, const uint8_t * data, size_t offset, size_t n) {
    const size_t panel = tiles.panel_bytes(), step = std::max<size_t>(1, bytes_at_once / panel) * panel;
    for (size_t done = 0; done < n;) {
        const size_t part = std::min(n - done, step - (offset + done) % panel);
        {
            std::lock_guard<std::mutex> hold(lock);
            const uint64_t end = offset_of(tiles.data) + tiles.tiles_until(offset + done + part);
            // Memory that nobody has touched, up to the end of a huge page.
            const uint64_t rounded = std::min(size, (end + tb::huge_page - 1) / tb::huge_page * tb::huge_page);
            if (rounded > backed) backed = tb::use_huge_pages(base + backed, rounded - backed) ? rounded : size;
        }
        if (!write_tiled(tiles, data + done, offset + done, part)) return false;
        if (part >= least_released) release_file_pages(data + done, part);
        done += part;
    }
    return true;
}

void buffer::write(const ggml_tensor * t, const void * data, size_t offset, size_t n) {
    if (what == kind::mapped) return spoil(std::string("write to the mapped model file, tensor '") + t->name + "'");
    tiled_tensor tiles;
    // Tiles that a manifest names come from the file as they are; only the tiled buffer type packs.
    if (what == kind::tiled && tiles_of(t, tiles, offset)) {
        if (!pack(tiles, static_cast<const uint8_t *>(data), offset, n))
            spoil(std::string("cannot pack tensor '") + t->name + "'");
        return;
    }
    // Weights fill their buffer, before anything else is written to it.
    if (what == kind::plain && t->buffer && t->buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS &&
        !written.exchange(true)) {
        tb::use_huge_pages(base, size);
    }
    std::memcpy(static_cast<uint8_t *>(t->data) + offset, data, n);
}

void buffer::fill(const ggml_tensor * t, uint8_t value, size_t offset, size_t n) {
    if (what == kind::mapped) return spoil(std::string("write to the mapped model file, tensor '") + t->name + "'");
    if (tiled_tensor tiles; what == kind::tiled && tiles_of(t, tiles, offset)) {
        return spoil(std::string("tensor '") + t->name + "' is tiled and cannot be filled with one byte");
    }
    written = true;
    std::memset(static_cast<uint8_t *>(t->data) + offset, value, n);
}

void buffer::read(const ggml_tensor * t, void * data, size_t offset, size_t n) {
    tiled_tensor tiles;
    if (tiles_of(t, tiles, offset)) {
        if (read_tiled(tiles, data, offset, n)) return;
        std::memset(data, 0, n);
        return spoil(std::string("tensor '") + t->name + "' (" + tb_type_name(tiles.type) +
                     ") has no plain form to read");
    }
    std::memcpy(data, static_cast<const uint8_t *>(t->data) + offset, n);
}

void buffer::clear(uint8_t value) {
    if (what == kind::mapped) return spoil("write to the mapped model file");
    written = true;
    std::memset(base, value, size);
    if (what == kind::tiled && value != 0) spoil("tiles can be cleared with zeros only");
}

} // namespace tb::plugin
