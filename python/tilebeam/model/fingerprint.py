"""Which model a file of saved cells belongs to: a digest that tells models, and adapters in force, apart."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from tilebeam.errors import TilebeamError

# Bytes of each tensor that count, from its middle: two models differ in nearly all of theirs.
_SAMPLE = 1024


def fingerprint(path: str, lora: Sequence[tuple[str, float]]) -> str:
    """The digest of a model's metadata, tensors' shapes and samples of their values, and of adapters.

    Args:
        path: the model's file, or the first part of a split model.
        lora: adapters' files and scales.

    Raises:
        TilebeamError: a file cannot be read any more.
    """
    from tilebeam import gguf as gguf_tools

    digest = hashlib.sha256()
    try:
        with gguf_tools.open_gguf(path) as file:
            for key in sorted(file.kv):
                digest.update(file.kv[key].raw)
            for name, tensor in sorted(file.tensors.items()):
                digest.update(repr((name, int(tensor.type), tensor.ne)).encode())
                sample = np.empty(min(_SAMPLE, tensor.nbytes), np.uint8)
                file.read_tensor(tensor, (tensor.nbytes - len(sample)) // 2, sample)
                digest.update(sample.tobytes())
        for adapter, scale in lora:
            with open(adapter, "rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
            digest.update(repr(scale).encode())
    except (gguf_tools.GGUFError, OSError) as error:
        raise TilebeamError(f"The model's file cannot be read any more: {error}") from None
    return digest.hexdigest()
