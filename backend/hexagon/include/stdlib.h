// Memory from the heap, numbers from text, the end.
#ifndef TB_HEXAGON_STDLIB_H
#define TB_HEXAGON_STDLIB_H

#include <stddef.h>

#define EXIT_SUCCESS 0
#define EXIT_FAILURE 1
#define RAND_MAX 0x7fffffff

#ifdef __cplusplus
extern "C" {
#endif

typedef struct div_t {
    int quot, rem;
} div_t;
typedef struct ldiv_t {
    long quot, rem;
} ldiv_t;
typedef struct lldiv_t {
    long long quot, rem;
} lldiv_t;

void free(void * p);
int posix_memalign(void ** p, size_t align, size_t n);

// For libc++'s headers; not there to be linked.
__attribute__((noreturn)) void abort(void);
ldiv_t ldiv(long x, long y);
lldiv_t lldiv(long long x, long long y);

long strtol(const char * s, char ** end, int base);
__attribute__((noreturn)) void exit(int code);
__attribute__((noreturn)) void _Exit(int code);

#ifdef __cplusplus
}
#endif

#endif
