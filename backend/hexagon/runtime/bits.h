// Floating point numbers as bits and back.
#ifndef TB_HEXAGON_RUNTIME_BITS_H
#define TB_HEXAGON_RUNTIME_BITS_H

#include <stdint.h>

static inline uint32_t float_bits(float x) {
    union {
        float f;
        uint32_t u;
    } v = {.f = x};
    return v.u;
}

static inline float bits_float(uint32_t u) {
    union {
        uint32_t u;
        float f;
    } v = {.u = u};
    return v.f;
}

static inline uint64_t double_bits(double x) {
    union {
        double f;
        uint64_t u;
    } v = {.f = x};
    return v.u;
}

static inline double bits_double(uint64_t u) {
    union {
        uint64_t u;
        double f;
    } v = {.u = u};
    return v.f;
}

#endif
