// Products of low-bit weights by tables of partial sums, for bench/lut_gemv.py: portable kernels, and the product with
// these or AVX2's. Compiled for this CPU when the bench runs.
#include "lut_gemv.h"
#ifdef __AVX2__
#    include "lut_gemv_avx2.h"
#endif

namespace {

// The word of column c in its vector.
constexpr int word_of(int c) { return (c & 3) | (c & 4) << 1 | (c & 8) >> 1; }

template <class F> int byte_of(int plane, int c) {
    if (F::planes % 2 && plane == F::planes - 1) return columns * plane + 2 * word_of(c % 16) + c / 16;
    return columns * (plane / 2 * 2 + c / 16) + 2 * word_of(c % 16) + plane % 2;
}

// Sums of F::groups groups, byte by byte.
template <class F, bool fast> void add_bytes(const uint8_t * w, const uint8_t * tables, int * sums) {
    constexpr int bytes = columns * F::planes;
    if constexpr (fast) {
        for (int i = 0; i < bytes; i++) {
            int v[F::groups];
            for (int g = 0; g < F::groups; g++)
                v[g] = tables[entries * g + (w[g / 2 * F::pair_bytes + i] >> g % 2 * 4 & 15)];
            for (int n = F::groups / 2; n; n /= 2)
                for (int g = 0; g < n; g++)
                    v[g] = (v[2 * g] + v[2 * g + 1] + 1) >> 1;
            sums[i] += v[0] << F::levels;
        }
    } else {
        for (int p = 0; p < F::groups / 2; p++, w += F::pair_bytes, tables += 2 * entries)
            for (int i = 0; i < bytes; i++)
                sums[i] += tables[w[i] & 15] + tables[entries + (w[i] >> 4)];
    }
}

struct tables_portable {
    static float largest(const float * x, int k) {
        float most = 0;
        for (int i = 0; i < k; i += 4)
            most =
                std::max(most, (std::fabs(x[i]) + std::fabs(x[i + 1])) + (std::fabs(x[i + 2]) + std::fabs(x[i + 3])));
        return most;
    }
    // Tables and sums of 64 k, each half times its factor. Only eight entries are computed: the others are their
    // mirror, entry ~i = -entry i.
    static void build(const float * x, const float (&factors)[2], uint8_t * tables, int32_t * sums) {
        int q[64];
        for (int i = 0; i < 64; i++)
            q[i] = static_cast<int>(std::nearbyint(x[i] * factors[i / 32]));
        for (int i = 0; i < 64; i += 16) {
            sums[i / 16] = 0;
            for (int j = 0; j < 16; j++)
                sums[i / 16] += q[i + j];
        }
        for (int g = 0; g < 16; g++, tables += entries) {
            for (int e = entries / 2; e < entries; e++) {
                int sum = 0;
                for (int i = 0; i < 4; i++)
                    sum += e >> i & 1 ? q[4 * g + i] : -q[4 * g + i];
                tables[e] = static_cast<uint8_t>((sum + (257 << (fraction - 1))) >> fraction);
                tables[entries - 1 - e] = static_cast<uint8_t>(-tables[e]);
            }
        }
    }
};

struct portable {
    static constexpr int rows = 1;
    using tables = tables_portable;
    template <class F, bool fast, int> static void panel(const uint8_t * w, int blocks, const row_at * row) {
        for (int h = 0; h < F::halves; h++)
            for (int b = 0; b < blocks; b++)
                block<F, fast>(w + F::bytes * static_cast<size_t>(b), h, b, *row);
    }
    template <class F, bool fast> static void block(const uint8_t * w, int h, int b, const row_at & a) {
        constexpr int subs = F::block / F::sub, pairs = F::groups / 2;
        int total[columns] = {}, taken[columns] = {};
        for (int s = 0; s < subs; s++) {
            int sums[columns * F::planes] = {};
            for (int p = 0; p < F::sub / 8; p += pairs) {
                const size_t at = static_cast<size_t>(F::sub / 8 * s + p);
                const uint8_t * tables = a.tables + static_cast<size_t>(F::block / 4 * b) * entries + at * 2 * entries;
                const uint8_t * from = w + F::chunk_bytes * (at / 4) + F::pair_bytes * (at % 4);
                add_bytes<F, fast>(from + columns * F::planes * h, tables, sums);
            }
            const uint8_t * small = w + F::chunk_bytes * static_cast<size_t>(s / 2) + F::quant_bytes + 2 * columns * h;
            for (int c = 0; c < columns; c++) {
                int sum = a.starts[subs * b + s];
                for (int p = 0; p < F::planes; p++)
                    sum += sums[byte_of<F>(p, c)] * F::value(p);
                const int x = F::integers == by16::none ? 1 : small[2 * c + s % 2];
                total[c] += sum * (F::integers == by16::scales ? static_cast<int8_t>(x) : F::minima ? x & 15 : x);
                if (F::minima) taken[c] += (x >> 4) * a.sums[subs * b + s];
            }
        }
        const uint8_t * d = w + F::d + 2 * columns * h;
        for (int c = 0; c < columns; c++, d += 2) {
            float & out = a.out[columns * h + c];
            const float sum = static_cast<float>(total[c]), scale = a.scales[b];
            if (F::minima) {
                const float less = from_half(d + 2 * columns * F::halves) * 0.03125f * static_cast<float>(taken[c]);
                out = std::fma(std::fma(from_half(d), sum, -less), scale, out);
            } else {
                out = std::fma(from_half(d) * scale, sum, out);
            }
        }
    }
};

// ---- the product

template <class F, bool fast, class Set, int rows>
void some_rows(const uint8_t * w, int blocks, const row_at * row, size_t left) {
    for (; left >= rows; left -= rows, row += rows)
        Set::template panel<F, fast, rows>(w, blocks, row);
    if constexpr (rows > 1) some_rows<F, fast, Set, 1>(w, blocks, row, left);
}

template <class F, bool fast, class Set>
void multiply(const uint8_t * w, size_t copies, size_t k, size_t n, const float * x, size_t rows, float * out) {
    constexpr size_t width = columns * F::halves;
    std::vector<prepared> prepared_rows(rows);
    std::vector<row_at> at(rows);
    for (size_t copy = 0; copy < copies; copy++) {
        for (size_t m = 0; m < rows; m++)
            prepare<F, fast, typename Set::tables>(x + k * m, k, prepared_rows[m]);
        std::memset(out, 0, rows * n * sizeof(float));
        for (size_t from = 0; from < k; from += slice) {
            const size_t blocks = std::min<size_t>(slice, k - from) / F::block;
            for (size_t column = 0; column < n; column += width, w += F::bytes * blocks) {
                for (size_t m = 0; m < rows; m++)
                    at[m] = row_at::of<F>(prepared_rows[m], from, out + n * m + column);
                some_rows<F, fast, Set, fast ? 1 : Set::rows>(w, static_cast<int>(blocks), at.data(), rows);
            }
        }
    }
}

using function = decltype(&multiply<q4_0, false, portable>);

template <class F, class Set> function of(bool fast) { return fast ? multiply<F, true, Set> : multiply<F, false, Set>; }

template <class Set> function chosen(int which, bool fast) {
    switch (which) {
    case 0:
        return of<one_bit, Set>(fast);
    case 1:
        return of<ternary, Set>(fast);
    case 2:
        return of<q2_k, Set>(fast);
    case 3:
        return of<q3_k, Set>(fast);
    default:
        return of<q4_0, Set>(fast);
    }
}

} // namespace

extern "C" {

// x (rows, k) times `copies` matrices of n columns, packed one after the other; out (rows, n) is the last product.
// `which`: 1 bit, ternary, Q2_K, Q3_K, Q4_0. k is a multiple of 256, n of 64.
int tb_lut(int which, int simd, int fast, const uint8_t * w, size_t copies, size_t k, size_t n, const float * x,
           size_t rows, float * out) {
#ifdef __AVX2__
    if (simd) {
        chosen<avx2>(which, fast)(w, copies, k, n, x, rows, out);
        return 0;
    }
#else
    if (simd) return 1;
#endif
    chosen<portable>(which, fast)(w, copies, k, n, x, rows, out);
    return 0;
}

} // extern "C"
