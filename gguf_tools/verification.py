"""Proves a repacked file sound, against its own digests or against its source."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from . import contents as m
from .errors import GGUFError
from .gguf_file import GGUFFile
from .repack import require_ordinary, unpack_tensors
from .split import Source, open_gguf
from .stream import Progress, TensorJob, run


@dataclass(frozen=True)
class Verified:
    """The findings of a verification.

    Attributes:
        lossless: unpacking gives the source's very bytes, as the file says.
        unpacks: the digest of the source's contents came out of the tiles.
        against: it was made of the source; what was not quantized holds the source's very bytes.
        exact: tensors that do, if ``against``.
    """

    n_tensors: int
    n_tiled: int
    lossless: bool
    unpacks: bool
    against: bool
    exact: int = 0


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
        against: the ordinary GGUF it was made from: its contents must have the recorded digest, and tensors that were
            not quantized must hold its values bit for bit.
        deep: also unpack in memory, where the contents are the source's, and compare with the source's recorded digest.
        threads: worker threads; one per performance core if None.
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
        for at, n in f.padding():
            if n >= f.alignment:
                raise GGUFError(f"{f.path} has {n} extra bytes at byte {at}")
            if n and f.read(at, n).any():
                raise GGUFError(f"{f.path} is damaged: the padding at byte {at} is not zero")
        unpacks = deep and manifest.same_contents and against is None
        unpack_tensors(f, manifest, all_tensors=unpacks, threads=threads, progress=progress)
        exact = 0 if source is None else _exact(f, manifest, source, threads, progress)
        return Verified(len(f.tensors), len(manifest.tensors), manifest.lossless, unpacks, against is not None, exact)


def _exact(f: GGUFFile, manifest: m.Manifest, src: Source, threads: int | None, progress: Progress | None) -> int:
    """Check that a file was made of this source, and count the tensors that hold its very bytes."""
    require_ordinary(src)
    if [(t.name, t.ne) for t in f.tensors.values()] != [(t.name, t.ne) for t in src.tensors.values()]:
        raise GGUFError(f"{f.path} was not made from {src.path}: it has other tensors")
    plain = {t.name: t.plain for t in manifest.tensors}
    jobs = [TensorJob(t) for t in src.tensors.values()]
    digests = run(src, jobs, threads=threads, progress=progress).source
    of_source = dict(zip(src.tensors, digests, strict=True))
    count = 0
    for name, t in f.tensors.items():
        exact = t.type == src.tensors[name].type and plain.get(name, True)
        if exact and manifest.tensor_sha256[name] != of_source[name].hex():
            raise GGUFError(f"{f.path}: tensor {name!r} is not what {src.path} gives")
        count += exact
    if m.content_digest((kv.raw for kv in src.kv.values()), src.tensors.values(), digests) != manifest.source_sha256:
        raise GGUFError(f"{f.path} was not made from {src.path}: its contents differ")
    return count
