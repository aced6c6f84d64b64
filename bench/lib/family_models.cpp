// Writes a random model of every family that llama.cpp's test program test-llama-archs.cpp can describe, at sizes that
// are worth timing: bench/families.py compiles it with that file, which is included from llama.cpp's source.
//
//     family_models --list
//     family_models FOLDER REGEX WIDTH WIDTH_OF_MIXTURES LAYERS QUANTIZATION
//
// Of upstream's program come the metadata of a tiny model (get_gguf_ctx); widths, heads and layers are multiplied here,
// the loader makes all tensors of it (llama_model_init_from_user), which get weights that keep activations near unit
// variance, and llama_model_quantize makes the file that is kept, of the ftype QUANTIZATION; or all matrices of the
// layers get one type, named as in "iq2_xxs": that of 32 rows, which repeat. Families that upstream leaves out of its
// own runs get what is missing of their metadata. Prints the name of each file when it is there.
#define main upstream_main
#include "test-llama-archs.cpp"
#undef main

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <set>

namespace {

constexpr uint32_t EXPERTS = 8, EXPERTS_USED = 2;

// Not one model after the other: parts of others, what no graph is there for, speech and pictures.
const std::set<std::string> LEFT_OUT = {"clip",     "gptj",   "(unknown)",        "chameleon",     "wavtokenizer-dec",
                                        "eagle3",   "dflash", "gemma4-assistant", "graniteswitch", "deepseek2-ocr",
                                        "pockettts"};

// Keys, behind the architecture's name, that grow with the width.
const std::set<std::string> WIDE = {"embedding_length",
                                    "features_length",
                                    "feed_forward_length",
                                    "attention.head_count",
                                    "attention.head_count_kv",
                                    "expert_feed_forward_length",
                                    "expert_latent_length",
                                    "expert_shared_feed_forward_length",
                                    "ssm.inner_size",
                                    "ssm.time_step_rank",
                                    "embedding_length_per_layer_input"};

// Metadata of one model, changed in place.
class metadata {
  public:
    explicit metadata(llm_arch arch, bool moe) : kv(get_gguf_ctx(arch, moe)), arch(llm_arch_name(arch)) {}

    gguf_context * get() const { return kv.get(); }
    std::string key(const std::string & name) const { return arch + "." + name; }
    void set(const std::string & name, uint32_t value) { gguf_set_val_u32(kv.get(), key(name).c_str(), value); }
    // Keeps a number a number, a list a list.
    void set(const std::string & name, const std::vector<uint32_t> & values) {
        const int64_t at = gguf_find_key(kv.get(), key(name).c_str());
        if (at >= 0 && gguf_get_kv_type(kv.get(), at) == GGUF_TYPE_UINT32 && values.size() == 1) {
            set(name, values[0]);
        } else {
            gguf_set_arr_data(kv.get(), key(name).c_str(), GGUF_TYPE_UINT32, values.data(), values.size());
        }
    }
    std::vector<uint32_t> get(const std::string & name) const {
        const int64_t at = gguf_find_key(kv.get(), key(name).c_str());
        if (at < 0) {
            return {};
        }
        if (gguf_get_kv_type(kv.get(), at) == GGUF_TYPE_UINT32) {
            return {gguf_get_val_u32(kv.get(), at)};
        }
        const auto * first = static_cast<const uint32_t *>(gguf_get_arr_data(kv.get(), at));
        return {first, first + gguf_get_arr_n(kv.get(), at)};
    }

    // Multiplies all widths so that the model is about `width` wide, and repeats its layers until there are `layers`.
    void scale(uint32_t width, uint32_t layers) {
        const uint32_t old_width = get("embedding_length")[0], old_layers = get("block_count")[0];
        uint32_t times = std::max(1u, width / old_width);
        while (times * old_width % 256 != 0) {
            times++;
        }
        for (const std::string & name : WIDE) {
            std::vector<uint32_t> values = get(name);
            for (uint32_t & value : values) {
                const bool single = name == "attention.head_count_kv" && value == 1; // latent attention has one
                value *= single ? 1 : times;
            }
            if (!values.empty()) {
                set(name, values);
            }
        }
        const bool fixed = arch == "hrm_text" || arch == "gemma3n";
        const uint32_t repeats = fixed ? 1 : std::max(1u, layers / old_layers);
        set("block_count", old_layers * repeats);
        repeat_lists(old_layers, repeats);
        if (gguf_find_key(kv.get(), key("expert_count").c_str()) >= 0) {
            set("expert_count", EXPERTS);
            set("expert_used_count", EXPERTS_USED);
        }
        complete(times, old_layers * repeats);
    }

  private:
    // Lists with an entry per layer.
    void repeat_lists(uint32_t layers, uint32_t repeats) {
        std::vector<std::string> names; // a list that is set anew moves
        for (int64_t i = 0; i < gguf_get_n_kv(kv.get()); i++) {
            names.emplace_back(gguf_get_key(kv.get(), i));
        }
        for (const std::string & name : names) {
            const int64_t i = gguf_find_key(kv.get(), name.c_str());
            const bool other = name.find("tokenizer") == 0 || name.find("dimension_sections") != std::string::npos ||
                               name.find(".ple") != std::string::npos;
            if (other || gguf_get_kv_type(kv.get(), i) != GGUF_TYPE_ARRAY || gguf_get_arr_n(kv.get(), i) != layers) {
                continue;
            }
            const gguf_type type = gguf_get_arr_type(kv.get(), i);
            const size_t size = type == GGUF_TYPE_BOOL ? 1 : 4; // others are of 32 bits
            const auto * data = static_cast<const char *>(gguf_get_arr_data(kv.get(), i));
            std::vector<char> all;
            for (uint32_t r = 0; r < repeats; r++) {
                all.insert(all.end(), data, data + layers * size);
            }
            gguf_set_arr_data(kv.get(), name.c_str(), type, all.data(), size_t(layers) * repeats);
        }
    }

    // What upstream's metadata lack, or have for one size only.
    void complete(uint32_t times, uint32_t layers) {
        if (arch == "minimax-m3") { // an indexer head for each head
            set("attention.indexer.head_count", get("attention.head_count_kv")[0]);
        }
        if (arch.find("bert") != std::string::npos) {
            gguf_set_val_u32(kv.get(), "tokenizer.ggml.token_type_count", 2);
        }
        if (arch == "rwkv7" || arch == "arwkv7") {
            for (const char * name : {"decay", "iclr", "value_residual_mix", "gate"}) {
                set("attention." + std::string(name) + "_lora_rank", 64);
            }
        }
        if (arch.find("rwkv") != std::string::npos) {
            set("token_shift_count", arch == "rwkv6" || arch == "rwkv7" ? 2 : 1);
        }
        if (arch == "gemma4") { // as E2B: half of the layers share caches, every fifth sees the whole text
            std::vector<uint32_t> windowed;
            for (uint32_t i = 0; i < layers; i++) {
                windowed.push_back(i % 5 != 4);
            }
            set("attention.sliding_window_pattern", windowed);
            set("attention.shared_kv_layers", layers / 2 / 5 * 5);
            set("embedding_length_per_layer_input", 32 * times);
        }
    }

    gguf_context_ptr kv;
    std::string arch;
};

// Random numbers of a normal distribution: a table, drawn from by xorshift.
void fill(const std::string & name, float mean, float std, std::vector<float> & out) {
    static const std::vector<float> table = [] {
        std::mt19937 gen(1);
        std::normal_distribution<float> dis;
        std::vector<float> made(1 << 16);
        std::generate(made.begin(), made.end(), [&] { return dis(gen); });
        return made;
    }();
    uint64_t x = std::hash<std::string>{}(name) | 1;
    for (float & value : out) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        value = mean + std * table[x >> 40 & (table.size() - 1)];
    }
}

struct tensors {
    std::vector<ggml_tensor *> all;
    std::set<std::string> names;
};

void make_tensor(ggml_tensor * t, void * data) {
    auto * to = static_cast<tensors *>(data);
    const std::string name = t->name;
    const bool row = ggml_n_dims(t) == 1 || t->ne[1] == 1, norm = name.find("norm") != std::string::npos;
    const float k = float(t->ne[0]);
    const float std = row ? 0.1f : name.find("ffn_gate_inp") != std::string::npos ? 4 / sqrtf(k) : 1 / sqrtf(k);
    std::vector<float> values(ggml_nelements(t));
    fill(name, row && norm && name.find("weight") != std::string::npos ? 1.0f : 0.0f, std, values);
    if (name.find("ssm_a") != std::string::npos) { // states decay
        std::transform(values.begin(), values.end(), values.begin(), [](float v) { return -fabsf(v) - 0.1f; });
    }
    std::vector<ggml_fp16_t> halves(t->type == GGML_TYPE_F16 ? values.size() : 0);
    ggml_fp32_to_fp16_row(values.data(), halves.data(), int64_t(halves.size()));
    const void * bytes = halves.empty() ? static_cast<const void *>(values.data()) : halves.data();
    ggml_backend_tensor_set(t, bytes, 0, ggml_nbytes(t));
    if (to->names.insert(name).second) { // tied matrices come twice
        to->all.push_back(t);
    }
}

// Gives all matrices of layers one type, and the output where that is no float type Q6_K.
void retype(gguf_context * out, const tensors & made, ggml_type type, std::vector<std::vector<uint8_t>> & kept) {
    constexpr int64_t ROWS = 32;
    const bool is_float = !ggml_is_quantized(type);
    for (const ggml_tensor * t : made.all) {
        const std::string name = t->name;
        const bool output = name == "output.weight", layer = name.find("blk.") == 0;
        const bool matrix = ggml_n_dims(t) >= 2 && name.find("norm") == std::string::npos && t->ne[1] % ROWS == 0;
        const ggml_type to = output && !is_float ? GGML_TYPE_Q6_K : type;
        if (!matrix || !(output || layer) || t->ne[0] % ggml_blck_size(to) != 0) {
            continue;
        }
        const std::vector<float> importance(t->ne[0], 1.0f);
        std::vector<uint8_t> rows(ROWS * ggml_row_size(to, t->ne[0])), &all = kept.emplace_back();
        ggml_quantize_chunk(to, static_cast<const float *>(t->data), rows.data(), 0, ROWS, t->ne[0], importance.data());
        for (int64_t row = 0; row < ggml_nrows(t); row += ROWS) {
            all.insert(all.end(), rows.begin(), rows.end());
        }
        gguf_set_tensor_type(out, t->name, to);
        gguf_set_tensor_data(out, t->name, all.data());
    }
}

// The type of this name; GGML_TYPE_COUNT: there is none.
ggml_type type_of(const std::string & name) {
    for (int i = 0; i < GGML_TYPE_COUNT; i++) {
        const char * known = ggml_type_name(static_cast<ggml_type>(i));
        if (known != nullptr && name == known) {
            return static_cast<ggml_type>(i);
        }
    }
    return GGML_TYPE_COUNT;
}

void write(llm_arch arch, bool moe, const std::string & path, uint32_t width, uint32_t layers,
           const std::string & how) {
    metadata model(arch, moe);
    model.scale(width, layers);
    tensors made;
    llama_model_params params = llama_model_default_params();
    std::vector<ggml_backend_dev_t> no_devices = {nullptr};
    params.devices = no_devices.data();
    params.progress_callback = silent_model_load_progress;
    const llama_model_ptr loaded(llama_model_init_from_user(model.get(), make_tensor, &made, params));
    if (!loaded) {
        throw std::runtime_error("llama.cpp does not load it");
    }
    const gguf_context_ptr out(gguf_init_empty());
    gguf_set_kv(out.get(), model.get());
    for (ggml_tensor * t : made.all) { // QRWKV6 is told from RWKV6 by what it lacks
        if (arch != LLM_ARCH_RWKV6QWEN2 || std::string(t->name).find("time_mix_first") == std::string::npos) {
            gguf_add_tensor(out.get(), t);
        }
    }
    const std::string whole = path + ".f32", partial = path + ".partial";
    std::vector<std::vector<uint8_t>> kept;
    if (const ggml_type type = type_of(how); type != GGML_TYPE_COUNT) {
        retype(out.get(), made, type, kept);
        if (!gguf_write_to_file(out.get(), partial.c_str(), false)) {
            throw std::runtime_error("the file was not written");
        }
    } else {
        llama_model_quantize_params params = llama_model_quantize_default_params();
        params.ftype = static_cast<llama_ftype>(std::stoi(how));
        params.nthread = 2;
        const bool ok = gguf_write_to_file(out.get(), whole.c_str(), false) &&
                        llama_model_quantize(whole.c_str(), partial.c_str(), &params) == 0;
        std::remove(whole.c_str());
        if (!ok) {
            throw std::runtime_error("it was not quantized");
        }
    }
    std::filesystem::rename(partial, path);
}

} // namespace

int main(int argc, char ** argv) {
    if (argc == 2 && std::string(argv[1]) == "--list") {
        for (const llm_arch & arch : llm_arch_all()) {
            if (!LEFT_OUT.count(llm_arch_name(arch))) {
                std::printf("%s\n", llm_arch_name(arch));
            }
        }
        return 0;
    }
    if (argc != 7) {
        std::fprintf(stderr, "usage: family_models FOLDER REGEX WIDTH WIDTH_OF_MIXTURES LAYERS QUANTIZATION\n");
        return 2;
    }
    common_init();
    llama_log_set(
        [](ggml_log_level level, const char * text, void *) {
            if (level == GGML_LOG_LEVEL_ERROR) {
                std::fputs(text, stderr);
            }
        },
        nullptr);
    for (const llm_arch & arch : llm_arch_all()) {
        const std::string name = llm_arch_name(arch);
        if (LEFT_OUT.count(name) || !arch_matches(argv[2], arch)) {
            continue;
        }
        for (const bool moe : {false, true}) {
            if (moe ? !moe_implemented(arch) : moe_mandatory(arch)) {
                continue;
            }
            const std::string path = std::string(argv[1]) + "/" + name + (moe ? "-moe.gguf" : "-dense.gguf");
            const uint32_t width = std::stoul(argv[moe ? 4 : 3]);
            try {
                write(arch, moe, path, width, std::stoul(argv[5]), argv[6]);
                std::printf("%s\n", path.c_str());
            } catch (const std::exception & error) {
                std::printf("%s: %s\n", path.c_str(), error.what());
            }
            std::fflush(stdout);
        }
    }
    return 0;
}
