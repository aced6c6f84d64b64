"""The tiny world of bench/tiny for tests: what is agreed about its files, and its exact checker."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bench.tiny import arithmetic, references

__all__ = ["arithmetic", "references", "stored"]

F32 = NDArray[np.float32]


def stored(name: str) -> list[F32]:
    """PyTorch's logits of the reference texts, [tokens, vocabulary] each."""
    with np.load(references.LOGITS) as arrays:
        return [arrays[f"{name}/{i}"] for i in range(len(references.TEXTS))]
