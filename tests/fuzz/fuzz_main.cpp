// The libFuzzer target: tilebeam-fuzz CORPUS_FOLDER. See README.md.
#include <cstdio>
#include <cstdlib>

#include "unit.h"

// An op may ask for more scratch memory than there is: the allocation then fails, as it does without a sanitizer.
extern "C" const char * __asan_default_options() { return "allocator_may_return_null=1:detect_leaks=0"; }

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    std::atexit([] {
        const tb::fuzz::totals & t = tb::fuzz::counted();
        const auto number = [](uint64_t n) { return static_cast<unsigned long long>(n); };
        std::fprintf(stderr,
                     "messages answered: %llu, accepted: %llu; graphs among them: %llu; ops computed: %llu; graphs too "
                     "large to send: %llu\n",
                     number(t.messages), number(t.accepted), number(t.graphs), number(t.computed), number(t.skipped));
    });
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    tb::fuzz::run(tb::fuzz::parse(data, size));
    return 0;
}
