// The search for scales with V groups to a vector. quantize_search.c includes this once per instruction set, with V,
// TARGET and NAME(x) defined; written with vector types, so that every set computes the very same numbers.
//
// First a grid: scales that put a reference weight at each of many places on the code book's axis, on either side of
// zero. For each, take the nearest codes and let least squares correct the scale for these codes; keep the
// grid point that promises the smallest error. Then refine on FP16: correct, round, take the nearest codes again, and
// look at the FP16 neighbours of the best.

// Vectors of V lanes.
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
#define AT(array, i, l) (*(const VF *)&(array)[i][l])

// The float nearest to a that FP16 can hold; beyond FP16's range a power of two.
#define ROUND_TO_HALF(a)                                                                                               \
    do {                                                                                                               \
        const VI sign_ = (VI)(a) & (int)0x80000000u, mag_ = (VI)(a) & 0x7fffffff;                                      \
        const VI normal_ = (mag_ + 0xfff + (mag_ >> 13 & 1)) & ~0x1fff;                                                \
        const VI small_ = mag_ < 0x38800000;                                                                           \
        const VF tiny_ = ((VF)mag_ + 0.5f) - 0.5f; /* the float unit rounds at 2^-24 */                                \
        a = (VF)((VI)SELECT(small_, tiny_, (VF)normal_) | sign_);                                                      \
    } while (0)

// Sums for codes nearest to x / d: e = sum w*(x - d*q)^2, a = sum w*(x - d*q)*q, s = sum w*q^2. With these codes the
// best scale is d + a/s, which lowers the error by a^2/s.
#define SUMS(code, b, at, d, inverse, e, a, s)                                                                         \
    VF e = zero, a = zero, s = zero;                                                                                   \
    for (int i_ = 0; i_ < GROUP; i_++) {                                                                               \
        const VF x_ = AT((b)->x, i_, at), w_ = AT((b)->w, i_, at);                                                     \
        VF q_ = x_ * (inverse);                                                                                        \
        NEAREST(code, q_);                                                                                             \
        const VF r_ = x_ - (d) * q_, wq_ = w_ * q_;                                                                    \
        e += w_ * r_ * r_;                                                                                             \
        a += wq_ * r_;                                                                                                 \
        s += wq_ * q_;                                                                                                 \
    }

// Where d is finite in FP16 and better than the best so far, it becomes the best; then d moves to the least squares
// scale for its codes.
#define TRY(code, b, at, d)                                                                                            \
    do {                                                                                                               \
        ROUND_TO_HALF(d);                                                                                              \
        const VI none_ = d == zero;                                                                                    \
        const VF inverse_ = 1.0f / SELECT(none_, zero + 1.0f, d);                                                      \
        SUMS(code, b, at, d, inverse_, e_, a_, s_)                                                                     \
        const VI better_ = (e_ < best_e) & (ABS(d) <= zero + 65504.0f) & ~none_;                                       \
        best_e = SELECT(better_, e_, best_e);                                                                          \
        best_d = SELECT(better_, d, best_d);                                                                           \
        const VI free_ = s_ > zero;                                                                                    \
        d += a_ / SELECT(free_, s_, zero + 1.0f);                                                                      \
    } while (0)

TARGET static inline
    __attribute__((always_inline)) void NAME(search)(enum code code, const struct grid * grid, struct batch * b) {
    for (int at = 0; at < LANES; at += V) {
        const VF zero = {0.0f};
        VF best_d = *(const VF *)&b->d[at], best_e = zero;
        for (int i = 0; i < GROUP; i++) {
            const VF r = AT(b->x, i, at) - best_d * AT(b->q, i, at);
            best_e += AT(b->w, i, at) * r * r;
        }
        for (int side = 0; side < grid->sides; side++) {
            // vanishing groups stay as they are: with this reference all their codes are the one nearest to 0
            VF reference = *(const VF *)&b->reference[at];
            const VI tiny = ABS(reference) < zero + 1e-12f;
            reference = SELECT(tiny, zero + 1.0f, reference);
            VF found_d = zero, found_e = zero + INFINITY;
            for (int j = 0; j < grid->n; j++) {
                const float place = side == 0 ? -grid->place[j] : grid->place[j];
                const VF d = reference * (1.0f / place), inverse = place / reference;
                SUMS(code, b, at, d, inverse, e, a, s)
                const VI some = s > zero;
                const VF step = a / SELECT(some, s, zero + 1.0f);
                const VF left = e - a * step;
                const VI better = left < found_e;
                found_e = SELECT(better, left, found_e);
                found_d = SELECT(better, d + step, found_d);
            }
            for (int j = 0; j < grid->refine; j++)
                TRY(code, b, at, found_d);
        }
        const VF centre = best_d;
        for (int j = -grid->around; j <= grid->around; j++) {
            VF d = centre * (1.0f + (float)j * 0.0009765625f); // 2^-10, a step of FP16 or two
            if (j != 0) TRY(code, b, at, d);
        }
        // vectors that the search did not move keep what they came with
        const VI moved = best_d != *(const VF *)&b->d[at];
        const VI none = best_d == zero;
        const VF inverse = 1.0f / SELECT(none, zero + 1.0f, best_d);
        for (int i = 0; i < GROUP; i++) {
            VF q = AT(b->x, i, at) * inverse;
            NEAREST(code, q);
            *(VF *)&b->q[i][at] = SELECT(moved, q, AT(b->q, i, at));
        }
        *(VF *)&b->d[at] = best_d;
    }
}

TARGET static void NAME(search_any)(enum code code, struct batch * b) {
    if (code == CODE_4BIT) {
        NAME(search)(CODE_4BIT, &GRID[CODE_4BIT], b);
    } else if (code == CODE_8BIT) {
        NAME(search)(CODE_8BIT, &GRID[CODE_8BIT], b);
    } else {
        NAME(search)(CODE_NONLINEAR, &GRID[CODE_NONLINEAR], b);
    }
}

#undef ROUND_TO_HALF
#undef SUMS
#undef TRY
#undef VF
#undef VI
#undef SELECT
#undef ABS
#undef AT
#undef NEAREST
