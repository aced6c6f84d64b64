// A tiled weight tensor seen as the plain ggml bytes it stands for: read and write any byte range of them.
//
// Packing a panel is a bijection, so a range that ends inside a panel is written by unpacking the panel, changing the
// bytes and packing it again: no staging copy, any order of writes, any cut.
#ifndef TILEBEAM_PLUGIN_TILES_H
#define TILEBEAM_PLUGIN_TILES_H

#include <cstddef>
#include <cstdint>

namespace tb::plugin {

struct tiled_tensor {
    uint32_t type;  // enum tb_type, column-grouped
    uint64_t k, n;  // elements per row, rows per matrix
    uint8_t * data; // tiles of all its matrices; each padded to whole panels

    size_t row_bytes() const;               // of the plain form
    size_t panel_bytes() const;             // of the plain form of a whole panel
    size_t tiles_until(size_t plain) const; // bytes of tiles that hold the first `plain` bytes
};

// `offset` and `size` count plain bytes and lie inside the tensor. False: not a type that can be packed.
bool write_tiled(const tiled_tensor & t, const void * src, size_t offset, size_t size);
bool read_tiled(const tiled_tensor & t, void * dst, size_t offset, size_t size);

} // namespace tb::plugin

#endif // TILEBEAM_PLUGIN_TILES_H
