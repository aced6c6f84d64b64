"""Second moments of what comes into weight matrices in a text: X^T X, which `gguf-repack --calibrate` weighs errors by.

Matrices that read the same tensor (q, k and v; gate and up) share one. A window ends as soon as the last of the wanted
matrices has been seen: layers behind it and the output matrix are not computed.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilebeam.errors import TilebeamError
from tilebeam.gguf.byte_bar import Shown
from tilebeam.gguf.calibration import Calibration
from tilebeam.measure.graph_watch import TYPE_F32, Watch, array, decode, name_of, operation
from tilebeam.measure.perplexity import Windows, windows_of
from tilebeam.model.lm import LM

F32 = npt.NDArray[np.float32]

STRIPE = 512  # inputs whose products with all later ones are added at a time
# A scheduler copy of a weight is called BACKEND#name#number.
_COPY = re.compile(r"[^#]*#([^#]*)(?:#.*)?")


class MomentCollector(Watch):
    """X^T X of the wanted matrices' inputs, by the matrix that was seen first with each input.

    Args:
        wanted: names of weight tensors.

    Attributes:
        moments: by the first of the matrices with the same input.
        first: for every matrix seen, the name that its moments have.
    """

    def __init__(self, wanted: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self._mul_mat = operation("MUL_MAT")
        self.wanted = wanted
        self.moments: dict[str, F32] = {}
        self.first: dict[str, str] = {}
        self.begin()

    def begin(self) -> None:
        """Begin a new window."""
        self._inputs: dict[int, str] = {}
        self._left = set(self.wanted)

    def _name(self, weight: Any) -> str:
        name = name_of(weight)
        found = _COPY.fullmatch(name)
        name = found[1] if found else name
        return "output.weight" if name == "token_embd.weight" else name  # a tied output matrix is left as it is

    def wants(self, t: Any) -> bool:
        """Return whether this is a product with weights whose inputs count."""
        if t.op != self._mul_mat or t.src[1].contents.type != TYPE_F32:
            return False
        if self.enough or not self._left:
            return False
        return self._name(t.src[0].contents) in self._left

    def add(self, t: Any) -> None:
        """Add what came into a weight."""
        x, name = t.src[1].contents, self._name(t.src[0].contents)
        self._left.discard(name)
        same = self._inputs.setdefault(ctypes.addressof(x), name)
        if self.first.setdefault(name, same) != same:
            raise TilebeamError(f"The weights {name} are used in two ways; they cannot be calibrated.")
        if same == name:
            rows = np.ascontiguousarray(array(x, np.float32).reshape(-1, int(x.ne[0])))
            self._add_rows(name, rows)
        self.enough = not self._left

    def _add_rows(self, name: str, rows: F32) -> None:
        """Add the part above the diagonal blocks' lower edge only: half of the work."""
        k = rows.shape[1]
        h = self.moments.setdefault(name, np.zeros((k, k), np.float32))
        for at in range(0, k, STRIPE):
            h[at : at + STRIPE, at:] += rows[:, at : at + STRIPE].T @ rows[:, at:]
        if not np.isfinite(np.einsum("ii->i", h)).all():
            raise TilebeamError(f"The activations that come into {name} have values that are not numbers.")

    def complete(self) -> None:
        """Fill in what is below the diagonal, once all windows are in."""
        for h in self.moments.values():
            for at in range(0, len(h), STRIPE):
                to = at + STRIPE
                own = h[at:to, at:to]
                own[:] = (own + own.T) / 2
                h[to:, at:to] = h[at:to, to:].T


def collect_moments(
    lm: LM, windows: Windows, names: Sequence[str], *, threads: int, progress: Callable[[int], None] | None = None
) -> dict[str, F32]:
    """Decode windows of text and add up X^T X of what comes into some matrices.

    Args:
        lm: a model on the CPU device.
        names: of single matrices; those that no window reaches are not in the result.
        progress: called with the number of windows done.

    Returns:
        float32 (K, K) by name; matrices with the same input have the same array.

    Raises:
        TilebeamError: decoding fails, or an activation is not a number.
    """
    collector = MomentCollector(frozenset(names))

    def window_done(done: int) -> None:
        collector.begin()
        if progress:
            progress(done)

    decode(lm, windows, collector, threads=threads, progress=window_done)
    collector.complete()
    return {name: collector.moments[first] for name, first in collector.first.items()}


def calibration_of(
    model: Path,
    text: str,
    *,
    ctx_size: int,
    chunks: int,
    threads: int,
    memory: int,
    show: Shown | None = None,
) -> Calibration:
    """Make a calibration for :func:`tilebeam.gguf.pack`: this text, run through this model on the CPU.

    The model is loaded when moments are first asked for, and only then; a run that has them all loads nothing.

    Args:
        model: the source that is to be quantized.
        ctx_size, chunks: tokens per window, and how many windows of the text at most; -1: all.
        memory: bytes for second moments in one pass over the text.
        show: progress; a pass over the text counts the text's bytes.

    Raises:
        TilebeamError: when moments are asked for: the model cannot be loaded, or the text is too short.
    """
    size = len(text.encode("utf-8", "surrogatepass"))
    passes = 0

    def moments(names: Sequence[str]) -> dict[str, F32]:
        from tilebeam.model.loader import load

        nonlocal passes
        passes += 1
        part = f"read text ({passes})"
        with load(model, device="cpu", n_ctx=256, n_seq_max=1, threads=threads) as lm:
            windows = windows_of(lm, text, ctx_size, chunks)

            def progress(done: int) -> None:
                if show:
                    show(part, size * done // len(windows), size)

            return collect_moments(lm, windows, names, threads=threads, progress=progress)

    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return Calibration(moments, {"text": digest, "ctx_size": ctx_size, "chunks": chunks}, memory, show)
