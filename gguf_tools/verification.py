"""Proves a repacked file sound, against its own digests or against its source."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace

import numpy as np
from tilebeam import _ext as ggml_ext

from . import bounds
from . import contents as m
from .errors import GGUFError
from .gguf_file import Bytes, GGUFFile, TensorInfo
from .policy import EMBEDDING, OUTPUT
from .quantize import ErrorSum
from .repack import check_digests, require_ordinary, source_digest, unpack_jobs
from .split import Source, open_gguf
from .stream import Progress, RowBlock, TensorJob, run
from .weights import TB_TYPE, has_values, to_float, unpack_rows

NOTHING = np.empty(0, np.uint8)
WHOLE = ("imatrix", "calibrate")  # scales whose error is bounded for a whole tensor


@dataclass(frozen=True)
class Verified:
    """The findings of a verification.

    Attributes:
        lossless: unpacking gives the source's very bytes, as the file says.
        unpacks: the digest of the source's contents came out of the tiles.
        against: every tensor holds the source's values, bit for bit or within its type's error.
        exact: tensors that hold the source's very bytes, if ``against``.
        errors: of the others, the root mean square error over the values' own.
    """

    n_tensors: int
    n_tiled: int
    lossless: bool
    unpacks: bool
    against: bool
    exact: int = 0
    errors: dict[str, float] | None = None


def _nothing(_i: int, _at: int, _data: Bytes) -> None:
    """Consume pieces of runs that are only hashed."""


def verify(
    path: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    deep: bool = True,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Verified:
    """Check a repacked file: the metadata as :func:`tilebeam.gguf.manifest` does, every tensor's digest, padding, size.

    Args:
        against: the ordinary GGUF it was made from: its contents must have the recorded digest, and every tensor must
            hold its values: bit for bit where nothing was quantized, else within the error of its type.
        deep: also unpack in memory, where the contents are the source's, and compare with the source's recorded digest.
        threads: worker threads; one per usable core if None.
        progress: called with (bytes read, bytes in all).

    Raises:
        GGUFError: the first thing that is wrong, in one sentence.
        OSError: a file cannot be read.
    """
    with GGUFFile(path) as f, contextlib.ExitStack() as stack:
        manifest = m.read_manifest(f)
        source = None if against is None else open_gguf(against)  # a wrong name is said at once
        if source is not None:
            stack.callback(source.close)
        _check_padding(f)
        unpacks = deep and manifest.same_contents and against is None
        jobs = unpack_jobs(f, manifest, all_tensors=unpacks)
        digests = run(f, jobs, _nothing, threads=threads, progress=progress)
        check_digests(f, manifest, digests.source)
        if unpacks and source_digest(f, manifest, digests.output) != manifest.source_sha256:
            raise GGUFError(f"{f.path} does not unpack to the source it was made from")
        result = Verified(len(f.tensors), len(manifest.tensors), manifest.lossless, unpacks, against is not None)
        if source is None:
            return result
        return _check_against(f, manifest, source, result, threads, progress)


def _check_padding(f: GGUFFile) -> None:
    for at, n in f.padding():
        if n >= f.alignment:
            raise GGUFError(f"{f.path} has {n} extra bytes at byte {at}")
        if n and f.read(at, n).any():
            raise GGUFError(f"{f.path} is damaged: the padding at byte {at} is not zero")


class _Comparison:
    """Compares a tensor with the source's, piece by piece."""

    def __init__(self, f: GGUFFile, manifest: m.Manifest, made: TensorInfo, source: TensorInfo, src: Source) -> None:
        self._f, self._made, self._source, self._src, self._scales = f, made, source, src, manifest.scales
        self._tiled = {t.name: t.type for t in manifest.tensors}.get(made.name)
        plain = TB_TYPE.get(made.type)
        self._column = self._tiled is None or (plain is not None and self._tiled == ggml_ext.column_type(plain))
        self.exact = made.type == source.type and self._column
        if not self.exact and not (has_values(source.type) and made.type in TB_TYPE):
            raise GGUFError(f"{f.path}: tensor {made.name!r} is {made.type.name}, its source {source.type.name}")
        self.error = ErrorSum()

    @property
    def job(self) -> TensorJob:
        return TensorJob(self._source, self._compare, floats=not self.exact)

    def _refuse(self) -> GGUFError:
        return GGUFError(f"{self._f.path}: tensor {self._made.name!r} is not what {self._src.path} gives")

    def _compare(self, p: RowBlock) -> Bytes:
        t, k, rows = self._made, p.k, p.rows
        stored = p.out if self.exact else np.empty(rows * t.row_bytes, np.uint8)
        self._f.read_tensor(t, p.first * t.row_bytes, stored)
        if self.exact:
            plain = stored if self._tiled is None else unpack_rows(self._tiled, stored, k, rows)
            if not np.array_equal(p.data, plain):
                raise self._refuse()
            return NOTHING
        x = to_float(self._source.type, p.data, k, rows)
        y = (
            to_float(t.type, stored, k, rows)
            if self._tiled is None
            else ggml_ext.dequantize(self._tiled, stored, k, rows)
        )
        if bounds.worst(x, y, t.type, not self._column, self._scales) > 1:
            raise self._refuse()
        self.error.add_values(x, y)
        return NOTHING

    def finish(self) -> None:
        """Check what only the whole tensor shows."""
        limit = bounds.TENSOR.get(self._made.type) if self._scales in WHOLE and not self.exact else None
        if limit is not None and self.error.relative_rms > limit:
            raise self._refuse()


def _check_against(
    f: GGUFFile, manifest: m.Manifest, src: Source, result: Verified, threads: int | None, progress: Progress | None
) -> Verified:
    require_ordinary(src)
    own = [(t.name, t.ne) for t in f.tensors.values() if t.name not in manifest.added]
    if [(t.name, t.ne) for t in src.tensors.values()] != own:
        raise GGUFError(f"{f.path} was not made from {src.path}: it has other tensors")
    pairs = [(f.tensors[name], t) for name, t in src.tensors.items()]
    for name in manifest.added:
        origin = src.tensors.get(EMBEDDING)
        if name != OUTPUT or origin is None or f.tensors[name].ne != origin.ne:
            raise GGUFError(f"{f.path} was not made from {src.path}: it has other tensors")
        pairs.append((f.tensors[name], origin))
    comparisons = [_Comparison(f, manifest, made, source, src) for made, source in pairs]
    digests = run(src, [c.job for c in comparisons], _nothing, threads=threads, progress=progress)
    for c in comparisons:
        c.finish()
    of_source = digests.source[: len(src.tensors)]
    content = m.content_digest((kv.raw for kv in src.kv.values()), src.tensors.values(), of_source)
    if content != manifest.source_sha256:
        raise GGUFError(f"{f.path} was not made from {src.path}: its contents differ")
    errors = {made.name: c.error.relative_rms for (made, _), c in zip(pairs, comparisons, strict=True) if not c.exact}
    return replace(result, exact=len(pairs) - len(errors), errors=errors)
