// Attention's products of many rows in BF16 on vdpbf16ps: the shared ones over 16 lanes.
#include "kernels/avx512vnni/simd.h"

#include <cstring>

namespace tb::npu {
namespace {

struct bf16 {
    using vec = __m512i;

    static vec round(simd::vec low, simd::vec high) { return as<vec>(_mm512_cvtne2ps_pbh(high, low)); }
    static vec alternate(simd::vec low, simd::vec high) {
        alignas(64) static constexpr uint16_t order[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                         8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        return _mm512_permutexvar_epi16(_mm512_load_si512(order), round(low, high));
    }
    static vec load(const uint32_t * pairs) { return _mm512_loadu_si512(pairs); }
    static vec all(const uint32_t * pair) { return _mm512_set1_epi32(static_cast<int>(*pair)); }
    static void store(uint32_t * pairs, vec x) { _mm512_storeu_si512(pairs, x); }
    static simd::vec as_floats(vec x) { return _mm512_castsi512_ps(x); }
    static simd::vec add(simd::vec sum, vec a, vec b) {
        return _mm512_dpbf16_ps(sum, as<__m512bh>(a), as<__m512bh>(b));
    }

  private:
    template <class T, class F> static T as(F x) {
        T same;
        std::memcpy(&same, &x, sizeof same);
        return same;
    }
};

} // namespace
} // namespace tb::npu

#include "kernels/attention_bf16_simd.h"

namespace tb::npu {

void fill_attention_avx512bf16(attention_kernels & k) {
    k.name = "attention_f16_6x64_avx512bf16";
    k.bf16 = {{scores_bf16, accumulate_bf16}, fewest_rows};
}

} // namespace tb::npu
