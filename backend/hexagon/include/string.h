// Memory and strings.
#ifndef TB_HEXAGON_STRING_H
#define TB_HEXAGON_STRING_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

void * memcpy(void * to, const void * from, size_t n);
void * memmove(void * to, const void * from, size_t n);
void * memset(void * to, int byte, size_t n);
int memcmp(const void * a, const void * b, size_t n);
size_t strlen(const char * s);
size_t strnlen(const char * s, size_t most);
int strcmp(const char * a, const char * b);
int strncmp(const char * a, const char * b, size_t n);
char * strncpy(char * to, const char * from, size_t n);
char * strerror(int error);
// The rest is for libc++'s headers, which overload them; not there to be linked.
char * strrchr(const char * s, int c);
char * strpbrk(const char * s, const char * any);
char * strstr(const char * s, const char * what);

#ifdef __cplusplus
}
#endif

#endif
