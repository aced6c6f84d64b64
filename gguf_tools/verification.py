"""Proves a repacked file sound, against its own digests or against its source; and says what is in a GGUF."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import contents as m
from .errors import GGUFError
from .gguf_file import ARRAY, Bytes, GGUFFile
from .repack import Target, check_digests, require_ordinary, unpack_jobs, unpacked_kv
from .stream import Job, Progress, run

LONG_TEXT = 200


@dataclass(frozen=True)
class Verified:
    """What was proved: ``unpacks`` the source's own digest came out; ``against`` every tensor was made again."""

    n_tensors: int
    n_tiled: int
    lossless: bool
    unpacks: bool
    against: bool


def _nothing(_i: int, _at: int, _data: Bytes) -> None:
    """A consumer for runs that are only hashed."""


def verify(
    path: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    deep: bool = True,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Verified:
    """Check a repacked file: the metadata as :func:`gguf_tools.manifest` does, every tensor's digest, padding, size.

    Args:
        against: the ordinary GGUF it was made from: its contents must have the recorded digest, and making every
            tensor again must give the file's bytes.
        deep: also unpack in memory, where the packing was lossless, and compare with the source's recorded digest.
        threads: worker threads; one per CPU if None.
        progress: called with (bytes read, bytes in all).

    Raises:
        GGUFError: the first thing that is wrong, in one sentence.
        OSError: a file cannot be read.
    """
    with GGUFFile(path) as f:
        manifest = m.read_manifest(f)
        _check_padding(f)
        if against is not None:
            _check_against(f, manifest, against, threads, progress)
        unpacks = deep and manifest.lossless and against is None
        if against is None:
            jobs = unpack_jobs(f, manifest) if unpacks else [Job(t) for t in f.tensors.values()]
            digests = run(f, jobs, _nothing, threads=threads, progress=progress)
            check_digests(f, manifest, digests.source)
            if unpacks:
                content = m.content_digest(unpacked_kv(f, manifest), f.tensors.values(), digests.output)
                if content != manifest.source_sha256:
                    raise GGUFError(f"{f.path} does not unpack to the source it was made from")
        return Verified(len(f.tensors), len(manifest.tensors), manifest.lossless, unpacks, against is not None)


def _check_padding(f: GGUFFile) -> None:
    for at, n in f.padding():
        if n >= f.alignment:
            raise GGUFError(f"{f.path} has {n} bytes too many at byte {at}")
        if n and f.read(at, n).any():
            raise GGUFError(f"{f.path} is damaged: the padding at byte {at} is not zero")


def _check_against(
    f: GGUFFile,
    manifest: m.Manifest,
    against: str | os.PathLike[str],
    threads: int | None,
    progress: Progress | None,
) -> None:
    tiled = {t.name: t.type for t in manifest.tensors}
    with GGUFFile(against) as src:
        require_ordinary(src)
        if [(t.name, t.ne) for t in src.tensors.values()] != [(t.name, t.ne) for t in f.tensors.values()]:
            raise GGUFError(f"{f.path} was not made from {src.path}: it has other tensors")
        made = list(f.tensors.values())
        jobs = [Target(s, t.type, tiled.get(t.name)).job for s, t in zip(src.tensors.values(), made, strict=True)]

        def compare(i: int, at: int, data: Bytes) -> None:
            if not np.array_equal(f.read(made[i].offset + at, data.size), data):
                raise GGUFError(f"{f.path}: tensor {made[i].name!r} is not what {src.path} gives")

        digests = run(src, jobs, compare, threads=threads, progress=progress)
        check_digests(f, manifest, digests.output)
        content = m.content_digest((kv.raw for kv in src.kv.values()), src.tensors.values(), digests.source)
        if content != manifest.source_sha256:
            raise GGUFError(f"{f.path} was not made from {src.path}: its metadata differs")


def inspect(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What a GGUF, ordinary or repacked, holds, ready for JSON.

    Returns:
        ``path``, ``size``, ``version``, ``alignment``, ``architecture`` (the real one), ``repacked`` (None, or the
        manifest's fields), ``metadata`` (arrays as ``{"array": length}``), ``types`` (tensors and bytes per type) and
        ``tensors`` (name, type, layout, ne, offset, nbytes).

    Raises:
        GGUFError: the file is damaged.
        OSError: it cannot be read.
    """
    with GGUFFile(path) as f:
        repacked = f.architecture == m.ARCHITECTURE
        manifest = m.read_manifest(f) if repacked else None
        layout = {t.name: t.type.label for t in manifest.tensors} if manifest else {}
        count: Counter[str] = Counter()
        size: Counter[str] = Counter()
        for t in f.tensors.values():
            kind = layout.get(t.name, t.type.name.lower())
            count[kind] += 1
            size[kind] += t.nbytes
        return {
            "path": str(f.path),
            "size": f.size,
            "version": f.version,
            "alignment": f.alignment,
            "architecture": manifest.architecture if manifest else f.architecture,
            "repacked": None
            if manifest is None
            else {
                "layout_version": manifest.layout_version,
                "tool_version": manifest.tool_version,
                "source_alignment": manifest.source_alignment,
                "lossless": manifest.lossless,
                "n_tiled": len(manifest.tensors),
                "source_sha256": manifest.source_sha256,
                "data_sha256": manifest.data_sha256,
                "meta_sha256": manifest.meta_sha256,
            },
            "metadata": {key: _brief(kv.type, kv.value) for key, kv in f.kv.items()},
            "types": {kind: {"tensors": count[kind], "bytes": size[kind]} for kind in count},
            "tensors": [
                {
                    "name": t.name,
                    "type": t.type.name.lower(),
                    "layout": layout.get(t.name),
                    "ne": list(t.ne),
                    "offset": t.offset,
                    "nbytes": t.nbytes,
                }
                for t in f.tensors.values()
            ],
        }


def _brief(type: int, value: Any) -> Any:
    if type == ARRAY:
        return {"array": len(value)}
    if isinstance(value, str) and len(value) > LONG_TEXT:
        return value[:LONG_TEXT] + "..."
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)  # JSON has no such number
    return value
