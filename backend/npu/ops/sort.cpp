// ARGSORT and TOP_K: the order of a row's elements, as indices.
//
// An element and its index are packed into one 64-bit key whose unsigned order is the order asked for: the float's bits
// made monotonic, then the index, so that equal elements come in the order of their indices and the result is the same
// however the work was cut. A row with a NaN in it gets indices in range and no promise of their order.
#include "ops/ops.h"

#include <algorithm>
#include <cstring>
#include <functional>

namespace tb::npu {
namespace {

// Monotonic in x: larger floats give larger words.
uint32_t rank_of(float x) {
    if (x != x) {
        return 0;
    }
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));
    return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

// Ascending keys: descending elements.
uint64_t key_descending(float x, int64_t i) {
    return static_cast<uint64_t>(~rank_of(x)) << 32 | static_cast<uint32_t>(i);
}

uint64_t key_ascending(float x, int64_t i) {
    return static_cast<uint64_t>(rank_of(x)) << 32 | static_cast<uint32_t>(i);
}

constexpr int radix_bits = 11;
constexpr int radix_size = 1 << radix_bits;
constexpr int64_t radix_from = 1024; // shorter rows are faster by comparison

// Sort by the upper 32 bits, stable. `other` has room for n keys; the result is in the returned one of the two.
uint64_t * radix_sort(uint64_t * keys, uint64_t * other, int64_t n) {
    for (int shift = 32; shift < 64; shift += radix_bits) {
        uint32_t start[radix_size] = {};
        for (int64_t i = 0; i < n; i++) {
            start[keys[i] >> shift & (radix_size - 1)]++;
        }
        uint32_t at = 0;
        for (uint32_t & s : start) {
            const uint32_t count = s;
            s = at;
            at += count;
        }
        for (int64_t i = 0; i < n; i++) {
            other[start[keys[i] >> shift & (radix_size - 1)]++] = keys[i];
        }
        std::swap(keys, other);
    }
    return keys;
}

uint64_t argsort_scratch(const tb_op & op, int n_threads, const kernel_table &) {
    return static_cast<uint64_t>(n_threads) * 2 * align64(uint64_t{op.src[0].ne[0]} * sizeof(uint64_t));
}

void argsort(const op_context & ctx) {
    const view & x = ctx.src[0];
    const view & dst = ctx.dst;
    const int64_t n = x.ne(0);
    const bool descending = ctx.param_i(0) != 0;
    const uint64_t bytes = align64(static_cast<uint64_t>(n) * sizeof(uint64_t));
    uint8_t * own = ctx.scratch + static_cast<size_t>(ctx.thread) * 2 * bytes;
    uint64_t * keys = reinterpret_cast<uint64_t *>(own);
    uint64_t * other = reinterpret_cast<uint64_t *>(own + bytes);
    int64_t first = 0;
    int64_t last = 0;
    ctx.share(x.rows(), 1, &first, &last);
    for (int64_t r = first; r < last; r++) {
        const row_index i = row_of(x, r);
        const float * row = x.at<const float>(i.i1, i.i2, i.i3);
        for (int64_t j = 0; j < n; j++) {
            keys[j] = descending ? key_descending(row[j], j) : key_ascending(row[j], j);
        }
        const uint64_t * sorted = keys;
        if (n < radix_from) {
            std::sort(keys, keys + n);
        } else {
            sorted = radix_sort(keys, other, n);
        }
        int32_t * out = dst.at<int32_t>(i.i1, i.i2, i.i3);
        for (int64_t j = 0; j < n; j++) {
            out[j] = static_cast<int32_t>(sorted[j]);
        }
    }
}

// ---- TOP_K: the k largest of each row, largest first. Fewer rows than threads: each row is cut into one part per
// thread, and who takes the row merges the parts' winners.

constexpr int64_t block = 64; // elements looked at by their maximum alone once enough candidates are known

int64_t parts_of(int64_t rows, int n_threads) { return rows < n_threads ? n_threads : 1; }

// Candidates of one part: k that stay and at least as many that wait to be thrown out.
int64_t pool_size(int64_t k) { return k + std::max<int64_t>(k, 1024); }

uint64_t top_k_scratch(const tb_op & op, int n_threads, const kernel_table &) {
    const int64_t rows = static_cast<int64_t>(op.dst.ne[1]) * op.dst.ne[2] * op.dst.ne[3];
    const int64_t parts = parts_of(rows, n_threads);
    const uint64_t pools =
        static_cast<uint64_t>(n_threads) * align64(static_cast<uint64_t>(pool_size(op.dst.ne[0])) * 8);
    const uint64_t winners = parts == 1 ? 0 : static_cast<uint64_t>(rows * parts * op.dst.ne[0]) * 8;
    return pools + winners;
}

// The k smallest keys of elements [first, last) go, in no order, to the front of `pool`; returns how many there are.
int64_t select(const kernel_table & kernels, const float * row, int64_t first, int64_t last, int64_t k,
               uint64_t * pool) {
    const int64_t capacity = pool_size(k);
    int64_t n = 0;
    uint64_t limit = ~uint64_t{0}; // a key that is not below it cannot win
    for (int64_t at = first; at < last; at += block) {
        const int64_t m = std::min(block, last - at);
        if (limit != ~uint64_t{0} && key_descending(kernels.vec.max(m, row + at), 0) >> 32 > limit >> 32) {
            continue;
        }
        for (int64_t j = at; j < at + m; j++) {
            const uint64_t key = key_descending(row[j], j);
            if (key < limit) {
                pool[n++] = key;
            }
        }
        if (n > capacity - block) {
            std::nth_element(pool, pool + k - 1, pool + n);
            limit = pool[k - 1];
            n = k;
        }
    }
    if (n > k) {
        std::nth_element(pool, pool + k - 1, pool + n);
    }
    return std::min(n, k);
}

void write_sorted(uint64_t * keys, int64_t n, int64_t k, int32_t * out) {
    std::partial_sort(keys, keys + k, keys + n);
    for (int64_t j = 0; j < k; j++) {
        out[j] = static_cast<int32_t>(keys[j]);
    }
}

void top_k(const op_context & ctx) {
    const view & x = ctx.src[0];
    const view & dst = ctx.dst;
    const int64_t n = x.ne(0);
    const int64_t k = dst.ne(0);
    const int64_t rows = dst.rows();
    const int64_t parts = parts_of(rows, ctx.n_threads);
    const uint64_t pool_bytes = align64(static_cast<uint64_t>(pool_size(k)) * 8);
    uint64_t * pool = reinterpret_cast<uint64_t *>(ctx.scratch + static_cast<size_t>(ctx.thread) * pool_bytes);
    uint64_t * winners = reinterpret_cast<uint64_t *>(ctx.scratch + static_cast<size_t>(ctx.n_threads) * pool_bytes);
    int64_t first = 0;
    int64_t last = 0;
    ctx.share(rows * parts, 1, &first, &last);
    for (int64_t item = first; item < last; item++) {
        const row_index i = row_of(dst, item / parts);
        const float * row = x.at<const float>(i.i1, i.i2, i.i3);
        const int64_t part = item % parts;
        const int64_t found = select(*ctx.kernels, row, n * part / parts, n * (part + 1) / parts, k, pool);
        if (parts == 1) {
            write_sorted(pool, found, k, dst.at<int32_t>(i.i1, i.i2, i.i3));
        } else {
            uint64_t * to = std::copy(pool, pool + found, winners + item * k);
            std::fill(to, winners + (item + 1) * k, ~uint64_t{0});
        }
    }
    if (parts == 1) {
        return;
    }
    ctx.barrier();
    ctx.share(rows, 1, &first, &last);
    for (int64_t r = first; r < last; r++) {
        const row_index i = row_of(dst, r);
        write_sorted(winners + r * parts * k, parts * k, k, dst.at<int32_t>(i.i1, i.i2, i.i3));
    }
}

} // namespace

const op_entry argsort_entry = {argsort, argsort_scratch};
const op_entry top_k_entry = {top_k, top_k_scratch};

} // namespace tb::npu
