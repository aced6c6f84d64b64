"""Packs an ordinary GGUF into the tile layout and unpacks it again; holds a few pieces of a tensor at a time."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import gguf

import ggml_ext
from ggml_ext import LAYOUT_VERSION, Type

from . import contents as m
from . import gguf_write as w
from .errors import GGUFError
from .gguf_file import DEFAULT_ALIGNMENT, GGUFFile, Q, TensorInfo, tensor_bytes
from .stream import Digests, Job, Progress, run, write_at
from .weights import (
    FLOAT_TYPES,
    TB_TYPE,
    fits_tiles,
    has_values,
    is_weight,
    make_rows,
    tiled_type,
    unpack_rows,
)

GROUPS = ("column", "tile")
PACK_TYPES = {"keep": None, "q4_0": Q.Q4_0, "q8_0": Q.Q8_0}
FILE_TYPE = {Q.F32: 0, Q.F16: 1, Q.Q4_0: 2, Q.Q8_0: 7}  # general.file_type
K_FILE_TYPE = "general.file_type"
ZERO = "0" * 64
NOT_MODELS = ("adapter", "mmproj", "imatrix")  # general.type of files that llama_model_load does not take


@dataclass(frozen=True)
class Report:
    """What became of a file: sizes in bytes; ``notes`` are sentences the user should read."""

    path: Path
    size: int
    n_tensors: int
    n_tiled: int
    n_requantized: int
    tiled_bytes: int
    lossless: bool
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Target:
    """What a tensor becomes: ggml type, and tiled type if it is stored as tiles."""

    source: TensorInfo
    type: gguf.GGMLQuantizationType
    tiled: Type | None

    @property
    def lossless(self) -> bool:
        """Can the source's bytes be had back?"""
        t = self.source.type
        return self.type == t and (self.tiled is None or self.tiled == ggml_ext.column_type(TB_TYPE[t]))

    @property
    def job(self) -> Job:
        if self.tiled is None and self.type == self.source.type:
            return Job(self.source)

        def make(data: ggml_ext.Bytes, k: int, rows: int) -> ggml_ext.Bytes:
            return make_rows(self.source.type, data, k, rows, self.type, self.tiled)

        return Job(self.source, make)


def tool_version() -> str:
    """Version of the installed distribution; "0" in a source tree."""
    try:
        return "tilebeam " + version("tilebeam")
    except PackageNotFoundError:
        return "tilebeam 0"


def require_ordinary(f: GGUFFile) -> None:
    """Raises GGUFError if the file is repacked already, or one part of several."""
    if f.architecture == m.ARCHITECTURE or any(key.startswith(m.PREFIX) for key in f.kv):
        raise GGUFError(f"{f.path} is repacked already; unpack it first")
    if "split.count" in f.kv and f.kv["split.count"].value not in (0, 1):
        raise GGUFError(f"{f.path} is one part of a split model; merge the parts first (llama-gguf-split --merge)")
    if not f.tensors:
        raise GGUFError(f"{f.path} has no tensors")


def plan(f: GGUFFile, group: str, type: str) -> list[Target]:
    """What each tensor becomes, in the file's order."""
    wanted = PACK_TYPES[type]
    targets = []
    for t in f.tensors.values():
        to = t.type
        if wanted is not None and is_weight(t) and has_values(t.type):
            to = wanted
        tiled = tiled_type(to, group) if fits_tiles(t) else None
        targets.append(Target(t, to if tiled is not None else t.type, tiled))
    return targets


def _count(types: Counter[str]) -> str:
    return ", ".join(f"{n} {name}" for name, n in sorted(types.items()))


def _notes(targets: list[Target], group: str) -> list[str]:
    notes = []
    again = Counter(t.source.type.name for t in targets if t.type != t.source.type and t.source.type not in FLOAT_TYPES)
    regrouped = Counter(t.type.name for t in targets if t.type == t.source.type and not t.lossless)
    column = sum(t.tiled == Type.IQ4_NL_COL for t in targets) if group == "tile" else 0
    left = [t.source for t in targets if t.tiled is None and is_weight(t.source)]
    plain = Counter(t.type.name for t in left if t.type not in FLOAT_TYPES)
    if again:
        notes.append(
            f"Quantized before, and now quantized again: {_count(again)}. This loses some accuracy, and unpacking does "
            "not bring it back."
        )
    if regrouped:
        notes.append(
            f"Dequantized, and quantized again with one scale per 2 x 16 block: {_count(regrouped)}. This loses some "
            "accuracy, and unpacking does not bring it back."
        )
    if column:
        notes.append(f"IQ4_NL has no tile grouping; its tensors ({column}) keep column grouping.")
    if plain:
        notes.append(f"Not tiled (embedding tables, experts, other types or shapes): {_count(plain)}.")
    return notes


def pack(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    group: str = "column",
    type: str = "keep",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Write ``src``, an ordinary GGUF, to ``dst`` in the tile layout.

    Args:
        group: "column" (ggml's own grouping, lossless) or "tile" (one scale per 2 x 16 block; quantizes again).
        type: "keep", or "q4_0" / "q8_0" to quantize the weight matrices first.
        threads: worker threads; one per CPU if None.
        progress: called with (bytes read, bytes in all).

    Raises:
        GGUFError: the source is damaged, repacked already, or has nothing to tile.
        OSError: reading or writing failed. In either case ``dst`` is as it was.
    """
    if group not in GROUPS or type not in PACK_TYPES:
        raise ValueError(f"group is one of {GROUPS}, type one of {tuple(PACK_TYPES)}")
    dst = Path(dst)
    with GGUFFile(src) as f:
        require_ordinary(f)
        if "general.type" in f.kv and f.kv["general.type"].value in NOT_MODELS:
            raise GGUFError(f"{f.path} is no model (general.type is {f.kv['general.type'].value!r})")
        targets = plan(f, group, type)
        tiled = [t for t in targets if t.tiled is not None]
        if not tiled:
            types = _count(Counter(t.type.name for t in f.tensors.values() if is_weight(t)))
            raise GGUFError(f"{f.path} has no Q4_0, Q8_0 or IQ4_NL matrix to tile ({types}); try --type q8_0 or q4_0")
        lossless = all(t.lossless for t in targets)
        requantized = sum(t.type != t.source.type for t in targets)
        alignment = max(m.MIN_ALIGNMENT, f.alignment)
        kv = _packed_kv(f, alignment, PACK_TYPES[type] if requantized else None)
        own = [
            w.kv_text(m.K_ARCHITECTURE, f.architecture),
            w.kv_u32(m.K_LAYOUT, LAYOUT_VERSION),
            w.kv_text(m.K_TOOL, tool_version()),
            w.kv_u32(m.K_ALIGNMENT, f.alignment if "general.alignment" in f.kv else 0),
            w.kv_bool(m.K_LOSSLESS, lossless),
            w.kv_texts(m.K_NAMES, [t.source.name for t in tiled]),
            w.kv_u32s(m.K_TYPES, [int(t.tiled) for t in tiled if t.tiled is not None]),
        ]
        names = [(t.source.name, t.type, t.source.ne) for t in targets]

        def head(d: Digests | None) -> tuple[bytes, list[int], int]:
            """The header; digests that are not known yet are zeros of the same length."""
            sums = [x.hex() for x in d.output] if d else [ZERO] * len(targets)
            content = m.content_digest((x.raw for x in f.kv.values()), f.tensors.values(), d.source) if d else ZERO
            records = [
                *kv,
                *own,
                w.kv_text(m.K_SOURCE, content),
                w.kv_text(m.K_DATA, m.data_digest(d.output) if d else ZERO),
                w.kv_texts(m.K_TENSORS, sums),
            ]
            blank, offsets, size = w.header(f.version, [*records, w.kv_text(m.K_META, ZERO)], names, alignment)
            if d is None:
                return blank, offsets, size
            infos = [replace(t.source, type=t.type, offset=o) for t, o in zip(targets, offsets, strict=True)]
            records.append(w.kv_text(m.K_META, m.meta_digest(records, infos)))
            return w.header(f.version, records, names, alignment)

        blank, offsets, size = head(None)
        with w.complete_file(dst, size, sources=[f.path]) as out:
            out.write(blank)
            digests = run(f, [t.job for t in targets], write_at(out, offsets), threads=threads, progress=progress)
            out.seek(0)
            out.write(head(digests)[0])
    return Report(
        path=dst,
        size=size,
        n_tensors=len(targets),
        n_tiled=len(tiled),
        n_requantized=requantized,
        tiled_bytes=sum(tensor_bytes(t.type, t.source.ne) for t in tiled),
        lossless=lossless,
        notes=tuple(_notes(targets, group)),
    )


def _packed_kv(f: GGUFFile, alignment: int, file_type: gguf.GGMLQuantizationType | None) -> list[bytes]:
    """The source's records with another architecture and alignment, in the same order."""
    changed = {
        "general.architecture": w.kv_text("general.architecture", m.ARCHITECTURE),
        "general.alignment": w.kv_u32("general.alignment", alignment),
    }
    if file_type is not None:
        changed[K_FILE_TYPE] = w.kv_u32(K_FILE_TYPE, FILE_TYPE[file_type])
    return replaced(f, changed)


def replaced(f: GGUFFile, changed: dict[str, bytes]) -> list[bytes]:
    """A file's records with some replaced in place, or appended where the key is new."""
    records = [changed.get(key, kv.raw) for key, kv in f.kv.items()]
    return records + [record for key, record in changed.items() if key not in f.kv]


def unpacked_kv(f: GGUFFile, manifest: m.Manifest) -> list[bytes]:
    """The records of a repacked file's source."""
    changed = {"general.architecture": w.kv_text("general.architecture", manifest.architecture)}
    if manifest.source_alignment:
        changed["general.alignment"] = w.kv_u32("general.alignment", manifest.source_alignment)
    records = []
    for key, kv in f.kv.items():
        ours = key.startswith(m.PREFIX) or (key == "general.alignment" and not manifest.source_alignment)
        if not ours:
            records.append(changed.get(key, kv.raw))
    return records


def unpack_jobs(f: GGUFFile, manifest: m.Manifest) -> list[Job]:
    """What each tensor of a repacked file becomes when it is unpacked."""
    tiled = {t.name: t.type for t in manifest.tensors}
    return [Job(t, partial(unpack_rows, tiled[t.name])) if t.name in tiled else Job(t) for t in f.tensors.values()]


def check_digests(f: GGUFFile, manifest: m.Manifest, digests: list[bytes]) -> None:
    """Raises GGUFError if a tensor's bytes are not those that were written."""
    for name, got in zip(f.tensors, digests, strict=True):
        if got.hex() != manifest.tensor_sha256[name]:
            raise GGUFError(f"{f.path} is damaged: the bytes of tensor {name!r} are not those that were written")
    if m.data_digest(digests) != manifest.data_sha256:
        raise GGUFError(f"{f.path} is damaged: the digest of its tensor data does not fit")


def unpack(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Write a repacked GGUF back as an ordinary one.

    From a lossless packing (``column``, no change of type) this gives the source's metadata and tensors bit for bit,
    which is checked against the digest of the source. Tiles of ``tile`` grouping are quantized again.

    Raises:
        GGUFError: the file is damaged or not repacked.
        OSError: reading or writing failed. In either case ``dst`` is as it was.
    """
    dst = Path(dst)
    with GGUFFile(src) as f:
        manifest = m.read_manifest(f)
        alignment = manifest.source_alignment or DEFAULT_ALIGNMENT
        kv = unpacked_kv(f, manifest)
        infos = list(f.tensors.values())
        head, offsets, size = w.header(f.version, kv, [(t.name, t.type, t.ne) for t in infos], alignment)
        with w.complete_file(dst, size, sources=[f.path]) as out:
            out.write(head)
            digests = run(f, unpack_jobs(f, manifest), write_at(out, offsets), threads=threads, progress=progress)
            check_digests(f, manifest, digests.source)
            if manifest.lossless and m.content_digest(kv, infos, digests.output) != manifest.source_sha256:
                raise GGUFError(f"{f.path} does not unpack to the source it was made from")
    notes = []
    regrouped = sum(t.type in (Type.Q4_0_TILE, Type.Q8_0_TILE) for t in manifest.tensors)
    if regrouped:
        notes.append(f"Quantized again from tile grouping: {regrouped} tensors. This loses some accuracy.")
    if not manifest.lossless:
        notes.append("The packing was not lossless, so this is not the file that was packed.")
    return Report(
        path=dst,
        size=size,
        n_tensors=len(infos),
        n_tiled=len(manifest.tensors),
        n_requantized=regrouped,
        tiled_bytes=sum(t.nbytes for t in manifest.tensors),
        lossless=manifest.lossless,
        notes=tuple(notes),
    )
