// Code books as vlut32 reads them; that of IQ4_NL and IQ4_XS with 128 added. Internal linkage, see vec_loops.h.
#ifndef TILEBEAM_NPU_KERNELS_HVX_CODE_BOOK_H
#define TILEBEAM_NPU_KERNELS_HVX_CODE_BOOK_H

#include "kernels/hvx/hvx.h"
#include "kernels/tiles.h"

namespace tb::npu {
namespace {

// vlut32 takes entry i of its table from byte 2i. It looks at five bits of an index: 16 entries twice make the fifth
// irrelevant.
template <class T> constexpr hvx::byte_table table_of(const T (&values)[16], int offset) {
    hvx::byte_table t{};
    for (int i = 0; i < 128; i++)
        t.at[i] = static_cast<uint8_t>(offset + values[i / 2 % 16]);
    return t;
}

constexpr hvx::byte_table iq4nl_bytes = table_of(iq4nl_values, 128);

} // namespace
} // namespace tb::npu

#endif // TILEBEAM_NPU_KERNELS_HVX_CODE_BOOK_H
