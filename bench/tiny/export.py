"""The trained models as GGUF files that llama.cpp loads: F16, Q8_0 and Q4_0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import quantize
from torch import Tensor

from bench.lib.metadata import BOS, FIRST_PIECES, Piece, add_shape, add_vocabulary

from .families import CONVOLVED, Shape
from .model import CHARACTERS, N_VOCAB, TinyLlama, encode
from .references import CONTROLS, TEMPLATE

_Q = gguf.GGMLQuantizationType
KINDS = {
    "f16": (_Q.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (_Q.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (_Q.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}


def export(model: TinyLlama, path: Path, kind: str, name: str, description: str, *, chats: bool = False) -> None:
    """Write a GGUF file: matrices as `kind`, the embedding table and the output as at least Q8_0; norms, convolutions
    and routers as F32.

    Args:
        chats: it has the thinker's chat template and its control tokens.
    """
    shape, (wanted, file_type) = model.shape, KINDS[kind]
    w = gguf.GGUFWriter(path, shape.family)
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
        n_head_kv=shape.heads_kv,
        head_dim=shape.head_dim,
        rope_base=shape.rope_base,
        rms_eps=shape.eps,
        n_vocab=N_VOCAB,
    )
    if shape.family == "lfm2":
        w.add_shortconv_l_cache(CONVOLVED)
    if shape.experts:
        w.add_expert_count(shape.experts)
        w.add_expert_used_count(shape.experts_used)
        w.add_expert_feed_forward_length(shape.n_ff)
    w.add_file_type(file_type)
    pieces: list[Piece] = [*FIRST_PIECES, *((character, gguf.TokenType.NORMAL) for character in CHARACTERS)]
    if chats:
        w.add_chat_template(TEMPLATE)
        pieces += [(text, gguf.TokenType.CONTROL) for text in CONTROLS]
    pieces += [(f"<unused{i}>", gguf.TokenType.UNUSED) for i in range(N_VOCAB - len(pieces))]
    add_vocabulary(w, pieces, [0.0] * N_VOCAB)  # pieces of one character have nothing to merge
    for tensor, values in _tensors(shape, model.state_dict()):
        array = values.detach().float().numpy()
        if array.ndim == 1 or "shortconv.conv" in tensor or "ffn_gate_inp" in tensor:
            w.add_tensor(tensor, array)
            continue
        kept = _Q.Q8_0 if wanted == _Q.Q4_0 and not tensor.startswith("blk.") else wanted
        w.add_tensor(tensor, quantize(array, kept), raw_dtype=kept)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def _tensors(shape: Shape, state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors as the file has them: an expert's matrices are stacked, [experts, out, in]."""
    for name, values in state.items():
        if name == "output_norm.weight" and shape.family == "lfm2":
            yield "token_embd_norm.weight", values
        elif "_exps." not in name:
            yield name, values
        elif name.endswith("_exps.0.weight"):
            stem = name.removesuffix(".0.weight")
            yield f"{stem}.weight", torch.stack([state[f"{stem}.{i}.weight"] for i in range(shape.experts)])


def reference_logits(model: TinyLlama, text: str) -> npt.NDArray[np.float32]:
    """Float32 logits [tokens, N_VOCAB] of BOS and a text, as PyTorch computes them."""
    with torch.no_grad():
        logits: npt.NDArray[np.float32] = model.eval()(torch.tensor([[BOS, *encode(text)]]))[0].float().numpy()
    return logits
