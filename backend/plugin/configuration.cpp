// See configuration.h.
#include "configuration.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "executor.h"
#include "ggml-impl.h"

namespace tb::plugin {

namespace {

// "2GiB,4GiB": bytes, or with K, M, G (powers of 1024; iB or B may follow); the last one counts for all further
// devices.
bool read_limits(const char * text, uint64_t (&limits)[TILEBEAM_MAX_DEVICES]) {
    uint64_t read[TILEBEAM_MAX_DEVICES] = {};
    size_t n = 0;
    for (const char * p = text; n < TILEBEAM_MAX_DEVICES; ++p) {
        if (!std::isdigit(static_cast<unsigned char>(*p))) return false;
        char * end = nullptr;
        errno = 0;
        const unsigned long long number = std::strtoull(p, &end, 10);
        const char * const units = "KMG";
        const char * unit = *end ? std::strchr(units, std::toupper(static_cast<unsigned char>(*end))) : nullptr;
        const int shift = unit ? 10 * static_cast<int>(unit - units + 1) : 0;
        if (errno != 0 || number > UINT64_MAX >> shift) return false;
        read[n++] = uint64_t{number} << shift;
        p = end;
        if (unit) ++p;
        if (unit && (*p == 'i' || *p == 'I')) ++p;
        if (*p == 'B' || *p == 'b') ++p;
        if (*p == '\0') {
            for (size_t i = 0; i < TILEBEAM_MAX_DEVICES; ++i)
                limits[i] = read[std::min(i, n - 1)];
            return true;
        }
        if (*p != ',') return false;
    }
    return false;
}

bool known_numerics(int32_t numerics, std::string & why) {
    constexpr int32_t both = TILEBEAM_NUMERICS_EXACT_EXP | TILEBEAM_NUMERICS_BF16,
                      alike = TILEBEAM_NUMERICS_DETERMINISTIC;
    const int32_t n = numerics & ~(both | alike), added = numerics & both;
    if (added == both || (n != TILEBEAM_NUMERICS_INT8 && n != TILEBEAM_NUMERICS_FP16)) {
        why = "numerics must be int8 or fp16, with exact exponentials, attention in BF16 or neither";
    } else if ((numerics & alike) != 0 && (n != TILEBEAM_NUMERICS_INT8 || added == TILEBEAM_NUMERICS_BF16)) {
        why = "deterministic results are those of numerics int8, and of attention without BF16";
    }
    return why.empty();
}

template <size_t N> bool terminated(const char (&text)[N]) { return std::memchr(text, 0, N) != nullptr; }

} // namespace

std::vector<std::string> kernel_sets(int32_t executor) {
    if (executor == TILEBEAM_EXECUTOR_HEXAGON) return {"hvx", "portable"};
    const std::vector<const char *> names = tb::npu::kernel_isas();
    return {names.begin(), names.end()};
}

tilebeam_options options_of_environment() {
    tilebeam_options opt{};
    if (const char * v = std::getenv("TILEBEAM_NPU"); v && *v) {
        if (std::strcmp(v, "process") == 0) {
            opt.executor = TILEBEAM_EXECUTOR_PROCESS;
        } else if (std::strcmp(v, "qemu-hexagon") == 0) {
            opt.executor = TILEBEAM_EXECUTOR_HEXAGON;
        } else if (std::strcmp(v, "thread") != 0) {
            GGML_LOG_WARN("tilebeam: TILEBEAM_NPU=%s is not thread, process or qemu-hexagon: using thread\n", v);
        }
    }
    if (const char * v = std::getenv("TILEBEAM_THREADS"); v && *v) {
        char * end = nullptr;
        const long n = std::strtol(v, &end, 10);
        if (*end == '\0' && n >= 1 && n <= most_threads) {
            opt.n_threads = static_cast<int32_t>(n);
        } else {
            GGML_LOG_WARN("tilebeam: TILEBEAM_THREADS=%s is not a number from 1 to %d: ignored\n", v, most_threads);
        }
    }
    if (const char * v = std::getenv("TILEBEAM_ISA"); v && *v) std::snprintf(opt.isa, sizeof opt.isa, "%s", v);
    if (const char * v = std::getenv("TILEBEAM_NUMERICS"); v && *v) {
        if (std::strcmp(v, "fp16") == 0) {
            opt.numerics = TILEBEAM_NUMERICS_FP16;
        } else if (std::strcmp(v, "int8") != 0) {
            GGML_LOG_WARN("tilebeam: TILEBEAM_NUMERICS=%s is not int8 or fp16: using int8\n", v);
        }
    }
    if (const char * v = std::getenv("TILEBEAM_SOFTMAX"); v && *v) {
        if (std::strcmp(v, "exact") == 0) {
            opt.numerics |= TILEBEAM_NUMERICS_EXACT_EXP;
        } else if (std::strcmp(v, "bf16") == 0) {
            opt.numerics |= TILEBEAM_NUMERICS_BF16;
        } else if (std::strcmp(v, "table") != 0) {
            GGML_LOG_WARN("tilebeam: TILEBEAM_SOFTMAX=%s is not table, exact or bf16: using table\n", v);
        }
    }
    if (const char * v = std::getenv("TILEBEAM_DETERMINISTIC"); v && *v && std::strcmp(v, "0") != 0) {
        std::string why;
        if (std::strcmp(v, "1") != 0) {
            GGML_LOG_WARN("tilebeam: TILEBEAM_DETERMINISTIC=%s is not 0 or 1: ignored\n", v);
        } else if (!known_numerics(opt.numerics | TILEBEAM_NUMERICS_DETERMINISTIC, why)) {
            GGML_LOG_WARN("tilebeam: TILEBEAM_DETERMINISTIC is ignored: %s\n", why.c_str());
        } else {
            opt.numerics |= TILEBEAM_NUMERICS_DETERMINISTIC;
        }
    }
    if (const char * v = std::getenv("TILEBEAM_MEMORY_LIMIT"); v && *v && !read_limits(v, opt.memory_limit)) {
        GGML_LOG_WARN("tilebeam: TILEBEAM_MEMORY_LIMIT=%s is not a size such as 2GiB, nor a list of them: ignored\n",
                      v);
    }
    return opt;
}

int device_count_of_environment() {
    const char * v = std::getenv("TILEBEAM_DEVICES");
    if (!v || !*v) return 1;
    char * end = nullptr;
    const long n = std::strtol(v, &end, 10);
    if (*end == '\0' && n >= 1 && n <= TILEBEAM_MAX_DEVICES) return static_cast<int>(n);
    GGML_LOG_WARN("tilebeam: TILEBEAM_DEVICES=%s is not a number from 1 to %d: using 1\n", v, TILEBEAM_MAX_DEVICES);
    return 1;
}

tb_status check_options(const tilebeam_options & o, std::string & why) {
    if (o.executor < TILEBEAM_EXECUTOR_THREAD || o.executor > TILEBEAM_EXECUTOR_HEXAGON) {
        why = "executor must be thread, process or hexagon";
    } else if (!known_numerics(o.numerics, why)) {
        return TB_E_UNSUPPORTED;
    } else if (o.n_threads < 0 || o.n_threads > most_threads) {
        why = "n_threads must be between 0 and " + std::to_string(most_threads);
    } else if (o.deadline_ms <= 0) {
        why = "deadline_ms must be positive";
    } else if (!terminated(o.isa) || !terminated(o.npud_path)) {
        why = "isa and npud_path must end with NUL";
    } else if (o.isa[0]) {
        const std::vector<std::string> isas = kernel_sets(o.executor);
        if (std::find(isas.begin(), isas.end(), o.isa) == isas.end()) {
            why = std::string("no kernel set '") + o.isa + "' ";
            why += o.executor == TILEBEAM_EXECUTOR_HEXAGON ? "for Hexagon; there are:" : "on this CPU; there are:";
            for (const std::string & name : isas)
                why += " " + name;
        }
    }
    return why.empty() ? TB_OK : TB_E_UNSUPPORTED;
}

} // namespace tb::plugin
