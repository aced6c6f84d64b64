// Agile-Quant's 4-bit multiplier: two unsigned 4-bit weights in the halves of a 16-bit lane, times one 4-bit
// activation. Each product is 225 at most and stays in its half. bench/agile_quant.py times it.

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

#ifdef __AVX512BW__
constexpr size_t BYTES = 64;
#elif defined(__AVX2__)
constexpr size_t BYTES = 32;
#else
constexpr size_t BYTES = 16;
#endif

typedef uint16_t Lanes __attribute__((vector_size(BYTES)));

constexpr size_t STEP = BYTES / 2; // lanes of a vector
constexpr size_t VECTORS = 4;      // side by side, so that no sum waits for the one before

} // namespace

extern "C" {

// Pairs of columns that tb_pairs works on.
size_t tb_pair_lanes() { return VECTORS * STEP; }

// Sums over k of both halves of pairs[k][lanes] times activations[k]: even columns in sums[0], odd ones in sums[1].
// 16 bits hold 291 products, so k is 256 at most. Everything is done `repeats` times.
void tb_pairs(const uint16_t * pairs, const uint16_t * activations, size_t k, size_t repeats, uint16_t * sums) {
    for (size_t r = 0; r < repeats; r++) {
        Lanes low[VECTORS] = {}, high[VECTORS] = {};
        for (size_t i = 0; i < k; i++) {
            for (size_t v = 0; v < VECTORS; v++) {
                Lanes w;
                memcpy(&w, pairs + (i * VECTORS + v) * STEP, BYTES);
                const Lanes product = w * activations[i];
                low[v] += product & 0xff;
                high[v] += product >> 8;
            }
        }
        memcpy(sums, low, sizeof low);
        memcpy(sums + VECTORS * STEP, high, sizeof high);
        asm volatile("" ::: "memory");
    }
}
}
