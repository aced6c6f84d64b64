// Registration with ggml: what ggml_backend_load looks for, and the check that this is the ggml the plugin was built
// for.
//
// ggml's backend vtables are positional and its API number does not change with them: a plugin in another ggml would
// call the wrong functions. So version and commit must both be those of the headers this was compiled with.
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

#include "backend.h"
#include "control_functions.h"
#include "device.h"
#include "ggml-impl.h"
#include "ggml_release.h"
#include "shared_state.h"

namespace tb::plugin {

namespace {

const char * reg_name(ggml_backend_reg_t) { return "Tilebeam"; }
size_t device_count(ggml_backend_reg_t) { return 1; } // of others a program may know (control.h, tilebeam_device)
ggml_backend_dev_t get_device(ggml_backend_reg_t reg, size_t index) {
    return index < device_count(reg) ? device(0) : nullptr;
}

// LLAMA_SPLIT_MODE_ROW asks for a buffer type that spreads the rows of a matrix over devices; llama.cpp refuses the
// model where a registry does not have this function. There is no such type, so the model is spread by layers.
ggml_backend_buffer_type_t split_buffer_type(int, const float *) {
    static std::once_flag said;
    std::call_once(said, [] {
        GGML_LOG_WARN("tilebeam: matrices are not split by rows: split_mode=row spreads the model by layers\n");
    });
    return nullptr;
}

void * get_proc_address(ggml_backend_reg_t, const char * name) {
    if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) return reinterpret_cast<void *>(&set_n_threads);
    if (std::strcmp(name, "ggml_backend_dev_get_extra_bufts") == 0) return reinterpret_cast<void *>(&extra_bufts);
    if (std::strcmp(name, "ggml_backend_split_buffer_type") == 0) return reinterpret_cast<void *>(&split_buffer_type);
    return control_function(name);
}

ggml_backend_reg the_registration = {
    GGML_BACKEND_API_VERSION, {reg_name, device_count, get_device, get_proc_address}, nullptr};

bool allow_unknown_commit() {
    const char * v = std::getenv("TILEBEAM_ALLOW_UNKNOWN_COMMIT");
    return v && std::strcmp(v, "1") == 0;
}

// "" if a ggml of this version and commit has the vtables that this plugin was compiled with; else a sentence.
// `version` and `commit` are what ggml_version() and ggml_commit() return.
std::string check_ggml(const std::string & version, const std::string & commit) {
    const std::string version_wanted = built_version, commit_wanted = built_commit;
    const std::string built =
        "Tilebeam was built for ggml " + version_wanted + " (commit " + commit_wanted.substr(0, 12) + ")";
    const std::string advice = "; install the llama-cpp-python version that Tilebeam asks for, or build Tilebeam anew";
    if (version != version_wanted)
        return built + ", but this process has ggml " + version + " (commit " + commit + ")" + advice;

    // A build from a source distribution says "-dirty", because files were left out of it.
    std::string digits = commit;
    if (const size_t dash = digits.find('-'); dash != std::string::npos) digits.resize(dash);
    bool hex = digits.size() >= 7;
    for (const char c : digits)
        hex = hex && std::isxdigit(static_cast<unsigned char>(c));
    if (!hex || commit_wanted == "unknown") {
        if (allow_unknown_commit()) return "";
        const char * who = hex ? "Tilebeam" : "llama-cpp-python";
        return built + ", and the commit of this process's ggml " + version + " is unknown, because " + who +
               " was compiled without git: install git and reinstall " + who +
               " (pip install --force-reinstall --no-cache-dir --no-binary :all: " +
               (hex ? "tilebeam" : "--no-deps llama-cpp-python") +
               "), or set TILEBEAM_ALLOW_UNKNOWN_COMMIT=1 if you know that they fit";
    }
    if (commit_wanted.compare(0, digits.size(), digits) != 0) {
        return built + ", but this process has commit " + commit + " of the same version" + advice;
    }
    return "";
}

} // namespace

} // namespace tb::plugin

extern "C" {

__attribute__((visibility("default"))) const char * tilebeam_check_ggml(const char * version, const char * commit) {
    static thread_local std::string text;
    text = tb::plugin::check_ggml(version ? version : ggml_version(), commit ? commit : ggml_commit());
    return text.c_str();
}

__attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
    const std::string why = tb::plugin::check_ggml(ggml_version(), ggml_commit());
    if (!why.empty()) {
        GGML_LOG_ERROR("tilebeam: %s\n", why.c_str());
        return nullptr;
    }
    tb::plugin::state::get(); // reads the environment, and says now what is wrong with it
    tb::plugin::adopt_devices(&tb::plugin::the_registration);
    return &tb::plugin::the_registration;
}

} // extern "C"
