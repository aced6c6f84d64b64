"""What bench/accuracy.py compares: files made of one source, the ways to run them, and the base of each group."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilebeam import gguf as gguf_tools
from tilebeam.gguf.policy import Policy

from bench.lib.float32 import in_float32

# Tokens per batch: many models are loaded at a time, and each has room for a batch's logits twice.
BATCH = 128


@dataclass(frozen=True)
class Variant:
    """A file and how it is run."""

    name: str
    file: str
    device: str = "npu"
    numerics: str = "int8"
    softmax: str = "table"
    kv: str = "f16"
    n_ubatch: int = BATCH

    @property
    def label(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in self.name)


def cpu(name: str, file: str, n_ubatch: int = BATCH) -> Variant:
    return Variant(name, file, device="cpu", n_ubatch=n_ubatch)


SOURCE = cpu("source, float32", "source-f32")
STOCK = cpu("Q4_0 column, stock CPU", "q4_0-column-plain")
SAME_WEIGHTS = cpu("Q4_0 column dequantized, stock CPU in float32", "q4_0-column-f32")
COLUMN = Variant("Q4_0 column, int8", "q4_0-column")
COLUMN_FP16 = Variant("Q4_0 column, fp16", "q4_0-column", numerics="fp16")
COLUMN_EXACT = replace(COLUMN, name="Q4_0 column, int8, float32 exp", softmax="exact")
COLUMN_FP16_EXACT = replace(COLUMN_FP16, name="Q4_0 column, fp16, attention in float32", softmax="exact")
COLUMN_KV8 = replace(COLUMN, name="Q4_0 column, int8, KV Q8_0", kv="q8_0")
COLUMN_KV4 = replace(COLUMN, name="Q4_0 column, int8, KV Q4_0", kv="q4_0")
COLUMN_FP16_KV8 = replace(COLUMN_FP16, name="Q4_0 column, fp16, KV Q8_0", kv="q8_0")
TILE = Variant("Q4_0 tile, int8", "q4_0-tile")
TILE_FP16 = replace(TILE, name="Q4_0 tile, fp16", numerics="fp16")
COLUMN_SEARCH = Variant("Q4_0 column --search, int8", "q4_0-column-search")
TILE_SEARCH = Variant("Q4_0 tile --search, int8", "q4_0-tile-search")
PAPER = Variant("paper preset (tile), int8", "paper-tile")
PAPER_COLUMN = Variant("paper preset, column groups, int8", "paper-column")
Q8 = Variant("Q8_0 column, int8", "q8_0-column")
NL = Variant("IQ4_NL column, int8", "iq4_nl-column")


@dataclass(frozen=True)
class Group:
    """Variants measured against one base. `most`: windows at most, where a few give small errors."""

    title: str
    base: Variant
    variants: tuple[Variant, ...]
    most: int | None = None


@dataclass(frozen=True)
class Pair:
    """Two variants whose perplexities are compared token by token."""

    question: str
    one: Variant
    other: Variant


@dataclass(frozen=True)
class Comparison:
    """Groups and pairs of one report. Pairs have the last group's base."""

    about: str
    groups: tuple[Group, ...]
    pairs: tuple[Pair, ...]


_LAYOUT_GROUPS = (
    Group(
        "Against the stock CPU backend on the same Q4_0 weights",
        STOCK,
        (COLUMN, COLUMN_EXACT, COLUMN_FP16, cpu("Q4_0 column, stock CPU, other batch size", STOCK.file, 27)),
        most=16,
    ),
    Group(
        "Against the same Q4_0 weights without any rounding of activations",
        SAME_WEIGHTS,
        (
            STOCK,
            COLUMN,
            COLUMN_EXACT,
            COLUMN_KV8,
            COLUMN_KV4,
            COLUMN_FP16,
            COLUMN_FP16_EXACT,
            COLUMN_FP16_KV8,
        ),
        most=16,
    ),
    Group(
        "Against the unquantized source, other types and devices",
        SOURCE,
        (STOCK, COLUMN, COLUMN_EXACT, COLUMN_KV8, COLUMN_KV4, TILE, TILE_FP16, PAPER, PAPER_COLUMN, NL, Q8),
        most=32,
    ),
    Group(
        "Against the unquantized source",
        SOURCE,
        (COLUMN, TILE, COLUMN_SEARCH, TILE_SEARCH, COLUMN_FP16, COLUMN_FP16_EXACT, COLUMN_FP16_KV8),
    ),
)


_LAYOUT_PAIRS = (
    Pair("tile against common groups (the paper's table 4)", TILE, COLUMN),
    Pair("the same with FP16 operands", TILE_FP16, COLUMN_FP16),
    Pair("the same with the paper's policy (down projections in Q8_0)", PAPER, PAPER_COLUMN),
    Pair("attention in FP16 with the table against float32 (the paper's table 5)", COLUMN_FP16, COLUMN_FP16_EXACT),
    Pair("8-bit activations: attention with the table against float32", COLUMN, COLUMN_EXACT),
    Pair("searched against nearest scales, column", COLUMN_SEARCH, COLUMN),
    Pair("searched against nearest scales, tile", TILE_SEARCH, TILE),
    Pair("searched tile against plain common groups", TILE_SEARCH, COLUMN),
    Pair("8-bit activations against FP16 operands", COLUMN, COLUMN_FP16),
    Pair("8-bit activations: the NPU against the stock CPU backend", COLUMN, STOCK),
    Pair("KV cache Q8_0 against F16", COLUMN_FP16_KV8, COLUMN_FP16),
    Pair("the same with 8-bit activations", COLUMN_KV8, COLUMN),
    Pair("KV cache Q4_0 against F16, 8-bit activations", COLUMN_KV4, COLUMN),
    Pair("IQ4_NL against Q4_0, column", NL, COLUMN),
)


LAYOUTS = Comparison("dequantized", _LAYOUT_GROUPS, _LAYOUT_PAIRS)

# A file in its own types, as people have it: what its own arithmetic costs on either device.
_SAME_FILE = cpu("stock CPU", "source")
_SAME_FILE_NPU = Variant("NPU, int8", "source")
_SAME_FILE_KV8 = replace(_SAME_FILE_NPU, name="NPU, int8, KV Q8_0", kv="q8_0")
_SAME_FILE_KV4 = replace(_SAME_FILE_NPU, name="NPU, int8, KV Q4_0", kv="q4_0")
_SAME_WEIGHTS_F32 = cpu("the same weights in float32", "source-f32")

AS_IS = Comparison(
    "in its own types, and dequantized as the base",
    (
        Group("Against the stock CPU backend", _SAME_FILE, (_SAME_FILE_NPU,)),
        Group(
            "Against the same weights without any rounding of activations",
            _SAME_WEIGHTS_F32,
            (_SAME_FILE, _SAME_FILE_NPU, _SAME_FILE_KV8, _SAME_FILE_KV4),
        ),
    ),
    (
        Pair("the NPU against the stock CPU backend", _SAME_FILE_NPU, _SAME_FILE),
        Pair("KV cache Q8_0 against F16", _SAME_FILE_KV8, _SAME_FILE_NPU),
        Pair("KV cache Q4_0 against F16", _SAME_FILE_KV4, _SAME_FILE_NPU),
    ),
)


# --- files ------------------------------------------------------------------------------------------------------------


def packing(**options: Any) -> Callable[[Path, Path], object]:
    """Return a way to make a packed file. Embeddings keep the source's type, as does the tied output matrix."""
    search = bool(options.pop("search", False))
    policy = Policy.make(**options)
    return lambda source, target: gguf_tools.pack(source, target, policy=policy, search=search)


MAKE: dict[str, tuple[str, Callable[[Path, Path], object]]] = {
    "source-f32": ("source", in_float32),
    "q4_0-column": ("source", packing(type="q4_0", grouping="column")),
    "q4_0-column-plain": ("q4_0-column", gguf_tools.unpack),
    "q4_0-column-f32": ("q4_0-column-plain", in_float32),
    "q4_0-tile": ("source", packing(type="q4_0", grouping="tile")),
    "q4_0-column-search": ("source", packing(type="q4_0", grouping="column", search=True)),
    "q4_0-tile-search": ("source", packing(type="q4_0", grouping="tile", search=True)),
    "paper-tile": ("source", packing(preset="paper")),
    "paper-column": ("source", packing(preset="paper", grouping="column")),
    "q8_0-column": ("source", packing(type="q8_0", grouping="column")),
    "iq4_nl-column": ("source", packing(type="iq4_nl", grouping="column")),
}


def model_file(name: str, folder: Path, source: Path) -> Path:
    if name == "source":
        return source
    path = folder / f"{name}.gguf"
    if not path.exists():
        made_from, make = MAKE[name]
        print(f"making {path.name} ..", file=sys.stderr)
        make(model_file(made_from, folder, source), path)
    return path
