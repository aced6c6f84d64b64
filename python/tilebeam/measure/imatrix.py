"""Collects an importance matrix: for every weight matrix, the mean square of what comes into each of its inputs.

As llama-imatrix does it (llama.cpp, tools/imatrix): the text is cut into windows as for perplexity, every position has
an output so that the last layer sees all of them, and the scheduler of llama.cpp's CPU backend shows each matrix
multiplication after it ran. The sums are those of ``llama-imatrix`` up to the order of addition.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tilebeam.errors import TilebeamError
from tilebeam.gguf.imatrix_file import Sums
from tilebeam.measure.graph_watch import TYPE_F32, Watch, array, decode, name_of, operation
from tilebeam.measure.perplexity import Windows
from tilebeam.model.lm import LM

F32 = npt.NDArray[np.float32]

MIN_ROWS = 16  # llama-imatrix takes no notice of smaller batches
OUTPUT = "output.weight"
EMBEDDING = "token_embd.weight"
# A scheduler copy of a weight is called BACKEND#name#number.
COPY = re.compile(r"[^#]*#([^#]*)(?:#.*)?")


class Collector(Watch):
    """Sums of squares by weight tensor."""

    def __init__(self, process_output: bool = False) -> None:
        super().__init__()
        self.process_output = process_output
        self.sums: dict[str, Sums] = {}
        self._mul_mat, self._mul_mat_id = operation("MUL_MAT"), operation("MUL_MAT_ID")

    def _name(self, weight: Any) -> str:
        name = name_of(weight)
        found = COPY.fullmatch(name)
        name = found[1] if found else name
        return OUTPUT if name == EMBEDDING else name  # a tied output matrix

    def wants(self, t: Any) -> bool:
        """Return whether this is a product with weights whose inputs count."""
        if t.op not in (self._mul_mat, self._mul_mat_id):
            return False
        weight, x = t.src[0].contents, t.src[1].contents
        if t.op == self._mul_mat_id:
            return True
        if x.ne[1] < MIN_ROWS or x.type != TYPE_F32:
            return False
        name = self._name(weight)
        return name.startswith("blk.") or (self.process_output and name == OUTPUT)

    def add(self, t: Any) -> None:
        """Add what came into a weight."""
        weight, x = t.src[0].contents, t.src[1].contents
        values, name = array(x, np.float32), self._name(weight)
        k = int(x.ne[0])
        if t.op == self._mul_mat_id:
            experts = int(weight.ne[2])
            entry = self._entry(name, experts, experts, k)
            ids = array(t.src[2].contents, np.int32)[0, 0]  # (tokens, experts used)
            for used in range(ids.shape[1]):
                rows = values[0, :, used % x.ne[1]]
                for expert in np.unique(ids[:, used]):
                    chosen = rows[ids[:, used] == expert]
                    entry.squares[expert] += _squares(chosen)
                    entry.counts[expert] += len(chosen)
        else:
            matrices = int(weight.ne[2] * weight.ne[3])
            entry = self._entry(name, matrices, 1, k)
            for i3 in range(int(x.ne[3])):
                for i2 in range(int(x.ne[2])):
                    matrix = i3 % weight.ne[3] * weight.ne[2] + i2 % weight.ne[2]
                    entry.squares[matrix] += _squares(values[i3, i2])
            entry.counts += int(x.ne[1] * x.ne[2] * x.ne[3]) // matrices
        if not np.isfinite(entry.squares).all():
            raise TilebeamError(f"The activations that come into {name} have values that are not numbers.")

    def _entry(self, name: str, matrices: int, counts: int, k: int) -> Sums:
        entry = self.sums.setdefault(name, Sums(np.zeros((matrices, k)), np.zeros(counts, np.int64)))
        if entry.squares.shape != (matrices, k) or len(entry.counts) != counts:
            raise TilebeamError(f"The weights {name} are used in two ways; their importance cannot be collected.")
        return entry


def _squares(rows: F32) -> npt.NDArray[np.float64]:
    """Return sums of squares over rows (n, K)."""
    x = rows.astype(np.float64)
    out: npt.NDArray[np.float64] = np.einsum("nk,nk->k", x, x)
    return out


def collect(
    lm: LM,
    windows: Windows,
    *,
    threads: int,
    process_output: bool = False,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Sums]:
    """Decode windows of text and add up the squares of all activations.

    Args:
        lm: a model on the CPU device.
        windows: see :func:`tilebeam.measure.perplexity.windows_of`.
        process_output: also of the output matrix; the tied embedding, as "output.weight".
        progress: called with the number of windows done.

    Returns:
        Sums by tensor name, for :func:`tilebeam.gguf.imatrix_file.save_imatrix`.

    Raises:
        TilebeamError: decoding fails, or an activation is not a number.
    """
    collector = Collector(process_output)
    decode(lm, windows, collector, threads=threads, progress=progress)
    return collector.sums
