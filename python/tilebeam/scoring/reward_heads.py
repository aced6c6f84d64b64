"""Small networks on top of a hidden state: value heads and classifiers, and the files that hold their weights.

llama.cpp drops such layers when it converts a model (or never had a place for them), so they lie beside the model's
file in a GGUF file of their own, which `tilebeam reward-head` or `tilebeam reward train` wrote.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast, get_args

import numpy as np
import numpy.typing as npt

from tilebeam.errors import TilebeamError, gguf_errors
from tilebeam.model.classifier import read_classifier
from tilebeam.scoring.scoring_defaults import HeadOutput
from tilebeam.text_state import NARROW, Feature
from tilebeam.text_state import width as width_of

Floats = npt.NDArray[np.float32]

ARCHITECTURE = "tilebeam-reward-head"
PREFIX = "reward."
# Of a reward adapter, the head on the hidden state behind a text: float32 [n_embd], and a float32.
ADAPTER_WEIGHTS, ADAPTER_BIAS = PREFIX + "weights", PREFIX + "bias"
_FLOAT32 = 6  # as GGUF numbers types of values
# Where the hidden states of whole texts come from, as files say it: this, or "layer 12".
FINAL = "the final norm"
_LAYER = re.compile(r"layer (\d{1,6})")


@dataclass(frozen=True)
class Head:
    """Linear layers with ReLU between them, then a sigmoid, a softmax over labels, or nothing.

    Attributes:
        layers: (weight [outputs, inputs], bias [outputs]) of each.
        output: what is made of the last layer.
        label: whose probability is the score (softmax).
        preset: the preset that its file names, if any.
        features: of a whole text's hidden states, one after the other; empty: it reads one hidden state.
        layer: the hidden states of texts are those behind this layer, from 0; None: behind the final norm.
        maker: of the model that it was made for, "name" and "shape", as far as its file says.
        adapter: LoRA adapter that the model reads texts with for it; see `tilebeam.scoring.adapter_reward`.
    """

    layers: tuple[tuple[Floats, Floats], ...]
    output: HeadOutput = "sigmoid"
    label: int = 1
    preset: str | None = None
    features: tuple[Feature, ...] = ()
    layer: int | None = None
    maker: Mapping[str, str] = field(default_factory=dict)
    adapter: Path | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise TilebeamError("A reward head needs at least one layer.")
        width = self.n_inputs
        for i, (weight, bias) in enumerate(self.layers):
            if weight.ndim != 2 or bias.shape != weight.shape[:1]:
                raise TilebeamError(
                    f"Layer {i} of the reward head has a weight of shape {weight.shape}, a bias of shape {bias.shape}."
                )
            if weight.shape[1] != width:
                raise TilebeamError(f"Layer {i} of the reward head takes {weight.shape[1]} values but gets {width}.")
            if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
                raise TilebeamError(f"Layer {i} of the reward head holds values that are not numbers.")
            width = weight.shape[0]
        if unknown := [name for name in self.features if name not in get_args(Feature)]:
            raise TilebeamError(f"The reward head reads {unknown[0]!r}, which this version does not know.")
        if self.features and width_of(self.features, self.n_embd) != self.n_inputs:
            raise TilebeamError(
                f"The reward head has {self.n_inputs} inputs, which {', '.join(self.features)} are not."
            )
        if self.output not in get_args(HeadOutput):
            raise TilebeamError(f"A reward head's output is {', '.join(get_args(HeadOutput))}, not {self.output!r}.")
        if self.output == "softmax":
            if width < 2 or not 0 <= self.label < width:
                raise TilebeamError(f"Label {self.label} cannot be read off a softmax over {width} outputs.")
        elif width != 1:
            raise TilebeamError(f"The reward head has {width} outputs; a value head has one, labels need a softmax.")

    @property
    def n_inputs(self) -> int:
        """Values that it takes."""
        return int(self.layers[0][0].shape[-1])

    @property
    def n_embd(self) -> int:
        """Elements of the hidden states that they come from; 0: it reads none."""
        if not self.features:
            return self.n_inputs
        narrow = [NARROW[name] for name in self.features if name in NARROW]
        wide = len(self.features) - len(narrow)
        return (self.n_inputs - sum(narrow)) // wide if wide else 0

    @property
    def reads(self) -> str:
        """Say in words what it reads of a text."""
        return ", ".join(self.features) + (f" behind {place(self.layer)}" if self.layer is not None else "")

    @property
    def shape(self) -> str:
        """As in "1536 -> 1536 -> 2"."""
        return " -> ".join(map(str, [self.n_inputs, *(w.shape[0] for w, _ in self.layers)]))

    def __call__(self, hidden: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
        """Return scores [n] of hidden states, or features, [n, n_inputs]."""
        y = hidden.astype(np.float32)
        for i, (weight, bias) in enumerate(self.layers):
            y = (np.maximum(y, 0) if i else y) @ weight.T + bias
        x = y.astype(np.float64)
        if self.output == "softmax":
            x = np.exp(x - x.max(axis=1, keepdims=True))
            return np.asarray(x[:, self.label] / x.sum(axis=1))
        return sigmoid(x[:, 0]) if self.output == "sigmoid" else x[:, 0]


def place(layer: int | None) -> str:
    """Say in words where hidden states come from."""
    return FINAL if layer is None else f"layer {layer}"


def sigmoid(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return 1 / (1 + exp(-x)) without overflow."""
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1, small) / (1 + small))


def make_head(
    arrays: Sequence[tuple[npt.NDArray[np.floating], npt.NDArray[np.floating] | None]],
    output: str | None = None,
    label: int | None = None,
    preset: str | None = None,
) -> Head:
    """Make a head of layers (weight, bias or None); a weight [n] is a layer with one output. `output` None: a sigmoid
    for one output, a softmax for more."""
    layers = []
    for weight, bias in arrays:
        w = np.atleast_2d(np.asarray(weight, np.float32))
        b = np.zeros(w.shape[:1], np.float32) if bias is None else np.asarray(bias, np.float32).reshape(-1)
        layers.append((w, b))
    wide = bool(layers) and layers[-1][0].shape[0] > 1
    chosen = output or ("softmax" if wide else "sigmoid")
    return Head(tuple(layers), cast(HeadOutput, chosen), 1 if label is None else label, preset)


def load_head(path: str | os.PathLike[str]) -> Head:
    """Read the head in a GGUF file, whose tensors are named 0.weight, 0.bias, 1.weight .., or in the metadata of a
    reward adapter.

    Raises:
        TilebeamError: the file is missing, is no head, or its layers do not fit each other.
    """
    from tilebeam import gguf as gguf_tools
    from tilebeam.gguf.weights import tensor_values

    file = Path(path)
    if not file.is_file():
        raise TilebeamError(f"The reward head {file} does not exist.")
    with gguf_errors(f"{file} is not a reward head"), gguf_tools.GGUFFile(file) as gguf:
        weights, bias = gguf.kv.get(ADAPTER_WEIGHTS), gguf.kv.get(ADAPTER_BIAS)
        if weights is None and gguf.architecture != ARCHITECTURE:
            raise TilebeamError(
                f"{file} holds a model of the architecture {gguf.architecture!r}, not a reward head; "
                "`tilebeam reward-head` writes one."
            )
        if weights is None:
            arrays = {name: tensor_values(gguf, t) for name, t in gguf.tensors.items()}
        elif weights.array is None or weights.array[0] != _FLOAT32 or bias is None or bias.type != _FLOAT32:
            raise TilebeamError(f"{file} is not a reward adapter: {ADAPTER_WEIGHTS} and its bias are not float32.")
        else:
            arrays = {"0.weight": np.array([weights.value]), "0.bias": np.array([bias.value])}
        facts = {k.removeprefix(PREFIX): v.value for k, v in gguf.kv.items() if k.startswith(PREFIX)}
    kinds = dict.fromkeys(("output", "preset", "features", "layer", "model.name", "model.shape"), str) | {"label": int}
    if wrong := [key for key, kind in kinds.items() if not isinstance(facts.get(key, kind()), kind)]:
        raise TilebeamError(f"{file} is not a reward head: {PREFIX}{wrong[0]} is {facts[wrong[0]]!r}.")
    head = make_head(_in_order(arrays, file), facts.get("output"), facts.get("label"), facts.get("preset"))
    where = facts.get("layer", FINAL)
    behind = _LAYER.fullmatch(where)
    if not behind and where != FINAL:
        raise TilebeamError(f"{file} reads hidden states of {where}, which this version does not know.")
    features = cast(tuple[Feature, ...], tuple(filter(None, facts.get("features", "").split(","))))
    maker = {name: facts[f"model.{name}"] for name in ("name", "shape") if facts.get(f"model.{name}")}
    layer, adapter = int(behind[1]) if behind else None, None if weights is None else file
    return replace(head, features=features, layer=layer, maker=maker, adapter=adapter)


def _in_order(arrays: Mapping[str, Floats], where: Path) -> list[tuple[Floats, Floats | None]]:
    layers: list[tuple[Floats, Floats | None]] = []
    left = dict(arrays)
    while (weight := left.pop(f"{len(layers)}.weight", None)) is not None:
        layers.append((weight, left.pop(f"{len(layers)}.bias", None)))
    if left or not layers:
        names = ", ".join(sorted(arrays)) or "nothing"
        raise TilebeamError(f"{where} holds {names[:200]}; a reward head is 0.weight, 0.bias, 1.weight and so on.")
    return layers


def save_head(path: str | os.PathLike[str], head: Head) -> None:
    """Write a head as .gguf; the file appears when it is complete."""
    from tilebeam.gguf.gguf_write import small_gguf

    with small_gguf(path, ARCHITECTURE) as writer:
        writer.add_string(PREFIX + "output", head.output)
        writer.add_uint32(PREFIX + "label", head.label)
        if head.preset:
            writer.add_string(PREFIX + "preset", head.preset)
        if head.features:
            writer.add_string(PREFIX + "features", ",".join(head.features))
            writer.add_string(PREFIX + "layer", place(head.layer))
        for name, value in head.maker.items():
            writer.add_string(f"{PREFIX}model.{name}", value)
        for i, (weight, bias) in enumerate(head.layers):
            writer.add_tensor(f"{i}.weight", np.ascontiguousarray(weight, np.float32))
            writer.add_tensor(f"{i}.bias", np.ascontiguousarray(bias, np.float32))


def classifier_of(path: str | os.PathLike[str]) -> Head:
    """Read the classifier in a model's own file (cls.output, as for `llama-server --rerank`).

    llama.cpp applies it to a sequence's last token only (pooling RANK); as a head it can be read at every step. Of
    several labels the first counts, as in llama-server. A classifier with a hidden layer of its own (cls) belongs to
    encoder models, which Tilebeam does not run.

    Raises:
        TilebeamError: there is none.
    """
    return make_head([read_classifier(path)], label=0)
