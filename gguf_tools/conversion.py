"""Ordinary GGUF to ordinary GGUF of one type: every weight matrix, embeddings too, in F32, F16, Q8_0 or Q4_0."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from . import gguf_write as w
from .errors import GGUFError
from .gguf_file import Q, TensorInfo
from .policy import Target
from .repack import FILE_TYPE, K_FILE_TYPE, Maker, Report, added_error, replaced, require_ordinary
from .split import open_gguf
from .stream import Progress, run, write_at
from .weights import BLOCK, FLOAT_TYPES, has_values, is_weight

TYPES = {"f32": Q.F32, "f16": Q.F16, "q8_0": Q.Q8_0, "q4_0": Q.Q4_0}
K_QUANTIZATION = "general.quantization_version"
QUANTIZATION_VERSION = 2


def _target(t: TensorInfo, wanted: Q) -> Target:
    if not is_weight(t) or (wanted not in FLOAT_TYPES and t.k % BLOCK != 0):
        return Target(t, t.type, None)
    if t.type != wanted and not has_values(t.type):
        raise GGUFError(f"tensor {t.name!r} is {t.type.name}, which cannot be converted")
    return Target(t, wanted, None)


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    type: str,
    threads: int | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Report:
    """Write ``src`` to ``dst`` with all weight matrices, token embeddings included, in one type.

    Norms, biases and other small tensors stay as they are. Sources in other quantized types are dequantized first,
    which loses accuracy unless the target is "f32".

    Args:
        type: "f32", "f16", "q8_0" or "q4_0".
        threads: worker threads; one per CPU if None.
        progress: called with (bytes read, bytes in all).
        overwrite: replace ``dst`` if it exists.

    Raises:
        GGUFError: the source is damaged, repacked, or has a type that cannot be read.
        OSError: reading or writing failed; FileExistsError: ``dst`` exists. In any case ``dst`` is as it was.
    """
    if type not in TYPES:
        raise ValueError(f"type is one of {tuple(TYPES)}")
    wanted, dst = TYPES[type], Path(dst)
    with open_gguf(src) as f:
        require_ordinary(f)
        targets = [_target(t, wanted) for t in f.tensors.values()]
        changed = {K_FILE_TYPE: w.kv_u32(K_FILE_TYPE, FILE_TYPE[wanted])}
        if wanted not in FLOAT_TYPES:
            changed[K_QUANTIZATION] = w.kv_u32(K_QUANTIZATION, QUANTIZATION_VERSION)
        makers = [Maker(t) for t in targets]
        names = [(t.source.name, t.type, t.source.ne) for t in targets]
        head, offsets, size = w.header(f.version, replaced(f, changed), names, f.alignment)
        with w.complete_file(dst, size, sources=f.paths, overwrite=overwrite) as out:
            out.write(head)
            run(f, [x.job for x in makers], write_at(out, offsets), threads=threads, progress=progress)
    again = [x for x in makers if x.target.quantizes and x.target.source.type not in FLOAT_TYPES]
    notes = []
    if again:
        count = Counter(x.target.source.type.name for x in again)
        which = ", ".join(f"{n} {name}" for name, n in sorted(count.items()))
        notes.append(f"Quantized before, and now converted again: {which}.{added_error(again)}")
    return Report(
        path=dst,
        size=size,
        n_tensors=len(targets),
        n_tiled=0,
        n_requantized=sum(t.type != t.source.type for t in targets),
        tiled_bytes=0,
        lossless=False,
        same_contents=all(t.exact for t in targets),
        notes=tuple(notes),
        tensors=tuple(x.report for x in makers),
    )
