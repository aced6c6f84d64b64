// Mathematics, as much of it as the executor uses. Accuracy: see runtime/math.c.
#ifndef TB_HEXAGON_MATH_H
#define TB_HEXAGON_MATH_H

#define HUGE_VAL __builtin_huge_val()
#define HUGE_VALF __builtin_huge_valf()
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FP_ILOGB0 (-2147483647 - 1)
#define FP_ILOGBNAN (-2147483647 - 1)
#define FP_NAN 0
#define FP_INFINITE 1
#define FP_ZERO 2
#define FP_SUBNORMAL 3
#define FP_NORMAL 4
#define M_PI 3.14159265358979323846
#define fpclassify(x) __builtin_fpclassify(FP_NAN, FP_INFINITE, FP_NORMAL, FP_SUBNORMAL, FP_ZERO, x)
#define isnan(x) __builtin_isnan(x)
#define isinf(x) __builtin_isinf(x)
#define isfinite(x) __builtin_isfinite(x)
#define isnormal(x) __builtin_isnormal(x)
#define signbit(x) __builtin_signbit(x)

typedef float float_t;
typedef double double_t;

#ifdef __cplusplus
extern "C" {
#endif

double fabs(double x);
float fabsf(float x);
double floor(double x);
float floorf(float x);
double ceil(double x);
float ceilf(float x);
double trunc(double x);
float truncf(float x);
double round(double x);
float roundf(float x);
double rint(double x);
double nearbyint(double x);
double exp(double x);
float expf(float x);
double exp2(double x);
float exp2f(float x);
double expm1(double x);
float expm1f(float x);
double log(double x);
float logf(float x);
double log2(double x);
double tanh(double x);
float tanhf(float x);
double erf(double x);
float erff(float x);
double erfc(double x);
float erfcf(float x);
float sqrtf(float x);
float sinf(float x);
float cosf(float x);
double pow(double x, double y);
float powf(float x, float y);
float fmaxf(float x, float y);
float fminf(float x, float y);
double copysign(double x, double y);
float copysignf(float x, float y);
double ldexp(double x, int e);
int ilogb(double x);

#ifdef __cplusplus
}
#endif

#endif
