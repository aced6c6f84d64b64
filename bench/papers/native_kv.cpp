// Attention's two products over K and V in the matrix unit's layout, for bench/native_kv.py: AVX-512, one head.
//
// K: tiles of 256 cells, in each [d / 2][256][2], so that a vector holds pairs of neighbouring elements of several
// cells and scores need neither a transposition nor a sum across lanes. V: tiles of 64 cells, [32][d][2], pairs of
// neighbouring cells. Elements are FP16 (widened to float32) or BF16 (vdpbf16ps multiplies pairs as they are).

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

constexpr size_t K_TILE = 256, V_TILE = 64; // cells

#ifdef __AVX512F__

namespace {

struct fp16 {
    static constexpr size_t PAIRS = 8; // of a vector
    using vec = __m512;
    static vec load(const uint16_t * p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
    using pair = double; // two float32
    static vec all(const pair * p) { return _mm512_castpd_ps(_mm512_set1_pd(*p)); }
    static __m512 add(__m512 sum, vec a, vec b) { return _mm512_fmadd_ps(a, b, sum); }
    // Sums of neighbours: PAIRS floats.
    static void store(float * out, __m512 sum) {
        const __m512 odd = _mm512_permute_ps(sum, 0xb1);
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 0, 0, 0, 0, 0, 0, 0, 0);
        const __m512 both = _mm512_permutexvar_ps(even, _mm512_add_ps(sum, odd));
        _mm256_storeu_ps(out, _mm512_castps512_ps256(both));
    }
};

#    ifdef __AVX512BF16__
struct bf16 {
    static constexpr size_t PAIRS = 16;
    using vec = __m512i;
    static vec load(const uint16_t * p) { return _mm512_loadu_si512(p); }
    using pair = int32_t; // two BF16
    static vec all(const pair * p) { return _mm512_set1_epi32(*p); }
    static __m512 add(__m512 sum, vec a, vec b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
    static void store(float * out, __m512 sum) { _mm512_storeu_ps(out, sum); }
};
#    endif

// out[r][column] = sum over pairs i of left[r][i] . right[i][column], R rows and V vectors of columns at once.
template <class T, int R, int V>
void block(const typename T::pair * left, size_t stride, const uint16_t * right, size_t columns, size_t pairs,
           float * out, size_t out_stride, bool more) {
    __m512 sums[R][V];
    for (int r = 0; r < R; r++) {
        for (int v = 0; v < V; v++) {
            sums[r][v] = _mm512_setzero_ps();
        }
    }
    for (size_t i = 0; i < pairs; i++) {
        typename T::vec x[V];
        for (int v = 0; v < V; v++) {
            x[v] = T::load(right + (i * columns + v * T::PAIRS) * 2);
        }
        for (int r = 0; r < R; r++) {
            const typename T::vec a = T::all(left + r * stride + i);
            for (int v = 0; v < V; v++) {
                sums[r][v] = T::add(sums[r][v], a, x[v]);
            }
        }
    }
    for (int r = 0; r < R; r++) {
        for (int v = 0; v < V; v++) {
            float part[T::PAIRS], *to = out + r * out_stride + v * T::PAIRS;
            T::store(part, sums[r][v]);
            for (size_t j = 0; j < T::PAIRS; j++) {
                to[j] = more ? to[j] + part[j] : part[j];
            }
        }
    }
}

template <class T, int R>
void rows_of(const typename T::pair * left, size_t stride, const uint16_t * right, size_t columns, size_t pairs,
             float * out, size_t out_stride, bool more) {
    constexpr int V = R == 1 ? 8 : 4;
    for (size_t c = 0; c < columns; c += V * T::PAIRS) {
        block<T, R, V>(left, stride, right + c * 2, columns, pairs, out + c, out_stride, more);
    }
}

template <class T>
void product(const void * left, size_t rows, size_t stride, const uint16_t * right, size_t columns, size_t pairs,
             float * out, size_t out_stride, bool more) {
    const auto * a = static_cast<const typename T::pair *>(left);
    size_t r = 0;
    for (; r + 4 <= rows; r += 4) {
        rows_of<T, 4>(a + r * stride, stride, right, columns, pairs, out + r * out_stride, out_stride, more);
    }
    for (; r + 2 <= rows; r += 2) {
        rows_of<T, 2>(a + r * stride, stride, right, columns, pairs, out + r * out_stride, out_stride, more);
    }
    if (r < rows) {
        rows_of<T, 1>(a + r * stride, stride, right, columns, pairs, out + r * out_stride, out_stride, more);
    }
}

// scores[rows][cells] of queries [rows][d], in pairs.
template <class T> void scores(const void * q, size_t rows, const uint16_t * k, size_t cells, size_t d, float * out) {
    for (size_t c = 0; c < cells; c += K_TILE) {
        product<T>(q, rows, d / 2, k + c * d, K_TILE, d / 2, out + c, cells, false);
    }
}

// sums[rows][d] of weights [rows][cells], in pairs.
template <class T>
void accumulate(const void * weights, size_t rows, const uint16_t * v, size_t cells, size_t d, float * out) {
    memset(out, 0, rows * d * sizeof(float));
    for (size_t c = 0; c < cells; c += V_TILE) {
        const auto * w = static_cast<const typename T::pair *>(weights) + c / 2;
        product<T>(w, rows, cells / 2, v + c * d, d, V_TILE / 2, out, d, true);
    }
}

} // namespace

#endif

extern "C" {

// 0: this CPU has no AVX-512; 1: FP16; 2: BF16, too.
int tb_native_kv_types() {
#if defined(__AVX512BF16__)
    return 2;
#elif defined(__AVX512F__)
    return 1;
#else
    return 0;
#endif
}

// Both products `repeats` times each; bf16: the elements of K and V, queries and weights; else FP16 and float32.
// d: a multiple of 128.
void tb_native_kv(int bf16, int step, const void * left, size_t rows, const uint16_t * right, size_t cells, size_t d,
                  size_t repeats, float * out) {
#ifdef __AVX512F__
    for (size_t i = 0; i < repeats; i++) {
#    ifdef __AVX512BF16__
        if (bf16) {
            step == 0 ? scores<struct bf16>(left, rows, right, cells, d, out)
                      : accumulate<struct bf16>(left, rows, right, cells, d, out);
        }
#    endif
        if (!bf16) {
            step == 0 ? scores<fp16>(left, rows, right, cells, d, out)
                      : accumulate<fp16>(left, rows, right, cells, d, out);
        }
        asm volatile("" ::: "memory");
    }
#endif
}

// Put cells, [n][d], into their places, one after the other: what SET_ROWS would do for each new cell of a head.
void tb_native_kv_write(int step, const uint16_t * cells, uint16_t * tiles, size_t n, size_t d) {
    const size_t tile = step == 0 ? K_TILE : V_TILE;
    for (size_t cell = 0; cell < n; cell++) {
        const uint16_t * row = cells + cell * d;
        uint16_t * to = tiles + cell / tile * tile * d;
        for (size_t i = 0; i < d; i++) {
            if (step == 0) {
                to[(i / 2 * tile + cell % tile) * 2 + i % 2] = row[i];
            } else {
                to[(cell % tile / 2 * d + i) * 2 + cell % 2] = row[i];
            }
        }
    }
}
}
