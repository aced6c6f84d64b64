// Text in and out, and the end of the process.
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct tb_file {
    int fd;
};
static struct tb_file out = {1}, err = {2};
FILE * const tb_stdout = &out;
FILE * const tb_stderr = &err;

void _Exit(int code) { _exit(code); }

// No destructors of static objects: the kernel takes everything back.
void exit(int code) { _exit(code); }

// Decimal only; saturates.
long strtol(const char * s, char ** end, int base) {
    const char * p = s;
    while (*p == ' ' || (*p >= 9 && *p <= 13))
        p++;
    const int negative = *p == '-';
    if (*p == '-' || *p == '+') p++;
    const char * digits = p;
    int64_t value = 0;
    for (; *p >= '0' && *p <= '9'; p++) {
        value = value * 10 + (*p - '0');
        if (value > INT64_C(0x80000000)) value = INT64_C(0x80000000);
    }
    if (end) *end = (char *)(uintptr_t)(p == digits ? s : p);
    (void)base;
    value = negative ? -value : value;
    return (long)(value > INT32_MAX ? INT32_MAX : value);
}

typedef struct sink {
    char * to;
    size_t size, length; // length: all that was printed, also what did not fit
} sink;

static void put(sink * s, char c) {
    if (s->length + 1 < s->size) s->to[s->length] = c;
    s->length++;
}

static void put_number(sink * s, uint64_t value, int negative, unsigned base, int width, int zero) {
    char digits[24];
    int n = 0;
    do {
        digits[n++] = "0123456789abcdef"[value % base];
        value /= base;
    } while (value);
    int pad = width - n - negative;
    if (negative && zero) put(s, '-');
    for (; pad > 0; pad--)
        put(s, zero ? '0' : ' ');
    if (negative && !zero) put(s, '-');
    while (n > 0)
        put(s, digits[--n]);
}

int vsnprintf(char * to, size_t size, const char * format, va_list args) {
    sink s = {to, size, 0};
    for (; *format; format++) {
        if (*format != '%') {
            put(&s, *format);
            continue;
        }
        format++;
        const int zero = *format == '0';
        int width = 0, longs = 0;
        for (; *format >= '0' && *format <= '9'; format++)
            width = width * 10 + (*format - '0');
        for (; *format == 'l' || *format == 'z'; format++)
            longs += *format == 'l';
        switch (*format) {
        case 'd':
        case 'i': {
            const int64_t v = longs > 1 ? va_arg(args, int64_t) : va_arg(args, int);
            put_number(&s, v < 0 ? 0 - (uint64_t)v : (uint64_t)v, v < 0, 10, width, zero);
            break;
        }
        case 'u':
        case 'x': {
            const uint64_t v = longs > 1 ? va_arg(args, uint64_t) : va_arg(args, unsigned);
            put_number(&s, v, 0, *format == 'x' ? 16 : 10, width, zero);
            break;
        }
        case 'p':
            put_number(&s, (uintptr_t)va_arg(args, void *), 0, 16, 8, 1);
            break;
        case 'c':
            put(&s, (char)va_arg(args, int));
            break;
        case 's': {
            const char * text = va_arg(args, const char *);
            for (int pad = width - (int)strlen(text); pad > 0; pad--)
                put(&s, ' ');
            while (*text)
                put(&s, *text++);
            break;
        }
        default:
            put(&s, *format);
        }
        if (!*format) break;
    }
    if (size > 0) to[s.length < size ? s.length : size - 1] = 0;
    return (int)s.length;
}

int snprintf(char * to, size_t size, const char * format, ...) {
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(to, size, format, args);
    va_end(args);
    return n;
}

static int write_all(FILE * to, const char * text, size_t n) {
    while (n > 0) {
        const ssize_t done = write(to->fd, text, n);
        if (done <= 0) return EOF;
        text += done;
        n -= (size_t)done;
    }
    return 0;
}

int vfprintf(FILE * to, const char * format, va_list args) {
    char text[1024];
    const int n = vsnprintf(text, sizeof text, format, args);
    return write_all(to, text, strlen(text)) == 0 ? n : EOF;
}

int fprintf(FILE * to, const char * format, ...) {
    va_list args;
    va_start(args, format);
    const int n = vfprintf(to, format, args);
    va_end(args);
    return n;
}

int printf(const char * format, ...) {
    va_list args;
    va_start(args, format);
    const int n = vfprintf(tb_stdout, format, args);
    va_end(args);
    return n;
}

int fputs(const char * s, FILE * to) { return write_all(to, s, strlen(s)); }

int puts(const char * s) { return fputs(s, tb_stdout) == 0 ? fputs("\n", tb_stdout) : EOF; }

int putchar(int c) {
    const char byte = (char)c;
    return write_all(tb_stdout, &byte, 1) == 0 ? c : EOF;
}

size_t fwrite(const void * from, size_t size, size_t n, FILE * to) {
    return write_all(to, from, size * n) == 0 ? n : 0;
}
