// What libc++'s headers and the compiler expect of the C++ runtime: operator new, guards of local statics, the members
// of std::string that are instantiated out of line, and ends of the process where an exception would be.
//
// session/ is written with try and catch and compiled so, but nothing is ever thrown: there is no unwinder. The process
// ends instead, which the CPU side reports like any other end of it.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <sched.h>
#include <string>
#include <unistd.h>

namespace {

// No exceptions on this side. The CPU side sees the process end with this code and says what it means.
constexpr int exit_no_memory = 112; // session/peer_process.cpp knows it too

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
template string operator+(const char *, const string &);

// std::sort of numbers in their own order; with another order it is all in the headers.
template <class Less, class Iterator> void __sort(Iterator first, Iterator last, Less) {
    std::make_heap(first, last);
    std::sort_heap(first, last);
}
template void __sort<__less<unsigned long long> &, unsigned long long *>(unsigned long long *, unsigned long long *,
                                                                         __less<unsigned long long> &);

namespace {
template <class T> string decimal(T value) {
    char text[24];
    std::snprintf(text, sizeof text, T(-1) < T(0) ? "%lld" : "%llu", static_cast<long long>(value));
    return text;
}
} // namespace

string to_string(unsigned long value) { return decimal(value); }
string to_string(unsigned long long value) { return decimal(value); }

_LIBCPP_END_NAMESPACE_STD

// Their first virtual functions: with these come the type information and tables that catch clauses refer to.
std::exception::~exception() noexcept {}
const char * std::exception::what() const noexcept { return "exception"; }
std::bad_alloc::~bad_alloc() noexcept {}
const char * std::bad_alloc::what() const noexcept { return "out of memory"; }

void std::terminate() noexcept { give_up(134, "terminated"); }

namespace __cxxabiv1 {

// Type information points at these classes' tables, which only a search for a handler would read.
class __class_type_info {
    virtual void unused();
};
class __si_class_type_info {
    virtual void unused();
};
void __class_type_info::unused() {}
void __si_class_type_info::unused() {}

} // namespace __cxxabiv1

extern "C" {

int __gxx_personality_v0() { return 0; }
void * __cxa_begin_catch(void *) { give_up(134, "a handler without an exception"); }
void __cxa_end_catch() {}
[[noreturn]] void __cxa_rethrow() { give_up(134, "an exception"); }
[[noreturn]] void _Unwind_Resume(void *) { give_up(134, "an exception"); }

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

void __cxa_guard_abort(char * guard) { __atomic_store_n(guard + 1, 0, __ATOMIC_RELEASE); }
}
