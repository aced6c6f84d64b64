// What the compiler calls for operations that Hexagon v66 has no instructions for: integer division, division and
// square roots of floats, and products and quotients of doubles. All round to nearest even, like the instructions.
#include <stdint.h>
#include <string.h>

#include "bits.h"

// --- integers -----------------------------------------------------------------------------------------------------

// Long division in base 2, from the divisor's highest possible place down. n / 0 is all ones, as good as anything.
static uint64_t divide64(uint64_t n, uint64_t d, uint64_t * rest) {
    uint64_t q = 0;
    if (d == 0) {
        *rest = n;
        return UINT64_MAX;
    }
    if (n >= d) {
        int shift = __builtin_clzll(d) - __builtin_clzll(n);
        d <<= shift;
        for (; shift >= 0; shift--, d >>= 1) {
            q <<= 1;
            if (n >= d) {
                n -= d;
                q |= 1;
            }
        }
    }
    *rest = n;
    return q;
}

static uint32_t divide32(uint32_t n, uint32_t d, uint32_t * rest) {
    uint32_t q = 0;
    if (d == 0) {
        *rest = n;
        return UINT32_MAX;
    }
    if (n >= d) {
        int shift = __builtin_clz(d) - __builtin_clz(n);
        d <<= shift;
        for (; shift >= 0; shift--, d >>= 1) {
            q <<= 1;
            if (n >= d) {
                n -= d;
                q |= 1;
            }
        }
    }
    *rest = n;
    return q;
}

uint32_t __hexagon_udivsi3(uint32_t n, uint32_t d) {
    uint32_t rest;
    return divide32(n, d, &rest);
}

uint32_t __hexagon_umodsi3(uint32_t n, uint32_t d) {
    uint32_t rest;
    divide32(n, d, &rest);
    return rest;
}

uint64_t __hexagon_udivdi3(uint64_t n, uint64_t d) {
    uint64_t rest;
    return divide64(n, d, &rest);
}

uint64_t __hexagon_umoddi3(uint64_t n, uint64_t d) {
    uint64_t rest;
    divide64(n, d, &rest);
    return rest;
}

static uint32_t size32(int32_t x) { return x < 0 ? 0u - (uint32_t)x : (uint32_t)x; }
static uint64_t size64(int64_t x) { return x < 0 ? 0u - (uint64_t)x : (uint64_t)x; }

int32_t __hexagon_divsi3(int32_t n, int32_t d) {
    const uint32_t q = __hexagon_udivsi3(size32(n), size32(d));
    return (int32_t)((n < 0) != (d < 0) ? 0u - q : q);
}

int32_t __hexagon_modsi3(int32_t n, int32_t d) {
    const uint32_t r = __hexagon_umodsi3(size32(n), size32(d));
    return (int32_t)(n < 0 ? 0u - r : r);
}

int64_t __hexagon_divdi3(int64_t n, int64_t d) {
    const uint64_t q = __hexagon_udivdi3(size64(n), size64(d));
    return (int64_t)((n < 0) != (d < 0) ? 0u - q : q);
}

int64_t __hexagon_moddi3(int64_t n, int64_t d) {
    const uint64_t r = __hexagon_umoddi3(size64(n), size64(d));
    return (int64_t)(n < 0 ? 0u - r : r);
}

// --- float ---------------------------------------------------------------------------------------------------------

// m * 2^e as a float, m in [2^23, 2^24); `below` is the sign of (true value - m * 2^e), less than one unit of m.
static float finish_float(uint32_t sign, uint32_t m, int e, int below) {
    const int biased = e + 23 + 127;
    if (biased >= 255) return bits_float(sign | 0x7f800000u);
    if (biased > 0) return bits_float(sign | ((uint32_t)biased << 23) | (m & 0x7fffffu));
    const int shift = 1 - biased;
    if (shift > 25) return bits_float(sign);
    const uint32_t half = 1u << (shift - 1), rest = m & ((half << 1) - 1);
    uint32_t kept = m >> shift;
    if (rest > half || (rest == half && (below > 0 || (below == 0 && (kept & 1))))) kept++;
    return bits_float(sign | kept);
}

// Mantissa in [2^23, 2^24) and exponent of a finite number that is not zero.
static uint32_t split_float(uint32_t magnitude, int * e) {
    uint32_t m = magnitude & 0x7fffffu;
    *e = (int)(magnitude >> 23) - 150;
    if (*e == -150) {
        const int shift = __builtin_clz(m) - 8;
        m <<= shift;
        *e = -149 - shift;
        return m;
    }
    return m | 0x800000u;
}

float __hexagon_divsf3(float a, float b) {
    const uint32_t sign = (float_bits(a) ^ float_bits(b)) & 0x80000000u;
    const uint32_t x = float_bits(a) & 0x7fffffffu, y = float_bits(b) & 0x7fffffffu;
    if (x > 0x7f800000u || y > 0x7f800000u || (x == y && (x == 0 || x == 0x7f800000u))) return __builtin_nanf("");
    if (x == 0x7f800000u || y == 0) return bits_float(sign | 0x7f800000u);
    if (x == 0 || y == 0x7f800000u) return bits_float(sign);
    int ea, eb;
    const uint32_t ma = split_float(x, &ea), mb = split_float(y, &eb);
    // Both in [1, 2), the reciprocal by Newton's iteration, one correction of the quotient by its exact rest.
    float n = bits_float(0x3f800000u | (ma & 0x7fffffu));
    const float d = bits_float(0x3f800000u | (mb & 0x7fffffu));
    int e = ea - eb;
    if (n < d) {
        n = bits_float(float_bits(n) + 0x800000u);
        e--;
    }
    float r = bits_float(0x7ef311c7u - float_bits(d));
    for (int i = 0; i < 4; i++)
        r = __builtin_fmaf(r, __builtin_fmaf(-d, r, 1.0f), r);
    float q = n * r;
    q = __builtin_fmaf(__builtin_fmaf(-q, d, n), r, q);
    if (q >= 2.0f) q = bits_float(0x3fffffffu); // the quotient is below 2: its last place rounded up by the estimate
    if (q < 1.0f) q = 1.0f;
    // The exact rest says whether a neighbour is nearer; quotients never lie half way between two floats.
    float rest = __builtin_fmaf(-q, d, n);
    const float half = 0x1p-24f * d;
    if (rest > half) {
        q = bits_float(float_bits(q) + 1);
    } else if (rest < -half) {
        q = bits_float(float_bits(q) - 1);
    }
    rest = __builtin_fmaf(-q, d, n);
    return finish_float(sign, (float_bits(q) & 0x7fffffu) | 0x800000u, e - 23, (rest > 0) - (rest < 0));
}

float sqrtf(float x) {
    const uint32_t u = float_bits(x);
    if ((u & 0x7fffffffu) == 0 || u == 0x7f800000u) return x;
    if (u > 0x7f800000u) return __builtin_nanf("");
    int e;
    uint32_t m = split_float(u, &e);
    e += 23;
    // x = n * 2^e, e even, n in [1, 4)
    float n = bits_float(0x3f800000u | (m & 0x7fffffu));
    if (e & 1) {
        n *= 2.0f;
        e--;
    }
    float r = bits_float(0x5f3759dfu - (float_bits(n) >> 1)); // 1 / sqrt(n)
    for (int i = 0; i < 4; i++)
        r = __builtin_fmaf(r * 0.5f, __builtin_fmaf(-n * r, r, 1.0f), r);
    float q = n * r;
    q = __builtin_fmaf(__builtin_fmaf(-q, q, n), r * 0.5f, q);
    // Nearest: (q + h)^2 = q^2 + 2qh + h^2 against n, h half a unit of q in [1, 2): roots never lie half way.
    const float rest = __builtin_fmaf(-q, q, n), h = 0x1p-24f;
    if (rest > 2.0f * q * h) {
        q = bits_float(float_bits(q) + 1);
    } else if (rest < -2.0f * q * h) {
        q = bits_float(float_bits(q) - 1);
    }
    return bits_float(float_bits(q) + ((uint32_t)(e / 2) << 23));
}

float __hexagon_sqrtf(float x) { return sqrtf(x); }

// --- double --------------------------------------------------------------------------------------------------------

enum { extra = 8 }; // bits below a double's last place; the lowest of them says that something was cut off

// m * 2^e rounded, m in [2^(52 + extra), 2^(53 + extra)).
static double finish_double(uint64_t sign, uint64_t m, int e) {
    int biased = e + 52 + extra + 1023;
    int shift = extra;
    if (biased >= 2047) return bits_double(sign | 0x7ff0000000000000u);
    if (biased <= 0) {
        shift += 1 - biased;
        if (shift > 63) return bits_double(sign);
        biased = 0;
    }
    const uint64_t half = (uint64_t)1 << (shift - 1), rest = m & ((half << 1) - 1);
    uint64_t kept = m >> shift;
    if (rest > half || (rest == half && (kept & 1))) kept++; // a carry goes into the exponent, as it should
    return bits_double(sign | ((biased ? ((uint64_t)biased - 1) << 52 : 0) + kept));
}

static uint64_t split_double(uint64_t magnitude, int * e) {
    uint64_t m = magnitude & 0xfffffffffffffu;
    *e = (int)(magnitude >> 52) - 1075;
    if (*e == -1075) {
        const int shift = __builtin_clzll(m) - 11;
        *e = -1074 - shift;
        return m << shift;
    }
    return m | 0x10000000000000u;
}

static const uint64_t infinite = 0x7ff0000000000000u;

double __hexagon_muldf3(double a, double b) {
    const uint64_t sign = (double_bits(a) ^ double_bits(b)) & 0x8000000000000000u;
    const uint64_t x = double_bits(a) & 0x7fffffffffffffffu, y = double_bits(b) & 0x7fffffffffffffffu;
    if (x > infinite || y > infinite || (x == infinite && y == 0) || (y == infinite && x == 0))
        return __builtin_nan("");
    if (x == infinite || y == infinite) return bits_double(sign | infinite);
    if (x == 0 || y == 0) return bits_double(sign);
    int ea, eb;
    const uint64_t ma = split_double(x, &ea), mb = split_double(y, &eb);
    const uint64_t ah = ma >> 32, al = (uint32_t)ma, bh = mb >> 32, bl = (uint32_t)mb;
    const uint64_t low = al * bl, cross = ah * bl + (low >> 32), other = al * bh + (uint32_t)cross;
    const uint64_t high = ah * bh + (cross >> 32) + (other >> 32); // the product's bits 64 and up
    const uint64_t rest = other << 32 | (uint32_t)low;
    // 2^104 <= product < 2^106: keep 61 bits of it, the rest becomes one bit
    const int shift = high >> 41 ? 106 - 53 - extra : 105 - 53 - extra;
    const uint64_t m = high << (64 - shift) | rest >> shift;
    return finish_double(sign, m | ((rest << (64 - shift)) != 0), ea + eb + shift);
}

double __hexagon_divdf3(double a, double b) {
    const uint64_t sign = (double_bits(a) ^ double_bits(b)) & 0x8000000000000000u;
    const uint64_t x = double_bits(a) & 0x7fffffffffffffffu, y = double_bits(b) & 0x7fffffffffffffffu;
    if (x > infinite || y > infinite || (x == y && (x == 0 || x == infinite))) return __builtin_nan("");
    if (x == infinite || y == 0) return bits_double(sign | infinite);
    if (x == 0 || y == infinite) return bits_double(sign);
    int ea, eb;
    uint64_t n = split_double(x, &ea);
    const uint64_t d = split_double(y, &eb);
    int e = ea - eb - 52 - extra;
    if (n < d) {
        n <<= 1;
        e--;
    }
    uint64_t q = 0;
    for (int i = 0; i < 53 + extra; i++, n <<= 1) {
        q <<= 1;
        if (n >= d) {
            n -= d;
            q |= 1;
        }
    }
    return finish_double(sign, q | (n != 0), e);
}
