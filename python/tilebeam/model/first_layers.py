"""The first layers of a model as a file of their own, with a vocabulary in proportion: what a step of a layer costs can
be tried on it without loading the model."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from tilebeam.errors import TilebeamError

if TYPE_CHECKING:
    from tilebeam.gguf import Source, TensorInfo
    from tilebeam.gguf.gguf_file import KeyValue

_MOST_LAYERS, _MOST_BYTES = 8, 1 << 30
_FEWEST_TOKENS = 256  # of the vocabulary
# Lists with an entry per section or table, not per layer, as long as they happen to be.
_NOT_BY_LAYER = (".rope.", ".ple.")


def write_first_layers(f: Source, descriptor: int, room: int = _MOST_BYTES) -> int:
    """Write the fewest first layers that have every kind of layer of the model, at least two of them if it has two.

    Layers are of one kind if their tensors have the same names and shapes. The file has no tokenizer, and as many of
    the vocabulary's first tokens as make the output matrix the part of the file that it is of the model.

    Args:
        f: an ordinary model.
        descriptor: of an empty file.
        room: bytes that its tensors may have.

    Returns:
        The number of layers.

    Raises:
        TilebeamError: these layers are most of a large model, or are too many; its tensors have other names.
        MemoryError: they have more; nothing was written.
        GGUFError, OSError: reading or writing fails.
    """
    import numpy as np

    from tilebeam.gguf import architecture_of, gguf_write

    architecture = architecture_of(f)
    n_layer, embeddings = f.kv.get(f"{architecture}.block_count"), f.tensors.get("token_embd.weight")
    if n_layer is None or not isinstance(n_layer.value, int) or embeddings is None:
        raise TilebeamError("the model has no layers or no embeddings")
    layers, n_vocab = _layers(f, n_layer.value), embeddings.ne[-1]
    tokens = min(n_vocab, max(_FEWEST_TOKENS, -(-n_vocab * layers // n_layer.value // 256) * 256))
    parts = list(_parts(f, n_layer.value, layers, n_vocab, tokens))
    size = sum(part.nbytes for part in parts)
    if room < size <= _MOST_BYTES:
        raise MemoryError
    if size > _MOST_BYTES:
        raise TilebeamError(f"its first {layers} layers have more than {_MOST_BYTES >> 30} GiB")
    records = [_record(kv, architecture, n_layer.value, layers) for key, kv in f.kv.items() if _kept(key)]
    records += [gguf_write.kv_text("tokenizer.ggml.model", "no_vocab")]
    records += [gguf_write.kv_u32(f"{architecture}.vocab_size", tokens)]
    specs = [(part.name, part.type, part.ne) for part in parts]
    head, offsets, size = gguf_write.header(f.version, records, specs, f.alignment)
    os.pwrite(descriptor, head, 0)
    os.truncate(descriptor, size)
    buffer = np.empty(1 << 24, np.uint8)
    for part, at in zip(parts, offsets, strict=True):
        for first in range(0, part.nbytes, buffer.size):
            piece = buffer[: part.nbytes - first]
            f.read_tensor(part, first, piece)
            os.pwrite(descriptor, piece.data, at + first)
    return layers


def _layers(f: Source, n_layer: int) -> int:
    """Count the first layers that have every kind, or raise."""
    from tilebeam.gguf import layer_of

    shapes: dict[int, set[tuple[str, tuple[int, ...]]]] = {}
    for t in f.tensors.values():
        if (layer := layer_of(t.name, n_layer)) < n_layer:
            shapes.setdefault(layer, set()).add((t.name.split(".", 2)[2], t.ne))
    first: dict[frozenset[tuple[str, tuple[int, ...]]], int] = {}
    for layer in sorted(shapes):
        first.setdefault(frozenset(shapes[layer]), layer)
    layers = min(n_layer, max(2, 1 + max(first.values(), default=0)))
    if not shapes or layers > _MOST_LAYERS:
        raise TilebeamError(f"it takes its first {layers} layers to have one of every kind")
    return layers


def _parts(f: Source, n_layer: int, layers: int, n_vocab: int, tokens: int) -> Iterator[TensorInfo]:
    """Yield the tensors to keep, with as many of their rows."""
    from tilebeam.gguf import layer_of

    for t in f.tensors.values():
        if (layer := layer_of(t.name, n_layer)) < n_layer:
            if layer < layers:
                yield t
        elif t.ne[-1] == n_vocab:
            yield replace(t, ne=(*t.ne[:-1], tokens), nbytes=t.nbytes // n_vocab * tokens)
        else:
            yield t


def _kept(key: str) -> bool:
    return not key.startswith(("tokenizer.", "split.")) and not key.endswith(".vocab_size")


def _record(kv: KeyValue, architecture: str, n_layer: int, layers: int) -> bytes:
    """Return a record of the metadata for so many layers."""
    from tilebeam.gguf import gguf_write

    if kv.key == f"{architecture}.block_count":
        return bytes(gguf_write.kv_u32(kv.key, layers))
    own = kv.key.startswith(f"{architecture}.") and not any(part in kv.key for part in _NOT_BY_LAYER)
    if not own or kv.array is None or kv.array[1] != n_layer:
        return bytes(kv.raw)
    type, raw = kv.array[0], bytes(kv.raw)
    data = raw[kv.body + 12 :]
    if len(data) % n_layer:  # strings
        return raw
    return raw[: kv.body] + struct.pack("<IQ", type, layers) + data[: len(data) // n_layer * layers]
