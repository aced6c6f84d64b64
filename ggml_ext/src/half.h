// FP16 and BF16 to and from float, bit exact with IEEE 754 round to nearest even, without compiler extensions.
#ifndef TILEBEAM_HALF_H
#define TILEBEAM_HALF_H

#include <stdint.h>
#include <string.h>

static inline float tb_bits_float(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static inline uint32_t tb_float_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static inline float tb_half_to_float(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    const uint32_t mag = h & 0x7fffu;
    if (mag >= 0x7c00u) return tb_bits_float(sign | 0x7f800000u | (mag & 0x3ffu) << 13);
    if (mag >= 0x0400u) return tb_bits_float(sign | ((mag << 13) + (112u << 23)));
    // zero and subnormal: mag * 2^-24 is exact
    return tb_bits_float(sign | tb_float_bits((float)mag * 5.9604644775390625e-8f));
}

static inline uint16_t tb_float_to_half(float f) {
    const uint32_t u = tb_float_bits(f);
    const uint16_t sign = (uint16_t)(u >> 16 & 0x8000u);
    const uint32_t mag = u & 0x7fffffffu;
    if (mag > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (mag >> 13 & 0x3ffu));
    if (mag >= 0x47800000u) return (uint16_t)(sign | 0x7c00u);
    if (mag < 0x38800000u) {
        // below the smallest normal FP16: adding 0.5 makes the float unit round at 2^-24
        const float r = tb_bits_float(mag) + 0.5f;
        return (uint16_t)(sign | (tb_float_bits(r) - 0x3f000000u));
    }
    const uint32_t odd = mag >> 13 & 1u;
    return (uint16_t)(sign | ((mag - (112u << 23) + 0xfffu + odd) >> 13));
}

static inline float tb_bf16_to_float(uint16_t b) { return tb_bits_float((uint32_t)b << 16); }

static inline uint16_t tb_load16(const uint8_t * p) {
    uint16_t v;
    memcpy(&v, p, 2);
    return v;
}

static inline void tb_store16(uint8_t * p, uint16_t v) { memcpy(p, &v, 2); }

// Half of the UE4M3 number x, what a scale of NVFP4 stands for; its NaN counts as 0, as in ggml_ue4m3_to_fp32.
static inline float tb_small_to_float(uint8_t x) {
    return x == 0x7f ? 0.0f : tb_half_to_float((uint16_t)((x & 0x7f) << 7)) * 128.0f;
}

// 2^(x - 128): what a scale of MXFP4 stands for, half of E8M0's 2^(x - 127). Subnormal for 0 and 1.
static inline float tb_power_to_float(uint8_t x) { return tb_bits_float(x < 2 ? 0x00200000u << x : (x - 1u) << 23); }

#endif // TILEBEAM_HALF_H
