// AVX2 attention kernels: the shared ones over 8 lanes, and mask bits.
#include "kernels/avx2/simd.h"

#include "kernels/attention.h"
#include "kernels/attention_simd.h"

namespace tb::npu {
namespace {

uint64_t visible_avx2(const uint16_t * mask, int cells, uint64_t * biased) {
    uint64_t hidden = 0;
    uint64_t zero = 0;
    int c = 0;
    for (; c + 32 <= cells; c += 32) {
        const __m256i * p = reinterpret_cast<const __m256i *>(mask + c);
        const __m256i a = _mm256_loadu_si256(p);
        const __m256i b = _mm256_loadu_si256(p + 1);
        const auto bits = [](__m256i x, __m256i y) {
            // packing works in 128-bit halves: put its quarters back in order
            const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(x, y), 0xd8);
            return static_cast<uint64_t>(static_cast<uint32_t>(_mm256_movemask_epi8(bytes)));
        };
        const __m256i minus_infinity = _mm256_set1_epi16(static_cast<int16_t>(0xfc00));
        const __m256i magnitude = _mm256_set1_epi16(0x7fff);
        const __m256i none = _mm256_setzero_si256();
        hidden |= bits(_mm256_cmpeq_epi16(a, minus_infinity), _mm256_cmpeq_epi16(b, minus_infinity)) << c;
        zero |= bits(_mm256_cmpeq_epi16(_mm256_and_si256(a, magnitude), none),
                     _mm256_cmpeq_epi16(_mm256_and_si256(b, magnitude), none))
                << c;
    }
    for (; c < cells; c++) {
        hidden |= static_cast<uint64_t>(mask[c] == 0xfc00) << c;
        zero |= static_cast<uint64_t>((mask[c] & 0x7fff) == 0) << c;
    }
    const uint64_t all = cells == 64 ? ~uint64_t{0} : (uint64_t{1} << cells) - 1;
    *biased = all & ~hidden & ~zero;
    return all & ~hidden;
}

} // namespace

void fill_attention_avx2(attention_kernels & k) {
    fill_attention_simd(k);
    k.name = "attention_f16_6x16_avx2";
    k.visible = visible_avx2;
}

} // namespace tb::npu
