// Memory and strings. memcpy and memset move 8 bytes at a time where the addresses allow it.
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef uint64_t __attribute__((may_alias)) word;

// Hexagon loads and stores need aligned addresses.
void * memcpy(void * restrict to, const void * restrict from, size_t n) {
    char * d = to;
    const char * s = from;
    if ((((uintptr_t)d ^ (uintptr_t)s) & 7) == 0) {
        while (n > 0 && ((uintptr_t)d & 7) != 0) {
            *d++ = *s++;
            n--;
        }
        for (; n >= 8; n -= 8, d += 8, s += 8)
            *(word *)d = *(const word *)s;
    }
    while (n-- > 0)
        *d++ = *s++;
    return to;
}

// What the compiler calls for large copies of aligned memory.
void __hexagon_memcpy_likely_aligned_min32bytes_mult8bytes(void * to, const void * from, size_t n) {
    memcpy(to, from, n);
}

void * memmove(void * to, const void * from, size_t n) {
    char * d = to;
    const char * s = from;
    if (d == s || n == 0) return to;
    if (d < s || d >= s + n) {
        // Forward is right even where both overlap: a word is read before it is written, and nothing behind it.
        const int together = (((uintptr_t)d ^ (uintptr_t)s) & 7) == 0;
        while (n > 0 && (!together || ((uintptr_t)d & 7) != 0)) {
            *d++ = *s++;
            n--;
        }
        for (; n >= 8; n -= 8, d += 8, s += 8)
            *(word *)d = *(const word *)s;
        while (n-- > 0)
            *d++ = *s++;
    } else {
        while (n-- > 0)
            d[n] = s[n];
    }
    return to;
}

void * memset(void * to, int byte, size_t n) {
    unsigned char * d = to;
    while (n > 0 && ((uintptr_t)d & 7) != 0) {
        *d++ = (unsigned char)byte;
        n--;
    }
    const uint64_t pattern = 0x0101010101010101u * (unsigned char)byte;
    for (; n >= 8; n -= 8, d += 8)
        *(word *)d = pattern;
    while (n-- > 0)
        *d++ = (unsigned char)byte;
    return to;
}

int memcmp(const void * a, const void * b, size_t n) {
    const unsigned char *x = a, *y = b;
    for (size_t i = 0; i < n; i++) {
        if (x[i] != y[i]) return x[i] < y[i] ? -1 : 1;
    }
    return 0;
}

size_t strlen(const char * s) {
    size_t n = 0;
    while (s[n])
        n++;
    return n;
}

size_t strnlen(const char * s, size_t most) {
    size_t n = 0;
    while (n < most && s[n])
        n++;
    return n;
}

int strncmp(const char * a, const char * b, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (a[i] != b[i]) return (unsigned char)a[i] < (unsigned char)b[i] ? -1 : 1;
        if (!a[i]) break;
    }
    return 0;
}

int strcmp(const char * a, const char * b) { return strncmp(a, b, SIZE_MAX); }

char * strncpy(char * to, const char * from, size_t n) {
    size_t i = 0;
    for (; i < n && from[i]; i++)
        to[i] = from[i];
    for (; i < n; i++)
        to[i] = 0;
    return to;
}

char * strerror(int error) {
    static _Thread_local char text[24];
    switch (error) {
    case EPERM:
        return "Operation not permitted";
    case ENOMEM:
        return "Cannot allocate memory";
    case EACCES:
        return "Permission denied";
    case EINVAL:
        return "Invalid argument";
    case EOVERFLOW:
        return "the emulator maps only the first 4 GiB of a file";
    default:
        snprintf(text, sizeof text, "error %d", error);
        return text;
    }
}
