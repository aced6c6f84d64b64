// AVX-512 attention kernels: the shared ones over 16 lanes, and mask bits.
#include "kernels/avx512vnni/simd.h"

#include "kernels/attention.h"
#include "kernels/attention_simd.h"

namespace tb::npu {
namespace {

uint64_t visible_avx512(const uint16_t * mask, int cells, uint64_t * biased) {
    uint64_t seen = 0;
    uint64_t nonzero = 0;
    for (int c = 0; c < cells; c += 32) {
        const int n = cells - c < 32 ? cells - c : 32;
        const __mmask32 live = static_cast<__mmask32>((uint64_t{1} << n) - 1);
        const __m512i x = _mm512_maskz_loadu_epi16(live, mask + c);
        const __mmask32 s = _mm512_mask_cmpneq_epi16_mask(live, x, _mm512_set1_epi16(static_cast<int16_t>(0xfc00)));
        seen |= static_cast<uint64_t>(s) << c;
        nonzero |= static_cast<uint64_t>(_mm512_mask_test_epi16_mask(s, x, _mm512_set1_epi16(0x7fff))) << c;
    }
    *biased = nonzero;
    return seen;
}

} // namespace

void fill_attention_avx512vnni(attention_kernels & k) {
    fill_attention_simd(k);
    k.name = "attention_f16_6x64_avx512";
    k.visible = visible_avx512;
}

} // namespace tb::npu
