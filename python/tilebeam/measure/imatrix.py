"""Collects an importance matrix: for every weight matrix, the mean square of what comes into each of its inputs.

As llama-imatrix does it (llama.cpp, tools/imatrix): the text is cut into windows as for perplexity, every position has
an output so that the last layer sees all of them, and the scheduler of llama.cpp's CPU backend shows each matrix
multiplication after it ran. The sums are those of ``llama-imatrix`` up to the order of addition.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import llama_cpp.llama_cpp as C
import numpy as np
import numpy.typing as npt

from tilebeam.errors import TilebeamError
from tilebeam.gguf.imatrix import Sums
from tilebeam.measure.perplexity import Windows
from tilebeam.model.lm import LM
from tilebeam.native.llama import Context, log_router

F32 = npt.NDArray[np.float32]

MIN_ROWS = 16  # llama-imatrix takes no notice of smaller batches
TYPE_F32 = 0
OUTPUT = "output.weight"
EMBEDDING = "token_embd.weight"
# A scheduler copy of a weight is called BACKEND#name#number.
COPY = re.compile(r"[^#]*#([^#]*)(?:#.*)?")


class Tensor(ctypes.Structure):
    """struct ggml_tensor of the pinned ggml."""


Tensor._fields_ = [
    ("type", ctypes.c_int),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * 4),
    ("nb", ctypes.c_size_t * 4),
    ("op", ctypes.c_int),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.POINTER(Tensor) * 10),
    ("view_src", ctypes.c_void_p),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
]


def _operation(name: str) -> int:
    """Number of an op of the ggml in use."""
    lib = ctypes.CDLL("libggml-base.so.0")  # by name: the copy that libllama resolved
    lib.ggml_op_name.restype = ctypes.c_char_p
    lib.ggml_op_name.argtypes = [ctypes.c_int]
    for i in range(128):
        if lib.ggml_op_name(i) == name.encode():
            return i
    raise TilebeamError(f"This llama.cpp has no operation {name}.")


def _array(t: Any, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """A view of a tensor in host memory, numpy's order of dimensions."""
    last = sum((t.ne[i] - 1) * t.nb[i] for i in range(4)) + np.dtype(dtype).itemsize
    raw = (ctypes.c_char * last).from_address(t.data)
    strides = tuple(t.nb[i] for i in reversed(range(4)))
    return np.ndarray(tuple(t.ne[i] for i in reversed(range(4))), dtype, raw, strides=strides)


@dataclass
class Collector:
    """Sums of squares by weight tensor, through the scheduler's callback; `error` is what went wrong in there, `enough`
    ends a window before its last op."""

    process_output: bool = False
    sums: dict[str, Sums] = field(default_factory=dict)
    error: BaseException | None = None
    enough: bool = False

    def __post_init__(self) -> None:
        self._mul_mat, self._mul_mat_id = _operation("MUL_MAT"), _operation("MUL_MAT_ID")
        self.callback = C.ggml_backend_sched_eval_callback(self._seen)

    def _name(self, weight: Any) -> str:
        name = bytes(weight.name).decode("utf-8", "replace")
        found = COPY.fullmatch(name)
        name = found[1] if found else name
        return OUTPUT if name == EMBEDDING else name  # a tied output matrix

    def _seen(self, pointer: int, ask: bool, _data: Any) -> bool:
        """The scheduler asks which results it should stop at, and shows them. False ends the graph."""
        try:
            t = ctypes.cast(pointer, ctypes.POINTER(Tensor)).contents
            if ask:
                return self._wants(t)
            self._add(t)
            return not self.enough
        except BaseException as e:  # nothing may leave a callback of C
            self.error = e
            return False

    def _wants(self, t: Any) -> bool:
        if t.op not in (self._mul_mat, self._mul_mat_id):
            return False
        weight, x = t.src[0].contents, t.src[1].contents
        if t.op == self._mul_mat_id:
            return True
        if x.ne[1] < MIN_ROWS or x.type != TYPE_F32:
            return False
        name = self._name(weight)
        return name.startswith("blk.") or (self.process_output and name == OUTPUT)

    def _add(self, t: Any) -> None:
        weight, x = t.src[0].contents, t.src[1].contents
        values, name = _array(x, np.float32), self._name(weight)
        k = int(x.ne[0])
        if t.op == self._mul_mat_id:
            experts = int(weight.ne[2])
            entry = self._entry(name, experts, experts, k)
            ids = _array(t.src[2].contents, np.int32)[0, 0]  # (tokens, experts used)
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
    """Sums of squares over rows (n, K)."""
    x = rows.astype(np.float64)
    out: npt.NDArray[np.float64] = np.einsum("nk,nk->k", x, x)
    return out


def _context(lm: LM, n_ctx: int, threads: int, collector: Collector) -> Context:
    p = C.llama_context_default_params()
    p.n_ctx = p.n_batch = p.n_ubatch = n_ctx
    p.n_seq_max = 1
    p.n_threads = p.n_threads_batch = threads
    p.cb_eval = collector.callback
    p.no_perf = True
    with log_router().capture():
        pointer = C.llama_init_from_model(lm._model.pointer, p)
    if not pointer:
        raise TilebeamError(f"llama.cpp cannot make a context of {n_ctx} tokens for this model.")
    return Context(pointer, lm._model, n_ctx, n_ctx)


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
        Sums by tensor name, for :func:`tilebeam.gguf.imatrix.save_imatrix`.

    Raises:
        TilebeamError: decoding fails, or an activation is not a number.
    """
    collector = Collector(process_output)
    decode(lm, windows, collector, threads=threads, progress=progress)
    return collector.sums


def decode(
    lm: LM,
    windows: Windows,
    collector: Collector,
    *,
    threads: int,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Decode windows of text under the eyes of a collector; all positions have outputs. As `collect`."""
    lm.check_generates()
    context = _context(lm, windows.n_ctx, threads, collector)
    try:
        for i in range(len(windows)):
            n = windows.n_ctx
            context.clear()
            context.token[:n] = windows.inputs(i)
            context.pos[:n] = np.arange(n)
            context.seq[:n] = 0
            context.output[:n] = 1
            collector.enough = False
            status = context.decode(n)
            if collector.error is not None:
                raise collector.error
            if status != 0 and not collector.enough:
                raise TilebeamError(f"llama.cpp could not decode window {i} (status {status}).")
            if progress:
                progress(i + 1)
    finally:
        with log_router().capture():
            context.close()
