// What libc++'s headers and the compiler expect of the C++ runtime: operator new, guards of local statics, the few
// members of std::string that are instantiated out of line, and ends of the process where an exception would be.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <sched.h>
#include <string>
#include <unistd.h>

namespace {

// No exceptions on this side. The CPU side sees the process end with this code and says what it means.
constexpr int exit_no_memory = 112;

[[noreturn]] void give_up(int code, const char * why) {
    std::fprintf(stderr, "tilebeam-npud-hexagon: %s\n", why);
    _exit(code);
}

void * allocate(size_t n, size_t align) {
    void * p = nullptr;
    if (posix_memalign(&p, align, n) != 0) {
        give_up(exit_no_memory, "out of memory");
    }
    return p;
}

} // namespace

void * operator new(size_t n) { return allocate(n, 16); }
void * operator new[](size_t n) { return allocate(n, 16); }
void * operator new(size_t n, std::align_val_t align) { return allocate(n, static_cast<size_t>(align)); }
void * operator new[](size_t n, std::align_val_t align) { return allocate(n, static_cast<size_t>(align)); }
void operator delete(void * p) noexcept { std::free(p); }
void operator delete[](void * p) noexcept { std::free(p); }
void operator delete(void * p, size_t) noexcept { std::free(p); }
void operator delete[](void * p, size_t) noexcept { std::free(p); }
void operator delete(void * p, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void * p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void * p, size_t, std::align_val_t) noexcept { std::free(p); }
void operator delete[](void * p, size_t, std::align_val_t) noexcept { std::free(p); }

_LIBCPP_BEGIN_NAMESPACE_STD

void __libcpp_verbose_abort(const char * format, ...) {
    va_list args;
    va_start(args, format);
    char text[256];
    std::vsnprintf(text, sizeof text, format, args);
    va_end(args);
    give_up(134, text);
}

template class basic_string<char>;

namespace {
template <class T> string decimal(T value) {
    char text[24];
    std::snprintf(text, sizeof text, T(-1) < T(0) ? "%lld" : "%llu", static_cast<long long>(value));
    return text;
}
} // namespace

string to_string(int value) { return decimal(value); }
string to_string(unsigned value) { return decimal(value); }
string to_string(long value) { return decimal(value); }
string to_string(unsigned long value) { return decimal(value); }
string to_string(long long value) { return decimal(value); }
string to_string(unsigned long long value) { return decimal(value); }

_LIBCPP_END_NAMESPACE_STD

extern "C" {

void * __dso_handle = nullptr;

// Static objects live until the process ends, thread-local ones until their thread's memory is unmapped.
int __cxa_atexit(void (*)(void *), void *, void *) { return 0; }
int __cxa_thread_atexit(void (*)(void *), void *, void *) { return 0; }

[[noreturn]] void __cxa_pure_virtual() { give_up(134, "a pure virtual function was called"); }

// Byte 0: initialized (the compiler looks at it first). Byte 1: somebody is at it.
int __cxa_guard_acquire(char * guard) {
    for (;;) {
        if (__atomic_load_n(guard, __ATOMIC_ACQUIRE)) {
            return 0;
        }
        if (!__atomic_exchange_n(guard + 1, 1, __ATOMIC_ACQUIRE)) {
            if (!__atomic_load_n(guard, __ATOMIC_ACQUIRE)) {
                return 1;
            }
            __atomic_store_n(guard + 1, 0, __ATOMIC_RELEASE);
            return 0;
        }
        sched_yield();
    }
}

void __cxa_guard_release(char * guard) {
    __atomic_store_n(guard, 1, __ATOMIC_RELEASE);
    __atomic_store_n(guard + 1, 0, __ATOMIC_RELEASE);
}
}
