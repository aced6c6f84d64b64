// In place of llama.cpp's "common" library, which no wheel has: as much of it as test-llama-archs.cpp uses, on
// llama.cpp's public API.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "ggml-backend.h"
#include "llama-cpp.h"
#include "llama.h"

inline void common_init() { ggml_backend_load_all(); }

// A batch of tokens, each of one sequence.
class common_batch {
  public:
    explicit common_batch(llama_context * ctx) : batch(llama_batch_ext_init(ctx)) {}

    void clear() { llama_batch_ext_clear(batch.get()); }
    llama_batch_ext * get() { return batch.get(); }

    int32_t add(llama_token id, llama_pos pos, llama_seq_id sequence, bool output) {
        const int32_t at = llama_batch_ext_add_token(batch.get(), sequence, id);
        if (at < 0 || !llama_batch_ext_set_pos(batch.get(), at, &pos) ||
            (output && !llama_batch_ext_set_output_logits(batch.get(), at, true))) {
            throw std::runtime_error("a token does not go into the batch");
        }
        return at;
    }

  private:
    llama_batch_ext_ptr batch;
};
