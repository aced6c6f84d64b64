"""Loads a draft head, a small GGUF file of the architecture `eagle3`, beside the model that it was trained for.

llama.cpp ends the process where such a file does not fit what it does with it, so all that it relies on is checked
before.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tilebeam import gguf as gguf_tools
from tilebeam.errors import TilebeamError, gguf_errors
from tilebeam.model.cache_size import cache_of

if TYPE_CHECKING:
    from tilebeam.engine.draft_head import DraftHead
    from tilebeam.native.llama import Context

ARCHITECTURE = "eagle3"
# Tokens of a batch, and sequences: llama.cpp computes logits of all of them, of the whole vocabulary.
_BATCH, _SEQUENCES = 48, 16
K_MODEL = "tilebeam.draft.model"  # `model_mark` of the model that a head of ours was trained for


@dataclass(frozen=True)
class HeadFile:
    """What a draft head's file says.

    Attributes:
        path: of the file.
        layers: of its model, whose outputs it reads, from 0.
        n_embd: of its model.
        n_vocab: of its model.
        model: `model_mark` of its model; None: it does not say.
        n_bytes: of its weights.
        kv: elements of a token in its KV cache.
    """

    path: str
    layers: tuple[int, ...]
    n_embd: int
    n_vocab: int
    model: str | None
    n_bytes: int
    kv: int

    def memory(self, n_ctx: int) -> int:
        """Return the bytes that it takes beside a model with so many KV cells: weights, logits, and cells."""
        from tilebeam.native.head_contexts import FUSED

        rows = _BATCH + _SEQUENCES + FUSED  # that are computed, given out, and given out where features are fused
        return self.n_bytes + 4 * self.n_vocab * rows + 2 * self.kv * _cells(n_ctx)


def _cells(n_ctx: int) -> int:
    """Return the cells of a head's cache: as many as its model has, and what was shared once, but is decoded again."""
    from tilebeam.engine.draft_head import LAST
    from tilebeam.engine.drafter import MOST

    return n_ctx + _SEQUENCES * (LAST + MOST)


def head_file(path: str | os.PathLike[str]) -> HeadFile | None:
    """Read what a file says if it is a draft head; None: it is another model.

    Raises:
        TilebeamError: it cannot be read, or is a head that llama.cpp cannot run.
    """
    path = Path(path)
    if not path.is_file():
        return None  # whoever loads it says so
    with gguf_errors(f"{path} cannot be loaded"), gguf_tools.open_gguf(path) as file:
        return _read(str(path), file) if file.architecture == ARCHITECTURE else None


def _read(path: str, file: gguf_tools.Source) -> HeadFile:
    gguf_tools.check_model(file, ARCHITECTURE)

    def value(key: str, kind: type = int) -> Any:
        found = gguf_tools.value_of(file.kv, f"{ARCHITECTURE}.{key}")
        if not isinstance(found, kind):
            raise gguf_tools.GGUFError(f"a draft head needs the metadata {ARCHITECTURE}.{key}")
        return found

    def need(what: str, *, holds: bool) -> None:
        if not holds:
            raise gguf_tools.GGUFError(f"a draft head must have {what}")

    shapes = {name: tensor.ne for name, tensor in file.tensors.items()}
    inputs = value("target_layers", list)
    n_embd, width = value("embedding_length"), value("target_hidden_size")
    need("one layer", holds=value("block_count") == 1)
    for name in ("head_count", "head_count_kv"):  # one number, not one a layer: check_model has compared the two
        value(f"attention.{name}")
    three = len(inputs) == 3 and all(isinstance(layer, int) and layer > 0 for layer in inputs)
    need("three target_layers, none of them the first", holds=three)
    need("a matrix fc.weight that fits", holds=shapes.get("fc.weight", ())[:2] == (3 * width, n_embd))
    vocabulary = file.kv.get("tokenizer.ggml.tokens")
    n_vocab = vocabulary.array[1] if vocabulary is not None and vocabulary.array else value("vocab_size")
    widths = [gguf_tools.value_of(file.kv, f"{ARCHITECTURE}.attention.{name}_length") for name in ("key", "value")]
    need("keys as wide as values", holds=widths[0] == widths[1])
    own = shapes.get("token_embd.weight")
    need(
        "token embeddings for its vocabulary, or states as wide as its model's",
        holds=n_embd == width if own is None else own == (n_embd, n_vocab),
    )
    need("an output matrix", holds="output.weight" in shapes)
    if "d2t" in shapes:
        need("as many numbers in d2t as rows of output", holds=shapes["d2t"] == shapes["output.weight"][1:])
        tensor = file.tensors["d2t"]
        if tensor.type.name != "I64":
            raise gguf_tools.GGUFError("d2t must hold whole numbers of 64 bits")
        tokens = np.empty(tensor.ne[0], np.int64)
        file.read_tensor(tensor, 0, tokens.view(np.uint8))
        need("tokens of its vocabulary in d2t", holds=bool(((tokens >= 0) & (tokens < n_vocab)).all()))
    else:
        need("an output for each token", holds=shapes["output.weight"][1:] == (n_vocab,))
    model, cache = gguf_tools.value_of(file.kv, K_MODEL), cache_of(file, ARCHITECTURE)
    return HeadFile(
        path,
        tuple(layer - 1 for layer in inputs),
        width,
        n_vocab,
        model if isinstance(model, str) else None,
        sum(tensor.nbytes for tensor in file.tensors.values()),
        cache.k + cache.v,
    )


def model_mark(path: str | os.PathLike[str]) -> str:
    """Tell a model from others by its norms' weights, which are the same in whatever types its matrices are, and in a
    repacked file: SHA-256 of their names and bytes.

    Raises:
        TilebeamError: the file cannot be read.
    """
    digest = hashlib.sha256()
    with gguf_errors(f"{path} cannot be read"), gguf_tools.open_gguf(path) as file:
        for name in sorted(name for name in file.tensors if name.endswith("norm.weight")):
            data = np.empty(file.tensors[name].nbytes, np.uint8)
            file.read_tensor(file.tensors[name], 0, data)
            digest.update(name.encode() + data.tobytes())
    return digest.hexdigest()


def check_fits(head: HeadFile, path: str, n_embd: int, n_vocab: int, n_layer: int) -> None:
    """Refuse a head of another model than the one in the file `path`.

    Raises:
        TilebeamError: it was trained for another model, or for one of another size.
    """
    theirs = (head.n_embd, head.n_vocab)
    if theirs != (n_embd, n_vocab) or max(head.layers) > n_layer - 2:
        raise TilebeamError(
            f"{head.path} is a draft head for a model of {theirs[0]} elements a state, {theirs[1]} tokens and at least "
            f"{max(head.layers) + 2} layers; {path} has {n_embd}, {n_vocab} and {n_layer}."
        )
    if head.model is not None and head.model != model_mark(path):
        raise TilebeamError(
            f"{head.path} was trained for another model of the same size than {path}: train a head for this one "
            "(tilebeam draft train)."
        )


def attach(head: HeadFile, target: Context, devices: Sequence[int | None], threads: int, stack: ExitStack) -> DraftHead:
    """Load a head and let it follow its model's context.

    Args:
        head: that fits.
        target: the context, with a tap of the head's layers.
        devices: that it runs on; none: the CPU backend.
        threads: of the CPU backend.
        stack: what closes it.

    Raises:
        TilebeamError: llama.cpp cannot load it.
    """
    import llama_cpp.llama_cpp as capi

    from tilebeam.engine.draft_head import DraftHead
    from tilebeam.native.head_contexts import HeadContexts, available
    from tilebeam.native.llama import Model, errors_in, log_router
    from tilebeam.native.register import own_load

    if not available():
        raise TilebeamError(f"{head.path} is a draft head, which this build of llama.cpp has no functions to run.")
    params = capi.llama_model_default_params()
    array = (ctypes.c_void_p * (len(devices) + 1))(*devices, None)
    params.devices = ctypes.cast(array, ctypes.c_void_p)
    params.n_gpu_layers = -1 if devices else 0
    wanted = capi.llama_context_default_params()
    wanted.n_ctx = _cells(target.n_ctx)
    wanted.n_seq_max, wanted.kv_unified = _SEQUENCES, True
    wanted.n_batch = wanted.n_ubatch = _BATCH
    # Beside the device the CPU backend only looks up embeddings.
    wanted.n_threads = wanted.n_threads_batch = 1 if devices else threads
    wanted.no_perf = True
    wanted.ctx_other = target.pointer
    with log_router().capture() as log:
        pointer = own_load()(os.fsencode(head.path), params)
        if not pointer:
            raise TilebeamError(f"llama.cpp could not load {head.path}: {errors_in(log) or 'no reason was given'}")
        model = Model(pointer)
        stack.callback(model.close)
        if model.vocab.size != head.n_vocab:  # llama.cpp counts tokens by vocab_size where there is no tokenizer
            raise TilebeamError(f"{head.path} has a vocabulary of {head.n_vocab} tokens, but a vocab_size of another.")
        contexts = HeadContexts(model, wanted)
        stack.callback(contexts.close)
    following = DraftHead(contexts, target, head.layers)
    stack.callback(following.close)
    return following
