// The floating point environment: every thread starts in the default one and nothing changes it.
#ifndef TB_HEXAGON_FENV_H
#define TB_HEXAGON_FENV_H

typedef unsigned fenv_t;
typedef unsigned fexcept_t;
#define FE_DFL_ENV ((const fenv_t *)0)
#define FE_TONEAREST 0

static inline int fegetenv(fenv_t * env) {
    *env = 0;
    return 0;
}

static inline int fesetenv(const fenv_t * env) {
    (void)env;
    return 0;
}

#endif
