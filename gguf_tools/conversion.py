"""Ordinary GGUF to ordinary GGUF of one type, F32, F16, Q8_0, Q4_0 or IQ4_NL: every weight matrix, embeddings too."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from . import gguf_write as w
from .calibration import Calibration, Prepared, calibrated
from .errors import GGUFError
from .gguf_file import Q, TensorInfo
from .policy import EMBEDDING, KEEP, OUTPUT, Target
from .repack import (
    FILE_TYPE,
    K_FILE_TYPE,
    Maker,
    Report,
    added_error,
    count_of,
    replaced,
    report_of,
    require_ordinary,
    uncalibrated,
)
from .split import open_gguf
from .stream import Progress, run, write_at
from .weights import BLOCK, FLOAT_TYPES, has_values, is_weight

TYPES = {"f32": Q.F32, "f16": Q.F16, "q8_0": Q.Q8_0, "q4_0": Q.Q4_0, "iq4_nl": Q.IQ4_NL}
K_QUANTIZATION = "general.quantization_version"
QUANTIZATION_VERSION = 2


def _target(t: TensorInfo, wanted: Q) -> Target:
    if not is_weight(t) or (wanted not in FLOAT_TYPES and t.k % BLOCK != 0):
        return Target(t, t.type, None)
    if t.type != wanted and not has_values(t.type):
        raise GGUFError(f"tensor {t.name!r} is {t.type.name}, which cannot be converted")
    return Target(t, wanted, None)


def _wanted(t: TensorInfo, wanted: Q, embedding_type: str | None) -> Q:
    if embedding_type is None or t.name not in (EMBEDDING, OUTPUT):
        return wanted
    return t.type if embedding_type == KEEP else TYPES[embedding_type]


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    type: str,
    embedding_type: str | None = None,
    search: bool = False,
    calibration: Calibration | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Report:
    """Write ``src`` to ``dst`` with all weight matrices, token embeddings included, in one type.

    Norms, biases and other small tensors stay as they are. Sources in other quantized types are dequantized first,
    which loses accuracy unless the target is "f32".

    Args:
        type: "f32", "f16", "q8_0", "q4_0" or "iq4_nl".
        embedding_type: of the token embeddings and the output matrix, if they shall have another; "keep": as they are.
        search: choose scales for the smallest error instead of rounding to nearest.
        calibration: compensate errors by the second moments of the inputs in a text; implies ``search`` for tensors
            that the text says nothing of.
        threads: worker threads; one per usable core if None.
        progress: called with (bytes read, bytes in all).
        overwrite: replace ``dst`` if it exists.

    Raises:
        GGUFError: the source is damaged, repacked, or has a type that cannot be read.
        OSError: reading or writing failed; FileExistsError: ``dst`` exists. In any case ``dst`` is as it was.
    """
    if type not in TYPES:
        raise ValueError(f"type is one of {tuple(TYPES)}")
    if embedding_type not in (None, KEEP, *TYPES):
        raise ValueError(f"embedding_type is one of {(KEEP, *TYPES)}")
    wanted, dst = TYPES[type], Path(dst)
    with open_gguf(src) as f, ExitStack() as stack:
        require_ordinary(f)
        targets = [_target(t, _wanted(t, wanted, embedding_type)) for t in f.tensors.values()]
        changed = {K_FILE_TYPE: w.kv_u32(K_FILE_TYPE, FILE_TYPE[wanted])}
        if wanted not in FLOAT_TYPES:
            changed[K_QUANTIZATION] = w.kv_u32(K_QUANTIZATION, QUANTIZATION_VERSION)
        prepared: Mapping[str, Prepared] = {}
        if calibration is not None:
            w.check_output(dst, f.paths, overwrite)
            prepared = stack.enter_context(calibrated(f, dst, targets, calibration, threads))
        searched = search or calibration is not None
        makers = [Maker(t, search=searched, prepared=prepared.get(t.name)) for t in targets]
        names = [(t.source.name, t.type, t.source.ne) for t in targets]
        head, offsets, size = w.header(f.version, replaced(f, changed), names, f.alignment)
        with w.complete_file(dst, size, sources=f.paths, overwrite=overwrite) as out:
            out.write(head)
            run(f, [x.job for x in makers], write_at(out, offsets), threads=threads, progress=progress)
    again = [x for x in makers if x.target.quantizes and x.target.source.type not in FLOAT_TYPES]
    notes = []
    if again:
        which = count_of(Counter(x.target.source.type.name for x in again))
        notes.append(f"Quantized before, and now converted again: {which}.{added_error(again)}")
    if prepared:
        notes += uncalibrated(makers)
    return report_of(dst, size, makers, notes, False, all(t.exact for t in targets))
