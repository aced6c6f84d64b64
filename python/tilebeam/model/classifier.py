"""The classifier in a model's own file, which reward models and rerankers have (pooling by rank)."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from tilebeam import gguf as gguf_tools
from tilebeam.errors import TilebeamError

Floats = npt.NDArray[np.float32]

CLASSIFIER = "cls.output.weight"  # ggml's name (LLM_TENSOR_CLS_OUT)


def read_classifier(path: str | os.PathLike[str]) -> tuple[Floats, Floats | None]:
    """Return weight [labels, n_embd] and bias [labels], if it has one.

    Raises:
        TilebeamError: the file holds none.
    """
    from tilebeam.gguf.weights import tensor_values

    try:
        with gguf_tools.open_gguf(path) as file:
            weight = file.tensors.get(CLASSIFIER)
            if weight is None:
                raise TilebeamError(f"{path} holds no classifier ({CLASSIFIER}).")
            bias = file.tensors.get(CLASSIFIER.replace("weight", "bias"))
            return np.atleast_2d(tensor_values(file, weight)), None if bias is None else tensor_values(file, bias)
    except gguf_tools.GGUFError as error:
        raise TilebeamError(f"{path}: {error}.") from None


class Classifier:
    """A model's classifier of hidden states, as llama.cpp computes it.

    Args:
        path: the model's file.
        architecture: of the model: Qwen 3's labels are a softmax.
    """

    def __init__(self, path: str, architecture: str) -> None:
        self._weight, self._bias = read_classifier(path)
        self._softmax = architecture in ("qwen3", "qwen3vl")

    def __call__(self, hidden: Floats) -> Floats:
        """Return scores [n, labels] of hidden states [n, n_embd]."""
        y = hidden @ self._weight.T + (0 if self._bias is None else self._bias.reshape(-1))
        if self._softmax:
            y = np.exp(y - y.max(axis=1, keepdims=True))
            y /= y.sum(axis=1, keepdims=True)
        return y.astype(np.float32)
