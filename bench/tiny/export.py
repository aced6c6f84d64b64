"""The trained models as GGUF files that llama.cpp loads: F16, Q8_0 and Q4_0."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import quantize

from .model import BOS, CHARACTERS, EOS, N_VOCAB, UNK, TinyLlama, encode

_Q = gguf.GGMLQuantizationType
KINDS = {
    "f16": (_Q.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (_Q.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (_Q.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}


def export(model: TinyLlama, path: Path, kind: str, name: str, description: str) -> None:
    """Write a GGUF file: matrices as `kind`, norms as F32; the embedding table and the output as at least Q8_0."""
    shape, (wanted, file_type) = model.shape, KINDS[kind]
    w = gguf.GGUFWriter(path, "llama")
    w.add_name(name)
    w.add_description(description)
    w.add_license("MIT")
    w.add_context_length(shape.n_ctx)
    w.add_embedding_length(shape.n_embd)
    w.add_block_count(shape.n_layer)
    w.add_feed_forward_length(shape.n_ff)
    w.add_head_count(shape.n_head)
    w.add_head_count_kv(shape.n_head)
    w.add_rope_dimension_count(shape.head_dim)
    w.add_rope_freq_base(shape.rope_base)
    w.add_layer_norm_rms_eps(shape.eps)
    w.add_vocab_size(N_VOCAB)
    w.add_file_type(file_type)
    _vocabulary(w)
    for tensor, values in model.state_dict().items():
        array = values.detach().float().numpy()
        if array.ndim == 1:
            w.add_tensor(tensor, array)
            continue
        kept = _Q.Q8_0 if wanted == _Q.Q4_0 and not tensor.startswith("blk.") else wanted
        w.add_tensor(tensor, quantize(array, kept), raw_dtype=kept)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def _vocabulary(w: gguf.GGUFWriter) -> None:
    kind = gguf.TokenType
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *CHARACTERS]
    types = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * 256, *[kind.NORMAL] * len(CHARACTERS)]
    unused = N_VOCAB - len(tokens)
    tokens += [f"<unused{i}>" for i in range(unused)]
    types += [kind.UNUSED] * unused
    w.add_tokenizer_model("llama")  # pieces of one character have nothing to merge
    w.add_token_list(tokens)
    w.add_token_scores([0.0] * len(tokens))
    w.add_token_types(types)
    w.add_unk_token_id(UNK)
    w.add_bos_token_id(BOS)
    w.add_eos_token_id(EOS)
    w.add_add_bos_token(True)
    w.add_add_eos_token(False)
    w.add_add_space_prefix(False)


def reference_logits(model: TinyLlama, text: str) -> npt.NDArray[np.float32]:
    """Float32 logits [tokens, N_VOCAB] of BOS and a text, as PyTorch computes them."""
    with torch.no_grad():
        logits: npt.NDArray[np.float32] = model.eval()(torch.tensor([[BOS, *encode(text)]]))[0].float().numpy()
    return logits
