// Text to the standard descriptors, and numbers into text. No files.
#ifndef TB_HEXAGON_STDIO_H
#define TB_HEXAGON_STDIO_H

#include <stdarg.h>
#include <stddef.h>

#define EOF (-1)

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tb_file FILE;
extern FILE * const tb_stdout;
extern FILE * const tb_stderr;
#define stdout tb_stdout
#define stderr tb_stderr

// %d %i %u %x %p %c %s %% with l, ll, z, a width and 0. No floating point.
int printf(const char * format, ...) __attribute__((format(printf, 1, 2)));
int fprintf(FILE * to, const char * format, ...) __attribute__((format(printf, 2, 3)));
int snprintf(char * to, size_t size, const char * format, ...) __attribute__((format(printf, 3, 4)));
int vfprintf(FILE * to, const char * format, va_list args);
int vsnprintf(char * to, size_t size, const char * format, va_list args);
int fputs(const char * s, FILE * to);
int puts(const char * s);
int putchar(int c);
size_t fwrite(const void * from, size_t size, size_t n, FILE * to); // the compiler makes calls of it

// For libc++'s headers, which tell std::remove the algorithm from this one; not there to be linked.
int remove(const char * path);

#ifdef __cplusplus
}
#endif

#endif
