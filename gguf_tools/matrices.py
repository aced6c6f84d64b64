"""The place where each weight matrix of a model is multiplied, the device or the CPU: decided here, from the tensors'
names and types alone. The loader's warning and choice, `LoadInfo`, doctor, inspect and bench show what is decided
here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tilebeam import _ext as ggml_ext

from .contents import architecture_of, model_kv
from .gguf_file import Q, TensorInfo, value_of
from .policy import EMBEDDING, OUTPUT
from .split import Source
from .weights import OTHER_OPS, TB_TYPE, is_looked_up, layer_of

# Why a matrix is multiplied on the CPU: the device does not multiply by its type; it is the embedding table itself,
# which llama.cpp keeps on the CPU; it is in a layer that n_gpu_layers leaves out; the whole model is on the CPU.
Why = Literal["", "type", "embeddings", "layers", "model"]

# Architectures that have no output matrix: their result is the hidden state.
WITHOUT_OUTPUT = frozenset(
    (
        *("bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3"),
        *("eurobert", "gemma-embedding", "t5encoder"),
    )
)
# Architectures whose output matrix is the embedding table where that is, not a copy on the device.
MULTIPLIES_EMBEDDINGS = frozenset(("bitnet",))


@dataclass(frozen=True)
class Matrix:
    """A weight matrix, or a stack of them for experts.

    Attributes:
        name: of its tensor; of tied embeddings that of the table.
        type: ggml's, lower case.
        bytes: in the file.
        layer: where it belongs; the number of layers for the output and what is beside all layers.
        why: "" if the device multiplies by it when all layers are there, else why not.
    """

    name: str
    type: str
    bytes: int
    layer: int
    why: Why


@dataclass(frozen=True)
class MatrixGroup:
    """Weight matrices of one type that run in one place for one reason.

    Attributes:
        type: ggml's, lower case, such as "q4_k".
        device: "npu" or "cpu".
        matrices: how many.
        bytes: of all of them, in the file.
        why: on the CPU: "type": the device does not multiply by the type; "embeddings": it is the embedding table;
            "layers": in a layer that is not on the device; "model": the whole model is on the CPU. Else "".
    """

    type: str
    device: Literal["npu", "cpu"]
    matrices: int
    bytes: int
    why: Why = ""

    @property
    def packed_bytes(self) -> int:
        """Bytes of all of them in the device's memory: more than in the file of IQ1 to IQ3, Q1_0 and Q2_0."""
        type = TB_TYPE.get(Q[self.type.upper()])
        return self.bytes if type is None or self.device == "cpu" else ggml_ext.packed_bytes(type, self.bytes)


def runs_on_device(t: TensorInfo) -> bool:
    """Tell whether the device multiplies by weights of this type."""
    return t.type in TB_TYPE


def is_output(f: Source, t: TensorInfo) -> bool:
    """Return whether it is an embedding table that is the output matrix too."""
    return t.name == EMBEDDING and OUTPUT not in f.tensors and architecture_of(f) not in WITHOUT_OUTPUT


def is_multiplied(f: Source, t: TensorInfo) -> bool:
    """Return whether MUL_MAT or MUL_MAT_ID reads it. Rows that are matrices by their shape only do not count."""
    if is_looked_up(t.name):
        return is_output(f, t)
    other = "norm" in t.name or any(part in t.name for part in OTHER_OPS)
    return len(t.ne) > 1 and t.name.endswith(".weight") and not other


def matrices_of(f: Source) -> tuple[Matrix, ...]:
    """Return all weight matrices of a file, in its order."""
    architecture = architecture_of(f)
    layers = value_of(model_kv(f), f"{architecture}.block_count")
    n_layer = layers if isinstance(layers, int) else 0
    found = []
    for t in f.tensors.values():
        if is_multiplied(f, t):
            why: Why = "" if runs_on_device(t) else "type"
            if t.name == EMBEDDING and architecture in MULTIPLIES_EMBEDDINGS:
                why = "embeddings"
            found.append(Matrix(t.name, t.type.name.lower(), t.nbytes, layer_of(t.name, n_layer), why))
    return tuple(found)


def grouped(matrices: Iterable[Matrix], *, first_layer: int = 0, on_device: bool = True) -> tuple[MatrixGroup, ...]:
    """Group the matrices by type and place, the most bytes first.

    Args:
        first_layer: layers before this one are on the CPU.
        on_device: False: the whole model is on the CPU.
    """
    groups: dict[tuple[str, Why], tuple[int, int]] = {}
    for m in matrices:
        why = m.why or ("layers" if m.layer < first_layer else "" if on_device else "model")
        count, size = groups.get((m.type, why), (0, 0))
        groups[m.type, why] = count + 1, size + m.bytes
    found = [MatrixGroup(type, "cpu" if why else "npu", n, size, why) for (type, why), (n, size) in groups.items()]
    return tuple(sorted(found, key=lambda g: (-g.bytes, g.type, g.why)))


def device_share(groups: Iterable[MatrixGroup]) -> float:
    """Compute the part of the matrices' bytes that the device multiplies by, 0 to 1; 1 where there is no matrix."""
    groups = tuple(groups)
    whole = sum(g.bytes for g in groups)
    return sum(g.bytes for g in groups if g.device == "npu") / whole if whole else 1.0
