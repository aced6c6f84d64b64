// Kernel sets for tests of the amx set on CPUs without AMX, instead of dispatch.cpp: kernels/amx/ over emulated tiles,
// with vectors of AVX2, in the avx2 set; and the portable set.
#include "amx_emulated.h"

#include "kernels/avx2/lanes.h"

#include "kernels/amx/gemm_int8.h"
#include "kernels/amx/gemm_k.h"
#include "kernels/kernels.h"

namespace tb::npu {

namespace {

struct unit : lanes {
    static ints products16(ints a, ints b) { return _mm256_mullo_epi16(a, b); }
    static ints widened16(ints x) { return _mm256_srai_epi16(x, 8); }
    static ints bytes_of_both(ints low, ints high) { return _mm256_blendv_epi8(low, high, _mm256_set1_epi16(-256)); }
    template <int by> static ints shifted_sums(ints x) { return _mm256_slli_epi32(x, by); }
    template <bool is_signed> static ints twice(const uint8_t * p) {
        const __m128i a = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
        const __m128i both = _mm_unpacklo_epi8(a, a);
        return is_signed ? _mm256_cvtepi8_epi16(both) : _mm256_cvtepu8_epi16(both);
    }
};

struct emulated_sets {
    kernel_table amx{}, portable{};
    const kernel_table * tables[2] = {&amx, &portable};
    kernel_list list{tables, 2};

    emulated_sets() {
        fill_portable(portable);
        portable.isa = "portable";
        amx = portable;
        fill_avx2(amx);
        amx.isa = "amx";
        replace_int8_kernels<unit>(amx.gemm);
        replace_k_kernels<unit>(amx.gemm);
    }
};

} // namespace

const kernel_list & available_kernels() {
    static const emulated_sets sets;
    return sets.list;
}

const kernel_table * find_kernels(const char * isa) {
    const kernel_list & list = available_kernels();
    for (int i = 0; i < list.n; i++) {
        if (std::strcmp(list.tables[i]->isa, isa) == 0) return list.tables[i];
    }
    return nullptr;
}

} // namespace tb::npu
