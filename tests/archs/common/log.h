// In place of the log of llama.cpp's "common" library: results go to stdout, warnings and errors to stderr.
#pragma once

#include <cstdio>

#include "ggml.h"

#define LOG(...) std::fprintf(stdout, __VA_ARGS__)
#define LOG_INF(...) ((void)0)
#define LOG_WRN(...) std::fprintf(stderr, __VA_ARGS__)
#define LOG_ERR(...) std::fprintf(stderr, __VA_ARGS__)

// Errors only, of llama.cpp's own log.
#define LOG_LEVEL_ERROR 1
#define LOG_LEVEL_DEBUG 4

inline int common_log_get_verbosity(ggml_log_level level) {
    return level == GGML_LOG_LEVEL_ERROR || level == GGML_LOG_LEVEL_CONT ? LOG_LEVEL_ERROR : LOG_LEVEL_DEBUG;
}

struct common_log;
inline common_log * common_log_main() { return nullptr; }
inline void common_log_flush(common_log *) { std::fflush(stdout); }
inline void common_log_set_verbosity_thold(int) {}
