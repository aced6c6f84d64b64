"""``--calibrate``: quantizes a model's matrices by the second moments of their inputs in a text, one group of layers
after the other, and keeps what is done in a folder, so that the same command resumes a run that was stopped.

Who runs the model is not known here: `Calibration.moments` does, see ``tilebeam.measure.moments``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tilebeam import _ext as ggml_ext
from tilebeam._ext import TILE, Type

from . import compensate as c
from .byte_bar import Shown
from .errors import GGUFError
from .gguf_file import Bytes, Q
from .policy import Target
from .quantize import ErrorSum
from .split import Source
from .weights import TB_TYPE, Floats, fits_tiles, refuse, to_float
from .whole_file import whole_file

FOLDER = ".calibration"  # added to the output's name
SETTING = "setting.json"
# Root mean square error of a tensor over its own root mean square: what is farther from the weights is another tensor.
# Rounding keeps it below 0.35 and 0.025 whatever the weights are.
FARTHEST = {Q.Q4_0: 0.5, Q.Q8_0: 0.05, Q.IQ4_NL: 0.5}
METHOD = 1  # raised when the same setting gives other weights

# X^T X, float32 (K, K), of the inputs of those of the named matrices that the text reaches, by name; matrices with the
# same inputs have the same array.
Moments = Callable[[Sequence[str]], Mapping[str, npt.NDArray[np.float32]]]


@dataclass(frozen=True)
class Calibration:
    """A text and a way to run the model on it.

    Attributes:
        moments: runs it.
        setting: what must be the same for a stopped run to be resumed: digests and sizes.
        memory: bytes for the second moments that are collected in one pass over the text.
        show: called with "calibrate", bytes of the source's matrices done, and all their bytes.
    """

    moments: Moments
    setting: Mapping[str, Any]
    memory: int = 1 << 30
    show: Shown | None = None


def plain_type(t: Target) -> Type | None:
    """Return the tiled type that a target is quantized in: its own, or the one that holds the same plain blocks."""
    if not t.quantizes or not ggml_ext.has_quantizer(TB_TYPE.get(t.type, Type.F32)):
        return None
    return t.tiled if t.tiled is not None else ggml_ext.column_type(TB_TYPE[t.type])


class Prepared:
    """Tiles of a matrix, on disk."""

    def __init__(self, path: Path, tiled: Type, k: int) -> None:
        self._path, self.tiled, self._k = path, tiled, k

    def rows(self, first: int, rows: int) -> Bytes:
        """Read whole panels of rows; ``first`` is a multiple of 32."""
        panel = ggml_ext.tiled_bytes(self.tiled, self._k, TILE)
        with self._path.open("rb") as f:
            return np.fromfile(f, np.uint8, -(-rows // TILE) * panel, offset=first // TILE * panel)


def _layer(name: str) -> int:
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else 1 << 30


class _Work:
    """The folder: a file of tiles for each matrix that is done, an empty one where the text says nothing of it."""

    def __init__(self, output: Path, f: Source, calibration: Calibration, targets: Sequence[Target]) -> None:
        self.folder = output.with_name(output.name + FOLDER)
        states = [path.stat() for path in f.paths]
        setting = {
            "method": [METHOD, c.DAMPING, c.SWEEPS],
            "source": [[s.st_size, s.st_mtime_ns] for s in states],
            "tensors": hashlib.sha256(json.dumps([[t.name, t.label] for t in targets]).encode()).hexdigest(),
            **calibration.setting,
        }
        self.folder.mkdir(exist_ok=True)
        note, wanted = self.folder / SETTING, json.dumps(setting, indent=1)
        if not note.exists():
            with whole_file(note) as partial:
                partial.write_text(wanted)
        elif note.read_bytes() != wanted.encode():
            raise GGUFError(
                f"{self.folder} holds the calibration of another source or text, or with other options: delete it, or "
                "choose another output"
            )

    def path(self, t: Target) -> Path:
        """Return the file of a matrix."""
        return self.folder / f"{hashlib.sha256(t.name.encode()).hexdigest()[:32]}.tiles"

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the folder if the block fails and there is work in it."""
        try:
            yield
        except BaseException:
            if not any(self.folder.glob("*.tiles")):
                shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def keep(self, t: Target, tiles: Bytes) -> None:
        """Write a matrix' file, whole or not at all."""
        with whole_file(self.path(t)) as partial:
            partial.write_bytes(tiles.tobytes())


def _groups(targets: Sequence[Target], memory: int) -> Iterator[list[Target]]:
    """Group the matrices layer by layer, as many in one pass as the memory takes second moments of."""
    group: list[Target] = []
    size = 0
    for t in sorted(targets, key=lambda t: _layer(t.name)):
        own = 4 * t.source.k**2
        if group and size + own > memory and _layer(t.name) != _layer(group[-1].name):
            yield group
            group, size = [], 0
        group.append(t)
        size += own
    if group:
        yield group


def _nearest_if_far(w: Floats, tiles: Bytes, t: Target, tiled: Type) -> Bytes:
    """Return the tiles; or the weights rounded with searched scales where the text moved them so far that they are
    others."""
    error = ErrorSum()
    n, k = w.shape
    error.add_values(w, ggml_ext.dequantize(tiled, tiles, k, n))
    return tiles if error.relative_rms <= FARTHEST[t.type] else ggml_ext.quantize(tiled, w, search=1)


def _quantize_group(
    f: Source,
    group: Sequence[Target],
    calibration: Calibration,
    threads: int | None,
    done: Callable[[Target, Bytes], None],
) -> None:
    moments = calibration.moments([t.name for t in group])
    inputs: tuple[tuple[int, int], c.Inputs] | None = None
    for t in sorted(group, key=lambda t: id(moments.get(t.name))):
        tiled, s = plain_type(t), t.source
        found = moments.get(t.name)
        if found is None or tiled is None:
            done(t, np.empty(0, np.uint8))
            continue
        key = id(found), c.group_width(tiled)
        try:
            if inputs is None or inputs[0] != key:
                inputs = None  # two of them would take twice the memory
                inputs = key, c.Inputs.of(found, key[1])
            data = np.empty(s.nbytes, np.uint8)
            f.read_tensor(s, 0, data)
            w = to_float(s.type, data, s.k, s.rows)
            tiles = c.compensate(tiled, w, inputs[1], threads=threads).tiles
            done(t, _nearest_if_far(w, tiles, t, tiled))
        except ValueError as e:
            raise refuse(s, e) from e


@contextlib.contextmanager
def calibrated(
    f: Source, output: Path, targets: Sequence[Target], calibration: Calibration, threads: int | None = None
) -> Iterator[dict[str, Prepared]]:
    """Quantize the matrices that second moments can be had for, by the target's name; others are left out.

    What is done is kept in the folder OUTPUT.calibration until the block ends without an error.

    Args:
        targets: of these, single matrices that are quantized; stacks of experts, embeddings and matrices whose moments
            alone take more than ``calibration.memory`` are left out.

    Raises:
        GGUFError: there is no such matrix; the folder is of another run; moments make no sense.
        OSError: reading or writing failed.
    """
    wanted = [
        t
        for t in targets
        if plain_type(t) is not None
        and not t.added
        and len(t.source.ne) == 2
        and fits_tiles(t.source)
        and 4 * t.source.k**2 <= calibration.memory
    ]
    if not wanted:
        raise GGUFError(f"{f.path} has no matrix that a calibration could quantize")
    work = _Work(output, f, calibration, wanted)
    with work.kept():
        yield _prepare(f, wanted, work, calibration, threads)
    shutil.rmtree(work.folder, ignore_errors=True)


def _prepare(
    f: Source, wanted: Sequence[Target], work: _Work, calibration: Calibration, threads: int | None
) -> dict[str, Prepared]:
    """Do what is left to do."""
    total, ready = sum(t.source.nbytes for t in wanted), 0

    def done(t: Target, tiles: Bytes | None) -> None:
        nonlocal ready
        if tiles is not None:
            work.keep(t, tiles)
        ready += t.source.nbytes
        if calibration.show:
            calibration.show("calibrate", ready, total)

    for group in _groups(wanted, calibration.memory):
        for t in group:
            if work.path(t).exists():
                done(t, None)
        left = [t for t in group if not work.path(t).exists()]
        if left:
            _quantize_group(f, left, calibration, threads, done)
    found = {}
    for t in wanted:
        tiled = plain_type(t)
        size = work.path(t).stat().st_size
        if tiled is None or size == 0:
            continue
        if size != ggml_ext.tiled_bytes(tiled, t.source.k, t.source.rows):
            raise GGUFError(f"{work.folder} is damaged: delete it")
        found[t.name] = Prepared(work.path(t), tiled, t.source.k)
    if not found:
        raise GGUFError(f"the text reached no matrix of {f.path} that is to be quantized")
    return found
