"""LoRA adapters: does a file fit a model? llama.cpp checks some of it and asserts the rest when it computes.

As in llama-adapter.cpp and llama-graph.cpp of the pinned version: an adapter has a pair NAME.lora_a [K, r], NAME.lora_b
[r, N] for each matrix NAME [K, N] that it changes, with the same third dimension where the model has a stack of
experts. Of the embeddings, which are looked up by row, A is [r, N] and B [r, K].
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import GGUFError
from .gguf_file import GGUFFile, TensorInfo
from .policy import EMBEDDING, OUTPUT
from .split import Source
from .weights import has_values

FLOAT32 = 6  # value type
K_ALPHA = "adapter.lora.alpha"
K_INVOCATION = "adapter.alora.invocation_tokens"
ENDS = (".lora_a", ".lora_b")
IGNORED = "_norm.weight"  # llama.cpp leaves an adapter's norms out


@dataclass(frozen=True)
class Pair:
    """The two factors of a change to a matrix: ``a`` reads its inputs, ``b`` writes its outputs."""

    name: str  # of the matrix
    a: TensorInfo
    b: TensorInfo

    @property
    def nbytes(self) -> int:
        """Bytes of both factors in the file."""
        return self.a.nbytes + self.b.nbytes


def check_adapter(adapter: GGUFFile, model: Source, architecture: str) -> list[Pair]:
    """Return the pairs of a LoRA adapter, which all fit the model.

    Args:
        adapter: the adapter's file.
        model: the model's, ordinary or repacked.
        architecture: the model's real one.

    Raises:
        GGUFError: it is not a LoRA adapter, or one of another model; says what does not fit.
    """
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if key not in adapter.kv or adapter.text(key) != wanted:
            raise GGUFError(f"{adapter.path} is not a LoRA adapter: its {key} is not {wanted!r}")
    if adapter.architecture != architecture:
        raise GGUFError(f"{adapter.path} is an adapter of a {adapter.architecture} model, not of {architecture}")
    alpha = adapter.kv.get(K_ALPHA)
    if alpha is not None and alpha.type != FLOAT32:
        raise GGUFError(f"{adapter.path}: {K_ALPHA} is not a 32-bit float")
    if K_INVOCATION in adapter.kv:
        raise GGUFError(
            f"{adapter.path} is an activated adapter (aLoRA), which applies only after its invocation tokens: "
            "this is not supported"
        )
    pairs = _pairs(adapter)
    for pair in pairs:
        _check_pair(pair, model, adapter)
    return pairs


def _pairs(adapter: GGUFFile) -> list[Pair]:
    halves: dict[str, dict[str, TensorInfo]] = {}
    for t in adapter.tensors.values():
        if t.name.endswith(ENDS):
            halves.setdefault(t.name[: -len(ENDS[0])], {})[t.name[-1]] = t
        elif not t.name.endswith(IGNORED):
            raise GGUFError(f"{adapter.path}: tensor {t.name!r} is not part of a LoRA adapter")
    if not halves:
        raise GGUFError(f"{adapter.path} changes no matrix")
    for name, half in halves.items():
        if len(half) != 2:
            raise GGUFError(f"{adapter.path}: one half of the pair for {name!r} is missing")
    return [Pair(name, half["a"], half["b"]) for name, half in halves.items()]


def _check_pair(pair: Pair, model: Source, adapter: GGUFFile) -> None:
    matrix = model.tensors.get(pair.name)
    if matrix is None:
        raise GGUFError(f"{adapter.path} changes {pair.name!r}, which the model does not have: it is of another model")
    if pair.name == EMBEDDING and OUTPUT not in model.tensors:
        raise GGUFError(
            f"{adapter.path} changes {EMBEDDING!r}, which this model uses as its output matrix, too: llama.cpp "
            "cannot apply that"
        )
    for t in (pair.a, pair.b):
        if not has_values(t.type):
            raise GGUFError(f"{adapter.path}: tensor {t.name!r} is {t.type.name}, which cannot be multiplied with")
    a, b, w = ((*t.ne, 1, 1, 1)[:4] for t in (pair.a, pair.b, matrix))
    if pair.name == EMBEDDING:
        fits = a[0] == b[0] and b[1] == w[0] and a[1] == w[1]
    else:
        fits = a[0] == w[0] and a[1] == b[0] and b[1] == w[1]
    if len(matrix.ne) < 2 or not fits or not a[2:] == b[2:] == w[2:]:
        raise GGUFError(
            f"{adapter.path}: the pair for {pair.name!r} has the shapes {list(pair.a.ne)} and {list(pair.b.ne)}, which "
            f"do not fit the model's {list(matrix.ne)}: it is of another model"
        )
