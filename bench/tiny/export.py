"""The trained models as GGUF files that llama.cpp loads: F16, Q8_0 and Q4_0."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import quantize

from bench.lib.metadata import BOS, FIRST_PIECES, Piece, add_shape, add_vocabulary

from .model import CHARACTERS, N_VOCAB, TinyLlama, encode
from .references import CONTROLS, TEMPLATE

_Q = gguf.GGMLQuantizationType
KINDS = {
    "f16": (_Q.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (_Q.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (_Q.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}


def export(model: TinyLlama, path: Path, kind: str, name: str, description: str, *, chats: bool = False) -> None:
    """Write a GGUF file: matrices as `kind`, norms as F32; the embedding table and the output as at least Q8_0.

    Args:
        chats: it has the thinker's chat template and its control tokens.
    """
    shape, (wanted, file_type) = model.shape, KINDS[kind]
    w = gguf.GGUFWriter(path, "llama")
    w.add_name(name)
    w.add_description(description)
    w.add_license("MIT")
    add_shape(
        w,
        n_ctx=shape.n_ctx,
        n_embd=shape.n_embd,
        n_layer=shape.n_layer,
        n_ff=shape.n_ff,
        n_head=shape.n_head,
        n_head_kv=shape.n_head,
        head_dim=shape.head_dim,
        rope_base=shape.rope_base,
        rms_eps=shape.eps,
        n_vocab=N_VOCAB,
    )
    w.add_file_type(file_type)
    pieces: list[Piece] = [*FIRST_PIECES, *((character, gguf.TokenType.NORMAL) for character in CHARACTERS)]
    if chats:
        w.add_chat_template(TEMPLATE)
        pieces += [(text, gguf.TokenType.CONTROL) for text in CONTROLS]
    pieces += [(f"<unused{i}>", gguf.TokenType.UNUSED) for i in range(N_VOCAB - len(pieces))]
    add_vocabulary(w, pieces, [0.0] * N_VOCAB)  # pieces of one character have nothing to merge
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


def reference_logits(model: TinyLlama, text: str) -> npt.NDArray[np.float32]:
    """Float32 logits [tokens, N_VOCAB] of BOS and a text, as PyTorch computes them."""
    with torch.no_grad():
        logits: npt.NDArray[np.float32] = model.eval()(torch.tensor([[BOS, *encode(text)]]))[0].float().numpy()
    return logits
