// Byte ranges of tiled tensors. See tiles.h.
#include "tiles.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "cpus.h"
#include "tilebeam/layout.h"

namespace tb::plugin {

namespace {

// Below this much work a second thread costs more than it gives.
constexpr size_t bytes_per_thread = 4 << 20;

// A panel and the part of the range that falls into it.
struct piece {
    uint8_t * panel;
    uint32_t rows;       // of this panel, 32 except at the end of a matrix
    size_t panel_offset; // first byte of the part within the panel's plain bytes
    size_t range_offset; // and within the range
    size_t size;
};

class panel_range {
  public:
    panel_range(const tiled_tensor & tensor, size_t offset, size_t size)
        : t(tensor), begin(offset), end(offset + size), row(t.row_bytes()),
          panels_per_matrix((t.n + TB_TILE_N - 1) / TB_TILE_N), tile_panel(tb_tiled_bytes(t.type, t.k, TB_TILE_N)) {
        first = panel_at(begin);
        last = panel_at(end - 1) + 1;
    }
    uint64_t count() const { return last - first; }
    piece at(uint64_t i) const {
        const uint64_t index = first + i, matrix = index / panels_per_matrix, in_matrix = index % panels_per_matrix;
        piece p;
        p.panel = t.data + index * tile_panel;
        p.rows = static_cast<uint32_t>(std::min<uint64_t>(TB_TILE_N, t.n - in_matrix * TB_TILE_N));
        const size_t start = (matrix * t.n + in_matrix * TB_TILE_N) * row;
        const size_t from = std::max(begin, start), to = std::min(end, start + p.rows * row);
        p.panel_offset = from - start;
        p.range_offset = from - begin;
        p.size = to - from;
        return p;
    }

  private:
    uint64_t panel_at(size_t byte) const {
        const uint64_t r = byte / row;
        return r / t.n * panels_per_matrix + r % t.n / TB_TILE_N;
    }
    const tiled_tensor & t;
    size_t begin, end, row;
    uint64_t panels_per_matrix;
    size_t tile_panel;
    uint64_t first = 0, last = 0;
};

// Run `work` on every panel of the range, on as many threads as the size deserves. `work` gets a buffer for one plain
// panel that it may use.
bool for_panels(const tiled_tensor & t, size_t offset, size_t size,
                const std::function<bool(const piece &, std::vector<uint8_t> &)> & work) {
    if (tb_tiled_column(tb_tiled_source(t.type)) != t.type) return false;
    if (size == 0) return true;
    const panel_range range(t, offset, size);
    std::atomic<uint64_t> next{0};
    std::atomic<bool> ok{true};
    const auto loop = [&] {
        try {
            std::vector<uint8_t> plain;
            for (uint64_t i; (i = next++) < range.count();)
                if (!work(range.at(i), plain)) ok = false;
        } catch (const std::bad_alloc &) {
            ok = false;
        }
    };
    const size_t wanted = std::min<size_t>({1 + size / bytes_per_thread, static_cast<size_t>(default_threads()), 16});
    std::vector<std::thread> helpers;
    helpers.reserve(wanted);
    try {
        while (helpers.size() + 1 < wanted)
            helpers.emplace_back(loop);
    } catch (const std::system_error &) {
        // No more threads to be had: those that run and this one do the work.
    }
    loop();
    for (std::thread & h : helpers)
        h.join();
    return ok;
}

} // namespace

size_t tiled_tensor::row_bytes() const {
    const uint32_t source = tb_tiled_source(type);
    return k / tb_type_block(source) * tb_type_size(source);
}

size_t tiled_tensor::panel_bytes() const { return TB_TILE_N * row_bytes(); }

size_t tiled_tensor::tiles_until(size_t plain) const {
    return plain == 0 ? 0 : panel_range(*this, 0, plain).count() * tb_tiled_bytes(type, k, TB_TILE_N);
}

bool write_tiled(const tiled_tensor & t, const void * src, size_t offset, size_t size) {
    const auto * bytes = static_cast<const uint8_t *>(src);
    return for_panels(t, offset, size, [&](const piece & p, std::vector<uint8_t> & plain) {
        const size_t row = t.row_bytes(), whole = p.rows * row;
        const uint8_t * rows = bytes + p.range_offset;
        if (p.size < whole) {
            plain.resize(whole);
            if (tb_unpack_panel(t.type, t.k, p.rows, p.panel, plain.data(), row) != TB_OK) return false;
            std::memcpy(plain.data() + p.panel_offset, rows, p.size);
            rows = plain.data();
        }
        return tb_pack_panel(t.type, t.k, p.rows, rows, row, p.panel) == TB_OK;
    });
}

bool read_tiled(const tiled_tensor & t, void * dst, size_t offset, size_t size) {
    auto * bytes = static_cast<uint8_t *>(dst);
    return for_panels(t, offset, size, [&](const piece & p, std::vector<uint8_t> & plain) {
        const size_t row = t.row_bytes();
        if (p.size == p.rows * row) {
            return tb_unpack_panel(t.type, t.k, p.rows, p.panel, bytes + p.range_offset, row) == TB_OK;
        }
        plain.resize(p.rows * row);
        if (tb_unpack_panel(t.type, t.k, p.rows, p.panel, plain.data(), row) != TB_OK) return false;
        std::memcpy(bytes + p.range_offset, plain.data() + p.panel_offset, p.size);
        return true;
    });
}

} // namespace tb::plugin
