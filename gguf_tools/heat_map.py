"""A picture of what quantization cost: the error of every weight matrix, layers down, kinds of tensors across."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
from tilebeam import _ext as ggml_ext
from tilebeam._ext import TILE, Type

from . import contents as m
from .errors import GGUFError
from .gguf_file import TensorInfo
from .quantize import ErrorSum, Floats
from .split import Source, open_gguf
from .stream import Progress, default_threads, in_order
from .weights import has_values, is_weight, to_float
from .whole_file import whole_file

ELEMENTS = 1 << 18  # compared at a time, about
WHOLE = "model"  # the row of tensors that belong to no layer
LAYER = re.compile(r"blk\.(\d+)\.(.+?)(?:\.weight)?")
# Order of the columns: as a layer computes.
KINDS = ("attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
WITH_NUMBERS = 48  # layers; more leave no room for a number in each cell


def _tiles(f: Source) -> dict[str, Type]:
    """Tell which tensors of a file are tiles; none of an ordinary one."""
    if f.architecture != m.ARCHITECTURE:
        return {}
    return {t.name: t.type for t in m.manifest(f.path).tensors}


def _values(f: Source, t: TensorInfo, tiled: Type | None, row: int, rows: int) -> Floats:
    data = np.empty(rows * t.row_bytes, np.uint8)
    f.read_tensor(t, row * t.row_bytes, data)
    return to_float(t.type, data, t.k, rows) if tiled is None else ggml_ext.dequantize(tiled, data, t.k, rows)


def relative_errors(
    path: str | os.PathLike[str],
    against: str | os.PathLike[str],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Return each weight matrix's root mean square error, over the values' own, against the GGUF that it was made from.

    Args:
        path: a repacked or an ordinary GGUF.
        against: an ordinary GGUF (or a part of a split one) with the same tensors in any type.
        threads: worker threads; one per usable core if None.
        progress: called with (bytes compared, bytes in all).

    Raises:
        GGUFError: a file is damaged, or they have no weight matrix in common, or one of another shape.
        OSError: a file cannot be read.
    """
    with open_gguf(path) as f, open_gguf(against) as source:
        tiles = _tiles(f)
        if source.architecture == m.ARCHITECTURE:
            raise GGUFError(f"{source.path} is repacked: compare with the file that was packed")
        pairs = []
        for t in f.tensors.values():
            s = source.tensors.get(t.name)
            if s is None or not (is_weight(t) or is_weight(s)):
                continue
            if s.ne != t.ne:
                raise GGUFError(f"tensor {t.name!r} is {list(t.ne)} in {f.path}, {list(s.ne)} in {source.path}")
            if has_values(t.type) and has_values(s.type):
                pairs.append((t, s))
        if not pairs:
            raise GGUFError(f"{f.path} and {source.path} have no weight matrix in common")
        sums = {t.name: ErrorSum() for t, _ in pairs}
        total, done = sum(t.nbytes for t, _ in pairs), 0

        def compare(item: tuple[TensorInfo, TensorInfo, int, int]) -> int:
            t, s, row, rows = item
            sums[t.name].add_values(_values(source, s, None, row, rows), _values(f, t, tiles.get(t.name), row, rows))
            return int(rows * t.row_bytes)

        items = (
            (t, s, row, min(step, t.rows - row))
            for t, s in pairs
            for step in (_step(t),)
            for row in range(0, t.rows, step)
        )
        workers = threads or default_threads()
        with ThreadPoolExecutor(workers, "compare") as pool:
            for n in in_order(pool, compare, items, workers + 1):
                done += n
                if progress:
                    progress(done, total)
        return {name: e.relative_rms for name, e in sums.items()}


def _step(t: TensorInfo) -> int:
    """Return rows of a piece: whole panels, about ELEMENTS numbers."""
    return max(1, ELEMENTS // (t.k * TILE)) * TILE


def table(errors: Mapping[str, float]) -> tuple[list[str], list[str], npt.NDArray[np.float64]]:
    """Lay out errors by tensor name: rows (layers, then the model), columns (kinds), values; NaN where none is."""
    cells: dict[tuple[str, str], float] = {}
    for name, error in errors.items():
        found = LAYER.fullmatch(name)
        cells[found.groups() if found else (WHOLE, name.removesuffix(".weight"))] = error  # type: ignore[index]
    rows = sorted({r for r, _ in cells if r != WHOLE}, key=int) + [WHOLE] * any(r == WHOLE for r, _ in cells)
    found_kinds = {k for _, k in cells}
    columns = [k for k in KINDS if k in found_kinds] + sorted(found_kinds - {*KINDS})
    values = np.full((len(rows), len(columns)), np.nan)
    for (r, k), error in cells.items():
        values[rows.index(r), columns.index(k)] = error
    return rows, columns, values


def figure(errors: Mapping[str, float], title: str) -> Any:
    """Draw the heat map as a matplotlib figure: errors in percent, colours by their logarithm, exact tensors white.

    Raises:
        GGUFError: matplotlib is not installed, or there is no error to draw.
    """
    try:
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure
        from matplotlib.ticker import FormatStrFormatter
    except ImportError:
        raise GGUFError("a heat map needs matplotlib: pip install matplotlib") from None
    if not errors:
        raise GGUFError("no weight matrix to draw")
    rows, columns, values = table(errors)
    percent = 100 * values
    inexact = percent[np.isfinite(percent) & (percent > 0)]
    low, high = (float(inexact.min()), float(inexact.max())) if inexact.size else (0.1, 1.0)
    fig = Figure(figsize=(2.5 + 0.75 * len(columns), 1.6 + 0.32 * len(rows)), dpi=120, layout="constrained")
    axes = fig.add_subplot()
    axes.set_facecolor("#d8d8d8")  # shows where a layer has no such tensor
    exact = np.where(percent == 0, 0.0, np.nan)
    axes.imshow(exact, cmap="Greys", vmin=0, vmax=1, aspect="auto")
    image = axes.imshow(
        np.where(percent > 0, percent, np.nan),
        cmap="viridis",
        norm=LogNorm(low * 0.999, max(high, low * 1.01)),
        aspect="auto",
    )
    axes.set_xticks(range(len(columns)), columns, rotation=45, ha="right")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylabel("layer")
    axes.set_title(title, fontsize=10)
    if len(rows) <= WITH_NUMBERS:
        middle = (low * high) ** 0.5
        for (r, c), value in np.ndenumerate(percent):
            if np.isfinite(value):
                colour = "black" if value == 0 or value > middle else "white"
                axes.text(c, r, f"{value:.3g}", ha="center", va="center", fontsize=7, color=colour)
    bar = fig.colorbar(image, label="relative RMS error, %")
    for part in (bar.ax.yaxis.set_major_formatter, bar.ax.yaxis.set_minor_formatter):
        part(FormatStrFormatter("%.3g"))
    return fig


def heat_map(errors: Mapping[str, float], path: str | os.PathLike[str], *, title: str) -> None:
    """Draw errors by tensor name (:func:`relative_errors`) as a PNG, which appears only when it is complete.

    Raises:
        GGUFError: matplotlib is not installed, or there is no error to draw.
        OSError: writing failed.
    """
    fig = figure(errors, title)
    with whole_file(path) as partial:
        fig.savefig(partial, format="png")
