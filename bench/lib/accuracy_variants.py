"""What bench/accuracy.py compares: files made of one source, the ways to run them, and the base of each group."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as C
from tilebeam import gguf as gguf_tools
from tilebeam.gguf.byte_bar import byte_bars
from tilebeam.gguf.policy import Policy
from tilebeam.measure.moments import calibration_of, collect_moments
from tilebeam.measure.perplexity import windows_of
from tilebeam.model.load_options import default_threads
from tilebeam.model.loader import load
from tilebeam.native.llama import errors_in, log_router
from tilebeam.text_files import read_corpus

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

# Ways to 4 bits, a text to calibrate on given.
_NEAREST = cpu("Q4_0, nearest", "q4_0-column-plain")
_SEARCH = cpu("Q4_0 --search", "q4_0-search")
_IMATRIX = cpu("Q4_0 --imatrix", "q4_0-imatrix")
_CALIBRATE = cpu("Q4_0 --calibrate", "q4_0-calibrate")
_NL_CALIBRATE = cpu("IQ4_NL --calibrate", "iq4_nl-calibrate")
_TILE_CALIBRATE = Variant("Q4_0 tile --calibrate, int8", "q4_0-tile-calibrate")
_Q4_K = cpu("Q4_K_S of llama.cpp's quantizer", "q4_k_s")

FOUR_BITS = Comparison(
    "dequantized",
    (
        Group(
            "Against the unquantized source",
            SOURCE,
            (_NEAREST, _SEARCH, _IMATRIX, _CALIBRATE, _NL_CALIBRATE, TILE, _TILE_CALIBRATE, _Q4_K),
        ),
    ),
    (
        Pair("calibrated against nearest", _CALIBRATE, _NEAREST),
        Pair("calibrated against an importance matrix of the same text", _CALIBRATE, _IMATRIX),
        Pair("calibrated against nearest, tile groups", _TILE_CALIBRATE, TILE),
        Pair("calibrated against Q4_K_S", _CALIBRATE, _Q4_K),
    ),
)
CALIBRATION_TEXT = "calibration.txt"  # beside the models


# --- files ------------------------------------------------------------------------------------------------------------


def packing(**options: Any) -> Callable[[Path, Path], object]:
    """Return a way to make a packed file. Embeddings keep the source's type, as does the tied output matrix."""
    search = bool(options.pop("search", False))
    policy = Policy.make(output_weight="runtime", **options)
    return lambda source, target: gguf_tools.pack(source, target, policy=policy, search=search)


def unpacked(make: Callable[[Path, Path], object]) -> Callable[[Path, Path], object]:
    """Return a way to make an ordinary file of one that makes tiles."""

    def made(source: Path, target: Path) -> object:
        tiles = target.with_suffix(".tiles")
        make(source, tiles)
        gguf_tools.unpack(tiles, target)
        tiles.unlink()
        return target

    return made


def calibrated(**options: Any) -> Callable[[Path, Path], object]:
    """Return a way to quantize a file with the text beside it; a run that was stopped is resumed."""
    policy = Policy.make(output_weight="runtime", **options)

    def made(source: Path, target: Path) -> object:
        text = read_corpus(target.parent / CALIBRATION_TEXT)
        threads = default_threads()
        with byte_bars() as show:
            calibration = calibration_of(
                source, text, ctx_size=512, chunks=64, threads=threads, memory=1 << 30, show=show
            )
            return gguf_tools.pack(source, target, policy=policy, calibration=calibration)

    return made


def weighted(source: Path, target: Path) -> object:
    """Q4_0 with the importance matrix of the same text."""
    with gguf_tools.GGUFFile(source) as f:
        names = [t.name for t in f.tensors.values() if t.name.startswith("blk.") and t.rows > 1]
    with load(source, device="cpu", n_ctx=256, n_seq_max=1) as lm:
        windows = windows_of(lm, read_corpus(target.parent / CALIBRATION_TEXT), 512, 64)
        moments = collect_moments(lm, windows, names, threads=default_threads())
    # An importance matrix is the diagonal of the second moments, per token.
    importance = {name: h.diagonal() / windows.tokens.size for name, h in moments.items()}
    policy = Policy.make(type="q4_0", output_weight="runtime")
    return gguf_tools.pack(source, target, policy=policy, importance=importance, overwrite=True)


def k_quantized(source: Path, target: Path) -> object:
    """Q4_K_S by llama.cpp; rows that are not whole blocks of 256 get the types that it falls back to."""
    options = C.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize = C.LLAMA_FTYPE_MOSTLY_Q4_K_S, True
    with gguf_tools.GGUFFile(source) as f:
        options.token_embedding_type = f.tensors["token_embd.weight"].type
        if "output.weight" in f.tensors:
            options.output_tensor_type = f.tensors["output.weight"].type
    with log_router().capture() as lines:
        if C.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(options)) != 0:
            raise RuntimeError(f"llama.cpp cannot quantize {source}: {errors_in(lines)}")
    return target


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
    "q4_0-search": ("source", unpacked(packing(type="q4_0", search=True))),
    "q4_0-imatrix": ("source", unpacked(weighted)),
    "q4_0-calibrate": ("source", unpacked(calibrated(type="q4_0"))),
    "iq4_nl-calibrate": ("source", unpacked(calibrated(type="iq4_nl"))),
    "q4_0-tile-calibrate": ("source", calibrated(type="q4_0", grouping="tile")),
    "q4_k_s": ("source", k_quantized),
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
