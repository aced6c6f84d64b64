"""Packs an ordinary GGUF into the tile layout and unpacks it again; holds a few pieces of a tensor at a time."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import gguf
from tilebeam import _ext as ggml_ext
from tilebeam._ext import layout_version

from . import contents as m
from . import gguf_write as w
from .errors import GGUFError
from .gguf_file import DEFAULT_ALIGNMENT, Bytes, GGUFFile, Q, TensorInfo
from .model_check import require_model
from .policy import KEEP, Policy, Target, plan
from .quantize import ErrorSum
from .split import Source, open_gguf
from .stream import Consume, Digests, Progress, RowBlock, TensorJob, run, write_at
from .weights import FLOAT_TYPES, fits_tiles, has_values, is_weight, make_rows, unpack_rows

FILE_TYPE = {Q.F32: 0, Q.F16: 1, Q.Q4_0: 2, Q.Q8_0: 7, Q.IQ4_NL: 25}  # general.file_type
K_FILE_TYPE = "general.file_type"
K_QUANTIZATION, QUANTIZATION_VERSION = "general.quantization_version", 2
ZERO = "0" * 64


@dataclass(frozen=True)
class TensorReport:
    """The fate of a tensor. ``error``: root mean square over the values' own, None where nothing was rounded."""

    name: str
    ne: tuple[int, ...]
    source_type: str
    type: str
    nbytes: int
    error: float | None


@dataclass(frozen=True)
class Report:
    """The result of packing or unpacking: sizes in bytes; ``notes`` are sentences the user should read.

    ``lossless``: unpacking gives the source's very bytes. ``same_contents``: metadata and tensors are the source's bit
    for bit, though perhaps not its padding.
    ``written`` is False after a dry run, whose tensors have no errors.
    """

    path: Path
    size: int
    n_tensors: int
    n_tiled: int
    n_requantized: int
    tiled_bytes: int
    lossless: bool
    same_contents: bool
    notes: tuple[str, ...]
    tensors: tuple[TensorReport, ...] = ()
    written: bool = True


class Maker:
    """Makes a target's bytes, piece by piece, and sums up the error."""

    def __init__(self, target: Target, *, search: bool = False) -> None:
        self.target = target
        self.error = ErrorSum()
        self._search = search

    @property
    def job(self) -> TensorJob:
        """The work for `stream.run`: a copy where nothing changes, else pieces that are made anew."""
        t = self.target
        if t.tiled is None and t.type == t.source.type:
            return TensorJob(t.source)
        return TensorJob(t.source, self._make, floats=not t.exact, one_digest="read" if t.exact else None)

    def _make(self, p: RowBlock) -> Bytes:
        t = self.target
        given = t.source.type, p.data, p.k, p.rows
        return make_rows(*given, t.type, t.tiled, p.out, search=self._search, error=self.error)

    @property
    def report(self) -> TensorReport:
        """The tensor's report, once its job is done; the error is relative, root mean square."""
        t = self.target
        error = self.error.relative_rms if t.quantizes and self.error.count else None
        return TensorReport(t.name, t.source.ne, t.source.type.name.lower(), t.label, t.nbytes, error)


@cache
def tool_version() -> str:
    """Return the version of the installed distribution; "0" in a source tree."""
    try:
        return "tilebeam " + version("tilebeam")
    except PackageNotFoundError:
        return "tilebeam 0"


def require_ordinary(f: Source) -> None:
    """Raise GGUFError if the file is repacked already, or is empty."""
    if f.architecture == m.ARCHITECTURE or any(key.startswith(m.PREFIX) for key in f.kv):
        raise GGUFError(f"{f.path} is repacked already; unpack it first")
    if not f.tensors:
        raise GGUFError(f"{f.path} has no tensors")


def count_of(types: Counter[str]) -> str:
    """Spell out how often each type occurs."""
    return ", ".join(f"{n} {name}" for name, n in sorted(types.items()))


def _notes(makers: Sequence[Maker], difference: str | None) -> list[str]:
    notes = []
    again = [x for x in makers if x.target.quantizes and x.target.source.type not in FLOAT_TYPES]
    retyped = Counter(x.target.source.type.name for x in again if x.target.type != x.target.source.type)
    regrouped = Counter(x.target.type.name for x in again if x.target.type == x.target.source.type)
    left = [x.target.source for x in makers if x.target.tiled is None and is_weight(x.target.source)]
    plain = Counter(t.type.name for t in left if t.type not in FLOAT_TYPES)
    what = []
    if retyped:
        what.append(f"Quantized before, and now quantized again: {count_of(retyped)}.")
    if regrouped:
        what.append(f"Dequantized, and quantized again with one scale per 2 x 16 block: {count_of(regrouped)}.")
    if what:
        total = ErrorSum()  # over all tensors together; of a dry run nothing
        for x in again:
            total.add(x.error.squared, x.error.energy, x.error.count)
        if total.count:
            what.append(f"It changed the weights by {100 * total.relative_rms:.2g} % (root mean square).")
        notes.append(" ".join([*what, "This loses some accuracy, and unpacking does not bring it back."]))
    if difference is not None:
        notes.append(f"Unpacking gives the same contents, not the same bytes: {difference}.")
    if plain:
        notes.append(f"Not tiled (embedding tables, other types or shapes): {count_of(plain)}.")
    return notes


def _nothing_to_tile(f: Source, policy: Policy) -> str:
    """Say why a plan has no tiles, and what to do where something can be done."""
    weights = [t for t in f.tensors.values() if is_weight(t)]
    types = count_of(Counter(t.type.name for t in weights)) or "it has none"
    if not any(fits_tiles(t) and has_values(t.type) for t in weights):
        return (
            f"{f.path} has no matrix that can become tiles ({types}): embeddings never do, others do where both "
            "sides are multiples of 32"
        )
    advice = "; try --type q8_0 or q4_0" if policy.type == KEEP else ": --tensor-type leaves none"
    return f"{f.path} has no matrix of a type that a file can have in tiles ({types}){advice}"


def pack(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    policy: Policy | None = None,
    type: str = KEEP,
    grouping: str = "column",
    search: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
) -> Report:
    """Write ``src``, an ordinary GGUF or any part of a split one, to ``dst`` in the tile layout.

    Args:
        policy: what becomes of each tensor; if None, ``Policy(type, grouping)``: "keep", or "q4_0", "q8_0", "iq4_nl"
            to quantize the weight matrices first; "column" (ggml's own grouping, lossless if types are kept) or
            "tile" (one scale per 2 x 16 block; quantizes again).
        search: choose scales for the smallest error instead of rounding to nearest.
        threads: worker threads; one per performance core if None.
        progress: called with (bytes read, bytes in all).
        dry_run: only plan, write nothing.
        overwrite: replace ``dst`` if it exists.

    Raises:
        GGUFError: the source is damaged, repacked already, changes meanwhile, or has nothing to tile.
        OSError: reading or writing failed; FileExistsError: ``dst`` exists. In any case ``dst`` is as it was.
        ValueError: unknown options.
    """
    policy = policy or Policy(type, grouping)
    dst = Path(dst)
    with open_gguf(src) as f:
        require_ordinary(f)
        require_model(f)
        targets = plan(f, policy)
        if not any(t.tiled is not None for t in targets):
            raise GGUFError(_nothing_to_tile(f, policy))
        makers = [Maker(t, search=search) for t in targets]
        write = _Writer(f, targets, "search" if search else "nearest")
        blank, offsets, size = write.head(None)
        if not dry_run:
            with w.complete_file(dst, size, sources=f.paths, overwrite=overwrite) as out:
                out.write(blank)
                digests = run(f, [x.job for x in makers], write_at(out, offsets), threads=threads, progress=progress)
                out.seek(0)
                out.write(write.head(digests)[0])
    return Report(
        path=dst,
        size=size,
        n_tensors=len(targets),
        n_tiled=sum(t.tiled is not None for t in targets),
        n_requantized=sum(not t.exact for t in targets),
        tiled_bytes=sum(t.nbytes for t in targets if t.tiled is not None),
        lossless=write.lossless,
        same_contents=write.same_contents,
        notes=tuple(_notes(makers, write.difference)),
        tensors=tuple(x.report for x in makers),
        written=not dry_run,
    )


class _Writer:
    """The header of a repacked file."""

    def __init__(self, f: Source, targets: list[Target], scales: str) -> None:
        self._f, self._targets = f, targets
        self.same_contents = all(t.exact for t in targets)
        self.difference = _difference(f) if self.same_contents else None
        self.lossless = self.same_contents and self.difference is None
        self._alignment = max(m.MIN_ALIGNMENT, f.alignment)
        tiled = [t for t in targets if t.tiled is not None]
        retyped = [t.type for t in targets if t.type != t.source.type]
        self._kv = _packed_kv(f, self._alignment, Counter(retyped).most_common(1)[0][0] if retyped else None)
        self._kv += [
            w.kv_text(m.K_ARCHITECTURE, f.architecture),
            w.kv_u32(m.K_LAYOUT, max(layout_version(t.tiled) for t in tiled if t.tiled is not None)),
            w.kv_text(m.K_TOOL, tool_version()),
            w.kv_u32(m.K_ALIGNMENT, f.alignment if "general.alignment" in f.kv else 0),
            w.kv_bool(m.K_LOSSLESS, self.lossless),
            w.kv_bool(m.K_CONTENTS, self.same_contents),
            w.kv_texts(m.K_NAMES, [t.name for t in tiled]),
            w.kv_u32s(m.K_TYPES, [int(t.tiled) for t in tiled if t.tiled is not None]),
            w.kv_u32s(m.K_PLAIN, [int(t.exact) for t in tiled]),
            w.kv_text(m.K_SCALES, scales),
            w.kv_u32(m.K_VERSION, f.version),
        ]

    def head(self, digests: Digests | None) -> tuple[bytes, list[int], int]:
        """Return its bytes, the tensors' offsets and the file's size. Digests not known yet are zeros of the same
        length."""
        f, d, targets = self._f, digests, self._targets
        sums = [x.hex() for x in d.output] if d else [ZERO] * len(targets)
        content = m.content_digest((x.raw for x in f.kv.values()), f.tensors.values(), d.source) if d else ZERO
        records = [
            *self._kv,
            w.kv_text(m.K_SOURCE, content),
            w.kv_text(m.K_DATA, m.data_digest(d.output) if d else ZERO),
            w.kv_texts(m.K_TENSORS, sums),
        ]
        names = [(t.name, t.type, t.source.ne) for t in targets]
        blank = w.header(f.version, [*records, w.kv_text(m.K_META, ZERO)], names, self._alignment)
        if d is None:
            return blank
        infos = [replace(t.source, type=t.type, offset=o) for t, o in zip(targets, blank[1], strict=True)]
        records.append(w.kv_text(m.K_META, m.meta_digest(records, infos)))
        return w.header(f.version, records, names, self._alignment)


def _difference(f: Source) -> str | None:
    """Say why unpacking what is packed from this source gives another file with the same contents: it writes one GGUF
    with zeros as padding and nothing behind its last tensor, and other bytes of a source are in no digest.

    Returns:
        The end of a sentence ("the source has .."), None if unpacking gives the very same bytes.
    """
    if not isinstance(f, GGUFFile):
        return "the source is split, and unpacking gives one file"
    names = [(t.name, t.type, t.ne) for t in f.tensors.values()]
    head, _, size = w.header(f.version, (kv.raw for kv in f.kv.values()), names, f.alignment)
    if f.size > size:
        return f"the source has {f.size - size} bytes after its last tensor"
    if f.size < size:
        return "the source ends without the padding of its last tensor"
    for at, n in f.padding():
        if f.read(at, n).any():
            return f"the source has nonzero bytes in its padding (at byte {at})"
    if f.read(0, len(head)).tobytes() != head:
        return "the source's header is encoded differently"
    return None


def _packed_kv(f: Source, alignment: int, file_type: gguf.GGMLQuantizationType | None) -> list[bytes]:
    """Give the source's records another architecture, alignment and key of the number of layers, in the same order."""
    changed = {
        "general.architecture": w.kv_text("general.architecture", m.ARCHITECTURE),
        "general.alignment": w.kv_u32("general.alignment", alignment),
    }
    if m.moved_layers(f):
        key = m.layers_key(f.architecture)
        changed[key] = w.kv_u32(m.K_LAYERS, int(f.kv[key].value))
    if file_type is not None:
        changed[K_FILE_TYPE] = w.kv_u32(K_FILE_TYPE, FILE_TYPE[file_type])
        changed[K_QUANTIZATION] = w.kv_u32(K_QUANTIZATION, QUANTIZATION_VERSION)
    records = [changed.get(key, kv.raw) for key, kv in f.kv.items()]
    return records + [record for key, record in changed.items() if key not in f.kv]


def unpacked_kv(f: GGUFFile, manifest: m.Manifest) -> list[bytes]:
    """Return the records of a repacked file's source."""
    changed = {"general.architecture": w.kv_text("general.architecture", manifest.architecture)}
    if manifest.source_alignment:
        changed["general.alignment"] = w.kv_u32("general.alignment", manifest.source_alignment)
    if manifest.layers is not None:
        changed[m.K_LAYERS] = w.kv_u32(m.layers_key(manifest.architecture), manifest.layers)
    records = []
    for key, kv in f.kv.items():
        ours = key.startswith(m.PREFIX) or (key == "general.alignment" and not manifest.source_alignment)
        if key in changed:
            records.append(changed[key])
        elif not ours:
            records.append(kv.raw)
    return records


def _unpack_jobs(f: GGUFFile, manifest: m.Manifest, all_tensors: bool) -> list[TensorJob]:
    """Plan what each tensor of a repacked file becomes when it is unpacked."""
    tiled = {t.name: t for t in manifest.tensors}

    def job(t: TensorInfo) -> TensorJob:
        entry = tiled.get(t.name)
        if entry is None or not (all_tensors or entry.plain):
            return TensorJob(t)
        type = entry.type
        exact = type == ggml_ext.column_type(ggml_ext.source_type(type))

        def unpack(p: RowBlock) -> Bytes:
            return unpack_rows(type, p.data, p.k, p.rows, p.out)

        return TensorJob(t, unpack, floats=not exact, one_digest="made" if entry.plain else None)

    return [job(t) for t in f.tensors.values()]


def unpack_tensors(
    f: GGUFFile,
    manifest: m.Manifest,
    consume: Consume | None = None,
    *,
    all_tensors: bool = True,
    threads: int | None,
    progress: Progress | None,
) -> None:
    """Unpack the tensors of a repacked file as :func:`stream.run` does, and check that they are what was written.

    Args:
        all_tensors: False: only those are unpacked whose digest is that of their plain blocks.

    Raises:
        GGUFError: the bytes of a tensor are damaged, or what should be the source's contents is not.
    """
    digests = run(f, _unpack_jobs(f, manifest, all_tensors), consume, threads=threads, progress=progress)
    for name, got in zip(f.tensors, digests.source, strict=True):
        if got.hex() != manifest.tensor_sha256[name]:
            raise GGUFError(f"{f.path} is damaged: the bytes of tensor {name!r} are not those that were written")
    if m.data_digest(digests.source) != manifest.data_sha256:
        raise GGUFError(f"{f.path} is damaged: the digest of its tensor data does not fit")
    if not (all_tensors and manifest.same_contents):
        return
    if m.K_ADDED in f.kv:
        raise GGUFError(
            f"{f.path} has tensors that its source has not, as earlier versions wrote: pack its source again"
        )
    source = m.content_digest(unpacked_kv(f, manifest), f.tensors.values(), digests.output)
    if source != manifest.source_sha256:
        raise GGUFError(f"{f.path} does not unpack to the source it was made from")


def unpack(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Report:
    """Write a repacked GGUF back as an ordinary one.

    From a packing in ``column`` grouping without a change of type this gives the source's metadata and tensors bit for
    bit, which is checked against the digest of the source; from one that says ``lossless`` the very same file. Tiles
    of ``tile`` grouping are quantized again.

    Args:
        threads: worker threads; one per performance core if None.
        progress: called with (bytes read, bytes in all).
        overwrite: replace ``dst`` if it exists.

    Raises:
        GGUFError: the file is damaged or not repacked.
        OSError: reading or writing failed; FileExistsError: ``dst`` exists. In any case ``dst`` is as it was.
    """
    dst = Path(dst)
    with GGUFFile(src) as f:
        manifest = m.read_manifest(f)
        alignment = manifest.source_alignment or DEFAULT_ALIGNMENT
        kv = unpacked_kv(f, manifest)
        names = [(t.name, t.type, t.ne) for t in f.tensors.values()]
        head, offsets, size = w.header(f.version, kv, names, alignment)
        with w.complete_file(dst, size, sources=f.paths, overwrite=overwrite) as out:
            out.write(head)
            unpack_tensors(f, manifest, write_at(out, offsets), threads=threads, progress=progress)
    notes = []
    tiled = manifest.tensors
    regrouped = sum(t.type != ggml_ext.column_type(ggml_ext.source_type(t.type)) for t in tiled)
    if regrouped:
        notes.append(f"Quantized again from tile grouping: {regrouped} tensors. This loses some accuracy.")
    if manifest.same_contents and not manifest.lossless:
        notes.append("The contents are those of the file that was packed, the bytes between tensors or files are not.")
    elif not manifest.lossless:
        notes.append("The packing was not lossless, so this is not the file that was packed.")
    return Report(
        path=dst,
        size=size,
        n_tensors=len(names),
        n_tiled=len(tiled),
        n_requantized=regrouped,
        tiled_bytes=sum(t.nbytes for t in tiled),
        lossless=manifest.lossless,
        same_contents=manifest.same_contents,
        notes=tuple(notes),
    )
