// Vectors of V lanes and what both searches for scales do with them: quantize_lanes.h and feedback_lanes.h include this
// first and lanes_end.h last, once per instruction set.
typedef float NAME(vf) __attribute__((vector_size(4 * V)));
typedef int NAME(vi) __attribute__((vector_size(4 * V)));
#define VF NAME(vf)
#define VI NAME(vi)

// Lanes of a where the mask m is set, of b elsewhere. Macros: vectors as arguments would need one ABI for all sets.
#define SELECT(m, a, b) ((VF)(((m) & (VI)(a)) | (~(m) & (VI)(b))))
#define ABS(a) ((VF)((VI)(a) & 0x7fffffff))

// v to the nearest value of the code book, in place.
#define NEAREST(code, v)                                                                                               \
    do {                                                                                                               \
        if ((code) == CODE_NONLINEAR) {                                                                                \
            VF value_ = zero - 127.0f;                                                                                 \
            for (int n_ = 0; n_ < 15; n_++) {                                                                          \
                const float one_ = IQ4_NL_VALUES[n_], next_ = IQ4_NL_VALUES[n_ + 1];                                   \
                const VI above_ = v > zero + 0.5f * (one_ + next_);                                                    \
                value_ += (VF)(above_ & (VI)(zero + (next_ - one_)));                                                  \
            }                                                                                                          \
            v = value_;                                                                                                \
        } else {                                                                                                       \
            const VF low_ = zero + ((code) == CODE_8BIT ? -127.0f : -8.0f);                                            \
            const VF high_ = zero + ((code) == CODE_8BIT ? 127.0f : 7.0f);                                             \
            const VI below_ = v < low_;                                                                                \
            v = SELECT(below_, low_, v);                                                                               \
            const VI over_ = v > high_;                                                                                \
            v = SELECT(over_, high_, v);                                                                               \
            v = (v + 12582912.0f) - 12582912.0f; /* 1.5 * 2^23: rounds to nearest even */                              \
        }                                                                                                              \
    } while (0)
