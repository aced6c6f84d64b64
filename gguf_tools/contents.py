"""The manifest of a repacked file: metadata keys ``tilebeam.*``, checked against the tensors beside them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilebeam import _ext as ggml_ext
from tilebeam._ext import LAYOUT_VERSION, TILE, Type

from .errors import GGUFError
from .gguf_file import UINT32, GGUFFile, KeyValue, TensorInfo, is_alignment, value_of
from .gguf_write import tensor_header
from .split import Source, open_gguf
from .weights import GGML_TYPE

ARCHITECTURE = "tilebeam"  # general.architecture of a repacked file: no stock runtime knows it
PREFIX = "tilebeam."
K_ARCHITECTURE = PREFIX + "architecture"
K_LAYERS = PREFIX + "block_count"  # the source's ARCH.block_count, moved here, if it has one
K_LAYOUT = PREFIX + "layout_version"
K_TOOL = PREFIX + "tool_version"
K_ALIGNMENT = PREFIX + "source_alignment"
K_LOSSLESS = PREFIX + "lossless"
K_CONTENTS = PREFIX + "same_contents"
K_NAMES = PREFIX + "tensors.names"
K_TYPES = PREFIX + "tensors.types"
K_SOURCE = PREFIX + "source_sha256"
K_DATA = PREFIX + "data_sha256"
K_TENSORS = PREFIX + "tensors.sha256"
K_META = PREFIX + "meta_sha256"
K_VERSION = PREFIX + "gguf_version"  # the header's, which no digest covers
K_PLAIN = PREFIX + "tensors.plain"
K_ADDED = PREFIX + "tensors.added"  # of files of earlier versions, which load, but are not unpacked
K_SCALES = PREFIX + "scales"
SCALES = ("nearest", "search", "calibrate")
MIN_ALIGNMENT = 128


@dataclass(frozen=True)
class TiledTensor:
    """A tensor stored as tiles: ``ne`` as ggml counts, ``offset`` absolute in the file, bytes.

    ``plain``: its digest is that of the plain blocks it unpacks to, the source's own; else that of the tiles.
    """

    name: str
    type: Type
    ne: tuple[int, ...]
    offset: int
    nbytes: int
    plain: bool = False


@dataclass(frozen=True)
class Manifest:
    """The contents of a repacked file.

    Digests are SHA-256, hexadecimal. ``source_sha256`` covers the source's metadata, tensor headers and data
    (:func:`content_digest`). ``tensor_sha256`` has one for each tensor of the file: of the plain blocks that a tensor
    packed bit for bit stands for, so that one digest proves both files, and of the stored bytes of any other.
    ``data_sha256`` covers those, ``meta_sha256`` all metadata and tensor headers.

    ``lossless``: unpacking gives the source's very bytes. ``same_contents``: it gives the source's metadata and
    tensors bit for bit, though perhaps not its padding. ``scales``: how quantized tensors got theirs: "nearest"
    (round to nearest), "search" (for the smallest error), or "calibrate" (by what comes into a matrix, which files
    written before have). ``layers``: the model's, None where the file has their number under its ordinary key
    (:func:`layers_key`).
    """

    path: Path
    architecture: str
    layout_version: int
    tool_version: str
    source_alignment: int
    lossless: bool
    same_contents: bool
    source_sha256: str
    data_sha256: str
    meta_sha256: str
    tensor_sha256: dict[str, str]
    tensors: tuple[TiledTensor, ...]
    scales: str
    layers: int | None


def fidelity(lossless: bool, same_contents: bool) -> str:
    """Say in words what a packing keeps of its source."""
    return "lossless" if lossless else "same contents" if same_contents else "not lossless"


def is_repacked(path: str | os.PathLike[str]) -> bool:
    """Return whether this GGUF is in Tilebeam's layout. Of a split model any part may be named. Raises GGUFError if it
    is no sound GGUF, OSError if it cannot be read."""
    with open_gguf(path) as f:
        return f.architecture == ARCHITECTURE


def manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of a repacked file. Metadata and tensor headers are checked, the bytes of tensors are not
    (:func:`tilebeam.gguf.verify`).

    Raises:
        GGUFError: the file is damaged, truncated, not repacked, or of another layout version.
        OSError: it cannot be read.
    """
    with GGUFFile(path) as f:
        return read_manifest(f)


def read_manifest(f: GGUFFile) -> Manifest:
    """Read the :func:`manifest` of an open file."""
    if f.architecture != ARCHITECTURE:
        raise GGUFError(f"{f.path} is an ordinary GGUF ({f.architecture}), not a repacked one")
    version = f.number(K_LAYOUT)
    if not 1 <= version <= LAYOUT_VERSION:
        raise GGUFError(
            f"{f.path} has tile layout version {version}, this Tilebeam reads 1 to {LAYOUT_VERSION}: "
            "pack its source again"
        )
    if f.alignment < MIN_ALIGNMENT:
        raise GGUFError(f"{f.path}: its alignment is {f.alignment}, a repacked file has at least {MIN_ALIGNMENT}")
    if f.number(K_VERSION) != f.version:
        raise GGUFError(f"{f.path} is damaged: its GGUF version is {f.version}, {f.number(K_VERSION)} was written")
    names, types, sums = (_array(f, key, kind) for key, kind in ((K_NAMES, str), (K_TYPES, int), (K_TENSORS, str)))
    plain = _array(f, K_PLAIN, int)
    scales = f.text(K_SCALES)
    if scales not in SCALES:
        raise GGUFError(f"{f.path} has scales by {scales!r}, which this Tilebeam does not know: pack its source again")
    fits = len({*names}) == len(names) == len(types) == len(plain) and len(sums) == len(f.tensors)
    if not names or not fits or not {*plain} <= {0, 1}:
        raise GGUFError(f"{f.path}: its list of tiled tensors is damaged")
    digests = {key: f.text(key) for key in (K_SOURCE, K_DATA, K_META)}
    if any(len(d) != 64 for d in (*digests.values(), *sums)):
        raise GGUFError(f"{f.path}: a digest in the metadata is damaged")
    alignment = f.number(K_ALIGNMENT)
    if alignment and not is_alignment(alignment):
        raise GGUFError(f"{f.path}: {K_ALIGNMENT} is {alignment}, which no file has")
    records = (kv.raw for key, kv in f.kv.items() if key != K_META)
    if meta_digest(records, f.tensors.values()) != digests[K_META]:
        raise GGUFError(f"{f.path} is damaged: its metadata is not what was written")
    return Manifest(
        path=f.path,
        architecture=f.name(K_ARCHITECTURE),
        layout_version=version,
        tool_version=f.text(K_TOOL),
        source_alignment=alignment,
        lossless=f.truth(K_LOSSLESS),
        same_contents=f.truth(K_CONTENTS),
        source_sha256=digests[K_SOURCE],
        data_sha256=digests[K_DATA],
        meta_sha256=digests[K_META],
        tensor_sha256=dict(zip(f.tensors, sums, strict=True)),
        tensors=tuple(_tiled(f, *entry) for entry in zip(names, types, plain, strict=True)),
        scales=scales,
        layers=f.number(K_LAYERS) if K_LAYERS in f.kv else None,
    )


def architecture_of(f: Source) -> str:
    """Return the model's real architecture, also of a repacked file. Raises GGUFError if it is missing or no name."""
    moved = value_of(f.kv, K_ARCHITECTURE)
    return f.architecture if moved is None else str(moved)


def layers_key(architecture: str) -> str:
    """Return the key of the number of layers, which every model of llama.cpp has.

    A repacked file has it under another name (``K_LAYERS``), so that llama.cpp refuses the file until it is told the
    number as well as the architecture. Somebody who overrides the architecture alone, and so has tiles read as ggml's
    blocks, gets an error instead of nonsense.
    """
    return f"{architecture}.block_count"


def moved_layers(f: Source) -> bool:
    """Return whether the number of layers of an ordinary file can be moved."""
    kv = f.kv.get(layers_key(f.architecture))
    return kv is not None and kv.type == UINT32


def model_kv(f: Source) -> dict[str, KeyValue]:
    """Return the metadata of a model under the keys that llama.cpp knows, whether it is repacked or not."""
    architecture, layers = f.kv.get(K_ARCHITECTURE), f.kv.get(K_LAYERS)
    if architecture is None or layers is None:
        return f.kv
    return {**f.kv, layers_key(str(architecture.value)): layers}


def _array(f: GGUFFile, key: str, kind: type) -> list[Any]:
    kv = f.kv.get(key)
    array = kv.array if kv is not None else None
    value = kv.value if kv is not None and array is not None and array[1] <= len(f.tensors) else None
    if not isinstance(value, list) or not all(type(v) is kind for v in value):
        raise GGUFError(f"{f.path}: the metadata has no list {key!r}")
    return value


def _tiled(f: GGUFFile, name: str, number: int, plain: int) -> TiledTensor:
    t = f.tensors.get(name)
    if t is None:
        raise GGUFError(f"{f.path}: the tiled tensor {name!r} is not in the file")
    try:
        type = Type(number)
        ggml = GGML_TYPE[ggml_ext.source_type(type)]
    except (ValueError, KeyError):
        raise GGUFError(f"{f.path}: tensor {name!r} has the unknown tiled type {number}") from None
    fits = ggml == t.type and len(t.ne) in (2, 3) and t.ne[0] % TILE == 0 and t.ne[1] % TILE == 0
    if not fits or not ggml_ext.has_file_form(type):
        raise GGUFError(f"{f.path}: tensor {name!r} ({t.type.name} {list(t.ne)}) cannot hold {type.label} tiles")
    if plain and type != ggml_ext.column_type(ggml_ext.source_type(type)):
        raise GGUFError(f"{f.path}: tensor {name!r} is {type.label}, which does not unpack to a digest")
    return TiledTensor(name, type, t.ne, t.offset, t.nbytes, bool(plain))


def content_digest(kv: Iterable[bytes], tensors: Iterable[TensorInfo], digests: Iterable[bytes]) -> str:
    """Digest a GGUF's contents whatever its padding: metadata records, then each tensor's header and data digest."""
    h = hashlib.sha256(b"".join(kv))
    for t, d in zip(tensors, digests, strict=True):
        h.update(tensor_header(t.name, t.type, t.ne, 0) + d)
    return h.hexdigest()


def data_digest(digests: Iterable[bytes]) -> str:
    """Return the digest of all tensors' digests."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def meta_digest(kv: Iterable[bytes], tensors: Iterable[TensorInfo]) -> str:
    """Digest a repacked file's metadata records (but this digest's own) and tensor headers."""
    h = hashlib.sha256(b"".join(kv))
    for t in tensors:
        h.update(tensor_header(t.name, t.type, t.ne, t.offset))
    return h.hexdigest()
