// The part of <math.h> that the executor and the headers of libc++ use. Floats: exponentials are evaluated in float
// with fused multiply-add, the rest by way of doubles, so errors stay below one unit in the last place. Doubles: within
// two units or so.
#include <math.h>
#include <stdint.h>

#include "bits.h"

// --- parts of a number ----------------------------------------------------------------------------------------------

double fabs(double x) { return bits_double(double_bits(x) & 0x7fffffffffffffffu); }
float fabsf(float x) { return bits_float(float_bits(x) & 0x7fffffffu); }
double copysign(double x, double y) {
    return bits_double((double_bits(x) & 0x7fffffffffffffffu) | (double_bits(y) & 0x8000000000000000u));
}
float copysignf(float x, float y) { return bits_float((float_bits(x) & 0x7fffffffu) | (float_bits(y) & 0x80000000u)); }
float fmaxf(float x, float y) { return x != x ? y : x < y ? y : x; }
float fminf(float x, float y) { return x != x ? y : y < x ? y : x; }

// 2^e for e in -1022 .. 1023
static double power_of_two(int e) { return bits_double((uint64_t)(e + 1023) << 52); }

double ldexp(double x, int e) {
    // In steps, so that a subnormal result is rounded once: by the last product.
    for (; e > 1023; e -= 1023)
        x *= 0x1p1023;
    if (e < -1022) {
        // Bring x to a size whose bits survive until then.
        for (; e < -2200; e += 1100) // far below everything: two steps end at zero
            x *= 0x1p-1022;
        if (e < -1022 && fabs(x) >= 0x1p-53) {
            x *= 0x1p-969;
            e += 969;
        }
        for (; e < -1022; e += 1022)
            x *= 0x1p-1022;
    }
    return x * power_of_two(e);
}

int ilogb(double x) {
    const uint64_t u = double_bits(x) & 0x7fffffffffffffffu;
    if (u == 0) return FP_ILOGB0;
    if (u >= 0x7ff0000000000000u) return u == 0x7ff0000000000000u ? 0x7fffffff : FP_ILOGBNAN;
    return u >> 52 ? (int)(u >> 52) - 1023 : -1011 - __builtin_clzll(u);
}

// --- rounding -------------------------------------------------------------------------------------------------------

// The bits of a double below its point; 0: it has none.
static uint64_t fraction(uint64_t u) {
    const int e = (int)(u >> 52 & 0x7ff) - 1023;
    return e >= 52 ? 0 : e < 0 ? 0xfffffffffffffu : 0xfffffffffffffu >> e;
}

double trunc(double x) {
    const uint64_t u = double_bits(x);
    if (fabs(x) < 1.0) return bits_double(u & 0x8000000000000000u);
    return bits_double(u & ~fraction(u));
}

double floor(double x) {
    const double t = trunc(x);
    return t > x ? t - 1.0 : t;
}

double ceil(double x) {
    const double t = trunc(x);
    return t < x ? t + 1.0 : t;
}

double round(double x) {
    const double t = trunc(x);
    return fabs(x - t) >= 0.5 ? t + copysign(1.0, x) : t;
}

double rint(double x) {
    if (!(fabs(x) < 0x1p52)) return x;
    const double big = copysign(0x1p52, x);
    volatile double sum = x + big;
    return copysign(sum - big, x);
}

double nearbyint(double x) { return rint(x); }

float truncf(float x) { return (float)trunc((double)x); }
float floorf(float x) { return (float)floor((double)x); }
float ceilf(float x) { return (float)ceil((double)x); }
float roundf(float x) { return (float)round((double)x); }

// --- exponentials ---------------------------------------------------------------------------------------------------

// 2^(j/32)
static const double roots[32] = {
    0x1.0000000000000p+0, 0x1.059b0d3158574p+0, 0x1.0b5586cf9890fp+0, 0x1.11301d0125b51p+0, 0x1.172b83c7d517bp+0,
    0x1.1d4873168b9aap+0, 0x1.2387a6e756238p+0, 0x1.29e9df51fdee1p+0, 0x1.306fe0a31b715p+0, 0x1.371a7373aa9cbp+0,
    0x1.3dea64c123422p+0, 0x1.44e086061892dp+0, 0x1.4bfdad5362a27p+0, 0x1.5342b569d4f82p+0, 0x1.5ab07dd485429p+0,
    0x1.6247eb03a5585p+0, 0x1.6a09e667f3bcdp+0, 0x1.71f75e8ec5f74p+0, 0x1.7a11473eb0187p+0, 0x1.82589994cce13p+0,
    0x1.8ace5422aa0dbp+0, 0x1.93737b0cdc5e5p+0, 0x1.9c49182a3f090p+0, 0x1.a5503b23e255dp+0, 0x1.ae89f995ad3adp+0,
    0x1.b7f76f2fb5e47p+0, 0x1.c199bdd85529cp+0, 0x1.cb720dcef9069p+0, 0x1.d5818dcfba487p+0, 0x1.dfc97337b9b5fp+0,
    0x1.ea4afa2a490dap+0, 0x1.f50765b6e4540p+0};

// e^r * 2^(n / 32), |r| below 0.011: seven terms of the series.
static double exponential(double r, int n) {
    const double p = r * (1.0 + r * (1.0 / 2 + r * (1.0 / 6 + r * (1.0 / 24 + r * (1.0 / 120 + r * (1.0 / 720))))));
    const double root = roots[n & 31];
    return ldexp(root + root * p, (n - (n & 31)) / 32);
}

double exp(double x) {
    if (x != x) return x;
    if (x > 710.0) return INFINITY;
    if (x < -746.0) return 0.0;
    const double n = rint(x * 46.166241308446828384); // 32 / ln 2
    return exponential((x - n * 0x1.62e42fefa0000p-6) - n * 0x1.cf79abc9e3b3ap-45, (int)n);
}

double exp2(double x) {
    if (x != x) return x;
    if (x > 1025.0) return INFINITY;
    if (x < -1076.0) return 0.0;
    const double n = rint(x * 32.0);
    return exponential((x - n * (1.0 / 32)) * 0.69314718055994530942, (int)n);
}

// e^r * 2^n, |r| at most ln(2) / 2
static float exponentialf(float r, int n) {
    float p = 1.0f / 5040;
    p = __builtin_fmaf(p, r, 1.0f / 720);
    p = __builtin_fmaf(p, r, 1.0f / 120);
    p = __builtin_fmaf(p, r, 1.0f / 24);
    p = __builtin_fmaf(p, r, 1.0f / 6);
    p = __builtin_fmaf(p, r, 0.5f);
    p = __builtin_fmaf(p, r, 1.0f);
    p = __builtin_fmaf(p, r, 1.0f);
    const int half = n >> 1; // two factors: both are normal numbers
    return p * bits_float((uint32_t)(half + 127) << 23) * bits_float((uint32_t)(n - half + 127) << 23);
}

float expf(float x) {
    if (x != x) return x;
    if (x > 89.0f) return INFINITY;
    if (x < -104.0f) return 0.0f;
    const float n = (x * 1.44269504088896f + 12582912.0f) - 12582912.0f;
    const float r = __builtin_fmaf(n, -0x1.0bfbe8p-15f, __builtin_fmaf(n, -0x1.62ep-1f, x));
    return exponentialf(r, (int)n);
}

float exp2f(float x) {
    if (x != x) return x;
    if (x > 129.0f) return INFINITY;
    if (x < -151.0f) return 0.0f;
    const float n = (x + 12582912.0f) - 12582912.0f;
    return exponentialf((x - n) * 0.693147180559945f, (int)n);
}

double expm1(double x) {
    if (fabs(x) > 0.03) return exp(x) - 1.0;
    return x * (1.0 + x * (1.0 / 2 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120 + x * (1.0 / 720 + x / 5040))))));
}

float expm1f(float x) { return (float)expm1((double)x); }

double tanh(double x) {
    const double a = fabs(x);
    if (a > 20.0) return copysign(1.0, x);
    const double e = expm1(2.0 * a);
    return copysign(e / (e + 2.0), x);
}

float tanhf(float x) { return x != x ? x : (float)tanh((double)x); }

// --- logarithms -----------------------------------------------------------------------------------------------------

// log(x) = *e * ln 2 + result, for positive finite x.
static double reduced_log(double x, int * e) {
    *e = ilogb(x);
    double m = ldexp(x, -*e);
    if (m > 1.41421356237309504880) {
        m *= 0.5;
        ++*e;
    }
    // 2 atanh(s), |s| at most 0.172
    const double s = (m - 1.0) / (m + 1.0), t = s * s;
    double p = 1.0 / 23;
    for (int k = 21; k >= 3; k -= 2)
        p = p * t + 1.0 / k;
    return 2.0 * s + 2.0 * s * t * p;
}

// What a logarithm is where it is no finite number; false: it is one.
static int special_log(double x, double * result) {
    if (x > 0.0 && x < INFINITY) return 0;
    *result = x == 0.0 ? -INFINITY : x > 0.0 ? INFINITY : __builtin_nan("");
    return 1;
}

double log(double x) {
    double r;
    int e;
    if (special_log(x, &r)) return r;
    r = reduced_log(x, &e);
    return e * 0x1.62e42fefa0000p-1 + (e * 0x1.cf79abc9e3b3ap-40 + r);
}

double log2(double x) {
    double r;
    int e;
    if (special_log(x, &r)) return r;
    r = reduced_log(x, &e);
    return e + r * 1.44269504088896340736;
}

float logf(float x) { return (float)log((double)x); }

// Doubles lose |y log2 x| * 2^-52 here, of which a float sees nothing.
double pow(double x, double y) {
    if (y == 0.0 || x == 1.0) return 1.0;
    if (x != x || y != y) return __builtin_nan("");
    const int whole = trunc(y) == y;
    const int odd = whole && fabs(y) < 0x1p53 && trunc(y * 0.5) * 2.0 != y;
    if (fabs(y) == INFINITY) {
        const double a = fabs(x);
        return a == 1.0 ? 1.0 : (a > 1.0) == (y > 0.0) ? INFINITY : 0.0;
    }
    if (x < 0.0 && x != -INFINITY && !whole) return __builtin_nan("");
    const double size = exp2(y * log2(fabs(x))); // log2(0) = -inf and log2(inf) = inf give the right ends
    return odd && (double_bits(x) >> 63) ? -size : size;
}

float powf(float x, float y) { return (float)pow((double)x, (double)y); }

// --- trigonometry ---------------------------------------------------------------------------------------------------

// Bits of 2 / pi behind the point.
static const uint32_t two_over_pi[10] = {0xa2f9836e, 0x4e441529, 0xfc2757d1, 0xf534ddc0, 0xdb629599,
                                         0x3c439041, 0xfe5163ab, 0xdebbc561, 0xb7246e3a, 0x424dd2e0};

// 32 bits of it from bit `at` on; bits in front of the point are 0. By way of 64 bits: clang 19 makes a funnel shift of
// the pair of 32-bit shifts, and then forgets to take its distance modulo 32.
static uint32_t bits_of_two_over_pi(int at) {
    if (at <= -32) return 0;
    if (at < 0) return two_over_pi[0] >> -at;
    const int word = at / 32, bit = at % 32;
    const uint64_t both = (uint64_t)two_over_pi[word] << 32 | two_over_pi[word + 1];
    return (uint32_t)(both << bit >> 32);
}

// x = result + quadrant * pi/2, |result| at most pi/4 or so, for any finite float; *quadrant modulo 4.
static double reduce(double x, int * quadrant) {
    if (fabs(x) < 1e5) {
        const double n = rint(x * 0.63661977236758134308);
        *quadrant = (int)n & 3;
        return ((x - n * 0x1.921fb544p+0) - n * 0x1.0b4611a6p-34) - n * 0x1.3198a2e037073p-69;
    }
    // x = m * 2^e, m of 24 bits: m times the bits of 2/pi that are worth between 2 and 2^-94 after the product.
    const int e = ilogb(x) - 23;
    const uint64_t m = (uint64_t)ldexp(fabs(x), -e);
    uint64_t high = m * bits_of_two_over_pi(e - 2), middle = m * bits_of_two_over_pi(e + 30),
             low = m * bits_of_two_over_pi(e + 62);
    middle += low >> 32;
    high += middle >> 32;
    // The product's low 32 bits of `high` are worth 2 bits in front of the point and 30 behind it.
    const uint64_t turn = high << 32 | (uint32_t)middle;
    int q = (int)(turn >> 62);
    int64_t part = (int64_t)(turn << 2 | (uint32_t)low >> 30); // of a quadrant, in 2^-64
    if (part < 0) q++;                                         // nearer to the next: part is then what is missing
    const double r = (double)part * 0x1p-64 * 1.57079632679489661923;
    *quadrant = (x < 0.0 ? -q : q) & 3;
    return x < 0.0 ? -r : r;
}

static double sine(double r) {
    const double t = r * r;
    return r + r * t *
                   (-1.0 / 6 +
                    t * (1.0 / 120 +
                         t * (-1.0 / 5040 + t * (1.0 / 362880 + t * (-1.0 / 39916800 + t * (1.0 / 6227020800.0))))));
}

static double cosine(double r) {
    const double t = r * r;
    return 1.0 + t * (-0.5 + t * (1.0 / 24 +
                                  t * (-1.0 / 720 +
                                       t * (1.0 / 40320 + t * (-1.0 / 3628800 +
                                                               t * (1.0 / 479001600.0 - t * (1.0 / 87178291200.0)))))));
}

float sinf(float x) {
    if (!(fabsf(x) < INFINITY)) return __builtin_nanf("");
    int q;
    const double r = reduce((double)x, &q), y = q & 1 ? cosine(r) : sine(r);
    return (float)(q & 2 ? -y : y);
}

float cosf(float x) {
    if (!(fabsf(x) < INFINITY)) return __builtin_nanf("");
    int q;
    const double r = reduce((double)x, &q), y = q & 1 ? sine(r) : cosine(r);
    return (float)(((q + 1) & 2) ? -y : y);
}

// --- the error function
// -----------------------------------------------------------------------------------------------

// erfc(x) * exp(x^2) as a polynomial in (x - 3) / (x + 3), interpolated at Chebyshev points of 0 <= x <= 12; relative
// error below 1e-10.
double erfc(double x) {
    static const double c[13] = {0.1790011511797817,    -0.3262335602283965,   0.24560380211380267,
                                 -0.1501159278830531,   0.0716658266427194,    -0.024392617735386837,
                                 0.004269215414228373,  0.0007084711745085962, -0.0005972259667444038,
                                 4.302590550248202e-05, 6.376815975822397e-05, -9.476028551617603e-06,
                                 -6.622359299782153e-06};
    const double a = fabs(x);
    if (x != x) return x;
    if (a > 12.0) return x < 0.0 ? 2.0 : 0.0;
    const double t = (a - 3.0) / (a + 3.0);
    double p = c[12];
    for (int i = 11; i >= 0; i--)
        p = p * t + c[i];
    const double y = p * exp(-a * a);
    return x < 0.0 ? 2.0 - y : y;
}

double erf(double x) {
    if (fabs(x) > 0.5) return 1.0 - erfc(x);
    const double t = x * x;
    double term = x, sum = x;
    for (int k = 1; k < 14; k++) {
        term *= -t / k;
        sum += term / (2 * k + 1);
    }
    return sum * 1.12837916709551257390; // 2 / sqrt(pi)
}

float erfcf(float x) { return (float)erfc((double)x); }
float erff(float x) { return (float)erf((double)x); }
