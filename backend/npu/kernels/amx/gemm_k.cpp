// The kernels of the amx set for types of 256 k.
#include "kernels/avx512vnni/unit.h"

#include "kernels/amx/gemm_k.h"

namespace tb::npu {

namespace {

struct planes_unit : unit {
    // Of 16-bit numbers.
    static ints products16(ints a, ints b) { return _mm512_mullo_epi16(a, b); }
    static ints widened16(ints x) { return _mm512_srai_epi16(x, 8); } // of their high bytes
    static ints bytes_of_both(ints low, ints high) { return _mm512_mask_blend_epi8(0xaaaaaaaaaaaaaaaa, low, high); }
    template <int by> static ints shifted_sums(ints x) { return _mm512_slli_epi32(x, by); }
    // A byte per column to both halves of 32 bits.
    template <bool is_signed> static ints twice(const uint8_t * p) {
        const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
        const __m256i both = _mm256_set_m128i(_mm_unpackhi_epi8(a, a), _mm_unpacklo_epi8(a, a));
        return is_signed ? _mm512_cvtepi8_epi16(both) : _mm512_cvtepu8_epi16(both);
    }
};

} // namespace

void fill_gemm_amx_k(gemm_kernels & k) { replace_k_kernels<planes_unit>(k); }

} // namespace tb::npu
