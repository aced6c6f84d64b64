// Kernel sets for tests of the amx set on CPUs without AMX, instead of dispatch.cpp:
//   amx       kernels/amx/ over emulated tiles, with vectors of AVX2
//   vnni      the kernels that it replaces, over a model of vpdpbusd: the same bits are expected of both
//   portable
#include "amx_emulated.h"

#include "kernels/amx/gemm_int8.h"
#include "kernels/amx/gemm_k.h"
#include "kernels/avx2/lanes.h"
#include "kernels/kernels.h"

namespace tb::npu {

namespace {

struct unit : lanes {
    static constexpr int vectors = 1;
    static constexpr bool signed_weights = false, starts = true;

    // vpdpbusd: bytes 0 and 2 of each lane, then 1 and 3.
    static void dot(ints & sum, ints w, ints x) {
        const ints low = _mm256_set1_epi16(0xff);
        const ints even = _mm256_madd_epi16(_mm256_and_si256(w, low), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
        const ints odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
        sum = add(sum, add(even, odd));
    }
    template <class Format>
    static void block(const uint8_t * panel, const uint8_t * scales, const k_record & r, int rows,
                      int32_t (*sums)[gemm_panel]) {
        k_block_of_dots<unit, Format>(panel, scales, r, rows, sums);
    }
};

template <gemm_format format, class Format> void fill(gemm_kernels & k) {
    k.int8[format] = {"vnni", gemm_max_rows, Format::offset, multiply_panel<unit, Format>};
}

struct emulated_sets {
    kernel_table amx{}, vnni{}, portable{};
    const kernel_table * tables[3] = {&amx, &vnni, &portable};
    kernel_list list{tables, 3};

    emulated_sets() {
        fill_portable(portable);
        portable.isa = "portable";
        vnni = portable;
        vnni.isa = "vnni";
        gemm_kernels & k = vnni.gemm;
        fill<gemm_q4, format_q4<unit>>(k);
        fill<gemm_q8, format_q8<unit>>(k);
        fill<gemm_iq4nl, format_iq4nl<unit>>(k);
        fill<gemm_q5_0, format_bits<unit, TB_Q5_0_COL>>(k);
        fill<gemm_q4_1, format_bits<unit, TB_Q4_1_COL>>(k);
        fill<gemm_q5_1, format_bits<unit, TB_Q5_1_COL>>(k);
        fill<gemm_mxfp4, format_mxfp4<unit>>(k);
        fill<gemm_prepared, format_prepared<unit>>(k);
        fill_k_kernels<unit>(k, TILEBEAM_K_NAMES("vnni"));
        amx = vnni;
        amx.isa = "amx";
        replace_int8_kernels<unit>(amx.gemm);
        // stands for the formats of `tile` grouping, which are for vectors of AVX-512
        replace_kernel<unit, gemm_prepared, format_prepared<unit>>(amx.gemm, "gemm_q8p_32x32_amx");
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
