// See configuration.h.
#include "configuration.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "executor.h"
#include "ggml-impl.h"

namespace tb::plugin {

namespace {

struct choice {
    const char * word;
    int32_t value;
};

// What the word in an environment variable stands for: the first choice where it is not set, and for another word.
int32_t chosen(const char * variable, std::initializer_list<choice> choices) {
    const char * said = std::getenv(variable);
    if (!said || !*said) return choices.begin()->value;
    std::string known;
    for (const choice & c : choices) {
        if (std::strcmp(said, c.word) == 0) return c.value;
        known += &c == choices.begin() ? "" : &c + 1 == choices.end() ? " or " : ", ";
        known += c.word;
    }
    GGML_LOG_WARN("tilebeam: %s=%s is not %s: using %s\n", variable, said, known.c_str(), choices.begin()->word);
    return choices.begin()->value;
}

bool known_numerics(int32_t numerics, std::string & why) {
    const int32_t n = numerics & ~(TILEBEAM_NUMERICS_EXACT_EXP | TILEBEAM_NUMERICS_DETERMINISTIC);
    if (n != TILEBEAM_NUMERICS_INT8 && n != TILEBEAM_NUMERICS_FP16) {
        why = "numerics must be int8 or fp16, with exact exponentials or without";
    } else if ((numerics & TILEBEAM_NUMERICS_DETERMINISTIC) != 0 && n != TILEBEAM_NUMERICS_INT8) {
        why = "deterministic results are those of numerics int8";
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
    opt.executor = chosen("TILEBEAM_NPU", {{"thread", TILEBEAM_EXECUTOR_THREAD},
                                           {"process", TILEBEAM_EXECUTOR_PROCESS},
                                           {"qemu-hexagon", TILEBEAM_EXECUTOR_HEXAGON}});
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
    opt.numerics = chosen("TILEBEAM_NUMERICS", {{"int8", TILEBEAM_NUMERICS_INT8}, {"fp16", TILEBEAM_NUMERICS_FP16}});
    opt.numerics |= chosen("TILEBEAM_SOFTMAX", {{"table", 0}, {"exact", TILEBEAM_NUMERICS_EXACT_EXP}});
    const int32_t alike = chosen("TILEBEAM_DETERMINISTIC", {{"0", 0}, {"1", TILEBEAM_NUMERICS_DETERMINISTIC}});
    if (std::string why; alike != 0 && !known_numerics(opt.numerics | alike, why)) {
        GGML_LOG_WARN("tilebeam: TILEBEAM_DETERMINISTIC is ignored: %s\n", why.c_str());
    } else {
        opt.numerics |= alike;
    }
    return opt;
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
