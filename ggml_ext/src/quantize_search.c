// The search for scales, once for each vector length, and the choice between them.
#include <math.h>

#include "half.h"
#include "quantize_batch.h"
#include "tile.h"

// Where a group's reference weight is tried on the code book's axis, and how often what was found is refined.
struct grid {
    int sides; // 2: either sign of the scale; 1: the code book is symmetric
    int n, refine, around;
    float place[80];
};

static const struct grid GRID[3] = {
    [CODE_4BIT] = {2, 32, 4, 2, {4.00f, 4.25f, 4.50f, 4.75f, 5.00f, 5.25f, 5.50f, 5.75f, 6.00f, 6.20f, 6.40f,
                                 6.60f, 6.80f, 7.00f, 7.20f, 7.40f, 7.60f, 7.80f, 8.00f, 8.20f, 8.40f, 8.60f,
                                 8.80f, 9.00f, 9.40f, 9.80f, 10.3f, 11.0f, 12.0f, 13.5f, 16.0f, 20.0f}},
    [CODE_8BIT] = {1, 80, 3, 2, {84.0f,  88.0f,  91.0f,  92.0f,  93.0f,  94.0f,  95.0f,  96.0f,  97.0f,  98.0f,
                                 99.0f,  100.0f, 101.0f, 102.0f, 103.0f, 104.0f, 105.0f, 106.0f, 107.0f, 108.0f,
                                 109.0f, 110.0f, 111.0f, 112.0f, 113.0f, 113.4f, 113.8f, 114.2f, 114.6f, 115.0f,
                                 115.4f, 115.8f, 116.2f, 116.6f, 117.0f, 117.4f, 117.8f, 118.2f, 118.6f, 119.0f,
                                 119.4f, 119.8f, 120.2f, 120.6f, 121.0f, 121.4f, 121.8f, 122.2f, 122.6f, 123.0f,
                                 123.4f, 123.8f, 124.0f, 124.3f, 124.6f, 124.9f, 125.2f, 125.5f, 125.8f, 126.1f,
                                 126.4f, 126.7f, 127.0f, 127.3f, 127.6f, 127.9f, 129.0f, 131.0f, 134.0f, 137.0f,
                                 141.0f, 146.0f, 152.0f, 159.0f, 168.0f, 178.0f, 190.0f, 205.0f, 225.0f, 250.0f}},
    [CODE_NONLINEAR] = {2, 24, 4, 2, {70.0f,  76.0f,  82.0f,  88.0f,  93.0f,  97.0f,  101.0f, 105.0f,
                                      108.0f, 111.0f, 114.0f, 117.0f, 120.0f, 123.0f, 126.0f, 129.0f,
                                      132.0f, 136.0f, 140.0f, 146.0f, 154.0f, 165.0f, 190.0f, 240.0f}},
};

#define V 4
#define TARGET
#define NAME(x) x##_4
#include "quantize_lanes.h"
#undef V
#undef TARGET
#undef NAME

#if defined(__x86_64__)
#    define V 8
#    define TARGET __attribute__((target("avx2")))
#    define NAME(x) x##_8
#    include "quantize_lanes.h"
#    undef V
#    undef TARGET
#    undef NAME

#    define V 16
#    define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#    define NAME(x) x##_16
#    include "quantize_lanes.h"
#    undef V
#    undef TARGET
#    undef NAME
#endif

// Vectors of how many groups this CPU has.
static int longest(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
        return 16;
    }
    if (__builtin_cpu_supports("avx2")) return 8;
#endif
    return 4;
}

int tb_search_lanes(int search) {
    const int most = longest();
    if (search == 1) return most;
    return (search == 4 || search == 8 || search == 16) && search <= most ? search : 0;
}

void tb_search_scales(int lanes, enum code code, struct batch * b) {
#if defined(__x86_64__)
    if (lanes == 16) {
        search_any_16(code, b);
    } else if (lanes == 8) {
        search_any_8(code, b);
    } else {
        search_any_4(code, b);
    }
#else
    (void)lanes;
    search_any_4(code, b);
#endif
}
