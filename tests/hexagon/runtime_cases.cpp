// Runs functions of the Hexagon runtime (C library, mathematics, what the compiler calls) on the numbers it reads, so
// that tests/test_hexagon.py can compare them with the host's. Started as: runtime_cases FUNCTION, with the arguments
// as raw little-endian numbers on standard input, one after the other, and the results on standard output; or as
// runtime_cases threads (see run_threads), or runtime_cases memory, which takes all there is and ends.
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

namespace {

// Both sides of an operator come from memory, so that nothing is computed at compile time.
template <class T> struct function {
    const char * name;
    int arguments;
    T (*run)(const T * x);
};

constexpr function<float> floats[] = {
    {"addf", 2, [](const float * x) { return x[0] + x[1]; }},
    {"mulf", 2, [](const float * x) { return x[0] * x[1]; }},
    {"divf", 2, [](const float * x) { return x[0] / x[1]; }},
    {"sqrtf", 1, [](const float * x) { return std::sqrt(x[0]); }},
    {"expf", 1, [](const float * x) { return std::exp(x[0]); }},
    {"exp2f", 1, [](const float * x) { return std::exp2(x[0]); }},
    {"logf", 1, [](const float * x) { return std::log(x[0]); }},
    {"powf", 2, [](const float * x) { return std::pow(x[0], x[1]); }},
    {"sinf", 1, [](const float * x) { return std::sin(x[0]); }},
    {"cosf", 1, [](const float * x) { return std::cos(x[0]); }},
    {"tanhf", 1, [](const float * x) { return std::tanh(x[0]); }},
    {"expm1f", 1, [](const float * x) { return std::expm1(x[0]); }},
    {"erff", 1, [](const float * x) { return std::erf(x[0]); }},
    {"erfcf", 1, [](const float * x) { return std::erfc(x[0]); }},
    {"floorf", 1, [](const float * x) { return std::floor(x[0]); }},
    {"ceilf", 1, [](const float * x) { return std::ceil(x[0]); }},
    {"truncf", 1, [](const float * x) { return std::trunc(x[0]); }},
    {"roundf", 1, [](const float * x) { return std::round(x[0]); }},
};

constexpr function<double> doubles[] = {
    {"add", 2, [](const double * x) { return x[0] + x[1]; }},
    {"sub", 2, [](const double * x) { return x[0] - x[1]; }},
    {"mul", 2, [](const double * x) { return x[0] * x[1]; }},
    {"div", 2, [](const double * x) { return x[0] / x[1]; }},
    {"exp", 1, [](const double * x) { return std::exp(x[0]); }},
    {"exp2", 1, [](const double * x) { return std::exp2(x[0]); }},
    {"log", 1, [](const double * x) { return std::log(x[0]); }},
    {"log2", 1, [](const double * x) { return std::log2(x[0]); }},
    {"pow", 2, [](const double * x) { return std::pow(x[0], x[1]); }},
    {"ldexp", 2, [](const double * x) { return std::ldexp(x[0], static_cast<int>(x[1])); }},
    {"ilogb", 1, [](const double * x) { return static_cast<double>(std::ilogb(x[0])); }},
    {"rint", 1, [](const double * x) { return std::nearbyint(x[0]); }},
    {"round", 1, [](const double * x) { return std::round(x[0]); }},
    {"float", 1, [](const double * x) { return static_cast<double>(static_cast<float>(x[0])); }},
    {"int64", 1, [](const double * x) { return static_cast<double>(static_cast<int64_t>(x[0])); }},
};

constexpr function<uint32_t> words[] = {
    {"udiv32", 2, [](const uint32_t * x) { return x[0] / x[1]; }},
    {"umod32", 2, [](const uint32_t * x) { return x[0] % x[1]; }},
    {"div32", 2,
     [](const uint32_t * x) { return static_cast<uint32_t>(static_cast<int32_t>(x[0]) / static_cast<int32_t>(x[1])); }},
    {"mod32", 2,
     [](const uint32_t * x) { return static_cast<uint32_t>(static_cast<int32_t>(x[0]) % static_cast<int32_t>(x[1])); }},
};

constexpr function<uint64_t> longs[] = {
    {"udiv64", 2, [](const uint64_t * x) { return x[0] / x[1]; }},
    {"umod64", 2, [](const uint64_t * x) { return x[0] % x[1]; }},
    {"div64", 2,
     [](const uint64_t * x) { return static_cast<uint64_t>(static_cast<int64_t>(x[0]) / static_cast<int64_t>(x[1])); }},
    {"mod64", 2,
     [](const uint64_t * x) { return static_cast<uint64_t>(static_cast<int64_t>(x[0]) % static_cast<int64_t>(x[1])); }},
};

std::vector<uint8_t> read_all() {
    std::vector<uint8_t> all;
    uint8_t piece[4096];
    for (ssize_t n; (n = read(0, piece, sizeof piece)) > 0;) {
        all.insert(all.end(), piece, piece + n);
    }
    return all;
}

bool write_all(const void * data, size_t size) {
    const auto * at = static_cast<const uint8_t *>(data);
    while (size > 0) {
        const ssize_t n = write(1, at, size);
        if (n <= 0) {
            return false;
        }
        at += n;
        size -= static_cast<size_t>(n);
    }
    return true;
}

template <class T, size_t n> bool run(const function<T> (&table)[n], const char * name) {
    for (const function<T> & f : table) {
        if (std::strcmp(f.name, name) != 0) {
            continue;
        }
        const std::vector<uint8_t> bytes = read_all();
        std::vector<T> x(bytes.size() / sizeof(T));
        std::memcpy(x.data(), bytes.data(), x.size() * sizeof(T));
        std::vector<T> y;
        for (size_t i = 0; i + f.arguments <= x.size(); i += f.arguments) {
            y.push_back(f.run(&x[i]));
        }
        return write_all(y.data(), y.size() * sizeof(T));
    }
    return false;
}

// Thread-local objects that are zero, that are not, and that a constructor makes.
thread_local int64_t total;
thread_local uint32_t table[5] = {1, 2, 3, 4, 5};
thread_local std::vector<int> made(3, 7);

struct share {
    int number;
    int64_t result;
};

void * count(void * arg) {
    auto * s = static_cast<share *>(arg);
    errno = s->number;
    for (int i = 0; i < 1000; ++i) {
        total += s->number;
        table[i % 5] += static_cast<uint32_t>(s->number);
        made.push_back(s->number);
    }
    int64_t sum = total + errno;
    for (const uint32_t x : table) {
        sum += x;
    }
    for (const int x : made) {
        sum += x;
    }
    s->result = sum;
    return arg;
}

int run_threads() {
    share shares[4];
    pthread_t threads[4];
    for (int i = 0; i < 4; ++i) {
        shares[i] = {10 * (i + 1), 0};
        if (pthread_create(&threads[i], nullptr, count, &shares[i]) != 0) {
            return 1;
        }
    }
    for (int i = 0; i < 4; ++i) {
        void * result = nullptr;
        // 3000 additions of the number, its errno, and what the objects start with
        if (pthread_join(threads[i], &result) != 0 || result != &shares[i] ||
            shares[i].result != 3001 * shares[i].number + 15 + 21) {
            std::fprintf(stderr, "thread %d counted %d\n", i, static_cast<int>(shares[i].result));
            return 1;
        }
    }
    const bool failed = mmap(nullptr, 0xf0000000u, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED;
    if (!failed || errno != ENOMEM || total != 0 || table[4] != 5 || made.size() != 3) {
        std::fprintf(stderr, "errno %d, total %d\n", errno, static_cast<int>(total));
        return 1;
    }
    std::printf("4 threads\n");
    return 0;
}

} // namespace

int main(int argc, char ** argv) {
    if (argc == 2 && std::strcmp(argv[1], "threads") == 0) {
        return run_threads();
    }
    if (argc == 2 && std::strcmp(argv[1], "memory") == 0) {
        std::vector<char *> kept;
        for (;;) {
            kept.push_back(new char[256 << 20]); // never touched
        }
    }
    if (argc == 2 && (run(floats, argv[1]) || run(doubles, argv[1]) || run(words, argv[1]) || run(longs, argv[1]))) {
        return 0;
    }
    std::fprintf(stderr, "usage: runtime_cases FUNCTION, numbers on standard input\n");
    return 2;
}
