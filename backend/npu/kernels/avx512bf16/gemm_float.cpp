// Products with BF16 weights on vdpbf16ps: the shared dot kernel, 32 k at a time.
//
// Activations are rounded to BF16, as ggml does for these weights (vec_dot_type in ggml-cpu.c): an instruction has
// twice as many products, and no panels are made. vdpbf16ps takes subnormal numbers for zero. Fewer than six rows wait
// for memory and gain nothing by it: they take the way of avx512vnni.
#include "kernels/avx512vnni/simd.h"

#include <climits>

#include "kernels/gemm_float_simd.h"
#include "kernels/kernels.h"

namespace tb::npu {

namespace {

struct element {
    using operand = __m512bh;
    static constexpr int size = 2, step = 32;
    static operand load(const uint8_t * p) { return as_operand(_mm512_loadu_si512(p)); }
    static operand load_n(const uint8_t * p, int n) {
        return as_operand(_mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), p));
    }
    static operand activations(const float * x) {
        return _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + simd::width), _mm512_loadu_ps(x));
    }
    static operand activations_n(const float * x, int n) {
        const int low = std::min(n, simd::width);
        return _mm512_cvtne2ps_pbh(simd::load_n(x + low, n - low), simd::load_n(x, low));
    }
    static __m512 fma(operand x, operand w, __m512 sum) { return _mm512_dpbf16_ps(sum, x, w); }

  private:
    static operand as_operand(__m512i v) {
        operand r;
        std::memcpy(&r, &v, sizeof r);
        return r;
    }
};

constexpr int fewest_rows = 6;

void run(const gemm_dot_args & a) { a.rows < fewest_rows ? dot<simd, element_bf16<simd>>(a) : dot<simd, element>(a); }

} // namespace

// avx512vnni's set but for these products.
void fill_avx512bf16(kernel_table & t) {
    fill_avx512vnni(t);
    t.gemm.dot[gemm_bf16] = {"gemm_bf16d_6x4_avx512bf16", INT_MAX, run};
}

} // namespace tb::npu
