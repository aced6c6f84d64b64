"""llama-perplexity's file of log-probabilities (--save-all-logits, --kl-divergence-base): write one, read one.

The file (llama.cpp, tools/perplexity) holds "_logits_", n_ctx, n_vocab and the number of windows as int32, the tokens
as int32, then for every scored token a row: float32 scale, float32 lowest log-probability, and n_vocab (rounded up to
even) uint16 numbers q, which stand for log-probabilities lowest + scale * q. What is more than 16 below the top logit
is cut off there. Every figure made from such a file has that rounding in it; a model as the base has not.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from tilebeam.engine.reading import log_sum_exp
from tilebeam.errors import TilebeamError
from tilebeam.gguf.whole_file import whole_file
from tilebeam.measure.perplexity import F32, I32, Prediction, Scorer, Windows

MAGIC = b"_logits_"
_HEADER = struct.Struct("<8s3i")
_REACH = 16.0  # nats below the top logit that a row covers
_LEAST = np.float32(-16.0)  # log-probabilities below this are left out of a divergence


def is_logits_file(path: str | os.PathLike[str]) -> bool:
    """Whether a file begins like one of llama-perplexity's."""
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _row_words(n_vocab: int) -> int:
    """uint16 words of a row."""
    return 2 * ((n_vocab + 1) // 2) + 4


class Quantized:
    """A base's prediction as a row of the file."""

    def __init__(self, words: npt.NDArray[np.uint16], n_vocab: int) -> None:
        self._scale, self._lowest = words[:4].view(np.float32)
        self._q = words[4 : 4 + n_vocab]

    def nll(self, target: int) -> float:
        """Negative log-likelihood of a token, as far as the file knows it."""
        return -float(self._scale * np.float32(self._q[target]) + self._lowest)

    def divergence(self, row: F32, log_sum: float, work: F32, weights: F32) -> tuple[int, float]:
        """See Prediction. As llama-perplexity sums it: over tokens above -16, whose probabilities are not quite 1."""
        np.multiply(self._q, self._scale, out=work, dtype=np.float32)
        np.add(work, self._lowest, out=work)
        np.exp(work, out=weights)
        weights[work <= _LEAST] = 0.0
        total = float(weights.sum(dtype=np.float64))
        np.subtract(work, row, out=work)
        np.multiply(work, weights, out=work)
        return int(self._q.argmax()), float(work.sum(dtype=np.float64)) + log_sum * total


class LogitsFile:
    """A base read from a file, and the windows it was made from. A context manager.

    Raises:
        TilebeamError: the file is not one of llama-perplexity's, or is shorter than it says.
    """

    def __init__(self, path: str | os.PathLike[str], bos: int | None) -> None:
        self.path = Path(path)
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            head = file.read(_HEADER.size)
            if len(head) < _HEADER.size or not head.startswith(MAGIC):
                raise TilebeamError(f"{self.path} is not a file of log-probabilities that llama-perplexity wrote.")
            _, n_ctx, n_vocab, n_windows = _HEADER.unpack(head)
            if n_ctx < 4 or n_vocab < 1 or n_windows < 1:
                raise TilebeamError(
                    f"{self.path} says it has {n_windows} windows of {n_ctx} tokens of a vocabulary of {n_vocab}."
                )
            row_bytes = 2 * _row_words(n_vocab)
            scored = n_ctx - 1 - n_ctx // 2
            wanted = _HEADER.size + 4 * n_ctx * n_windows + n_windows * scored * row_bytes
            if size < wanted:
                raise TilebeamError(
                    f"{self.path} has {size} bytes, its {n_windows} windows need {wanted}: it was not written to its "
                    "end. Make it again."
                )
            tokens = np.fromfile(file, "<i4", n_ctx * n_windows).reshape(n_windows, n_ctx).astype(np.int32)
        self.n_vocab = n_vocab
        self.windows = Windows(tokens, bos)
        self._rows: npt.NDArray[np.uint16] = np.memmap(
            self.path,
            "<u2",
            mode="r",
            offset=_HEADER.size + 4 * n_ctx * n_windows,
            shape=(n_windows, scored, _row_words(n_vocab)),
        )

    def at_once(self, windows: Windows) -> int:
        """The file is mapped: any number of windows."""
        return len(windows)

    def predictions(self, windows: Windows, wanted: Sequence[int], scorer: Scorer) -> list[list[Prediction]]:
        """Rows of the wanted windows. `windows` must be the file's own, or the first of them."""
        del scorer
        if not np.array_equal(windows.tokens, self.windows.tokens[: len(windows)]):
            raise TilebeamError(f"{self.path} was made from another text.")
        return [[Quantized(words, self.n_vocab) for words in self._rows[w]] for w in wanted]


class LogitsWriter:
    """Writes such a file: give `add` to `measure` as its sink. A context manager; a file not finished is removed."""

    def __init__(self, path: str | os.PathLike[str], windows: Windows, n_vocab: int) -> None:
        self.path = Path(path)
        self._windows = windows
        self._n_vocab = n_vocab
        self._open = ExitStack()
        self._work: F32 = np.empty(n_vocab, np.float32)
        self._words: npt.NDArray[np.uint16] = np.zeros(_row_words(n_vocab), np.uint16)

    def add(self, rows: F32, targets: I32) -> None:
        """Append predictions, rows [n, n_vocab]."""
        del targets
        for row in rows:
            top, log_sum = log_sum_exp(row, self._work)
            highest = row[top]
            lowest = max(row.min(), highest - np.float32(_REACH))
            scale = np.float32(highest - lowest) / np.float32(65535.0)
            q = self._words[4 : 4 + self._n_vocab]
            if scale > 0:
                np.subtract(row, lowest, out=self._work)
                np.multiply(self._work, np.float32(1.0) / scale, out=self._work)
                np.clip(self._work, 0.0, 65535.0, out=self._work)
                np.rint(self._work, out=self._work)
                q[:] = self._work
            else:
                q[:] = 0
            self._words[:4].view(np.float32)[:] = scale, np.float32(float(lowest) - log_sum)
            self._file.write(self._words.data)

    def __enter__(self) -> LogitsWriter:
        with ExitStack() as stack:
            partial = stack.enter_context(whole_file(self.path))
            self._file = stack.enter_context(partial.open("wb"))
            self._file.write(_HEADER.pack(MAGIC, self._windows.n_ctx, self._n_vocab, len(self._windows)))
            self._file.write(self._windows.tokens.astype("<i4").tobytes())
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, error, trace)


def bytes_needed(windows: Windows, n_vocab: int) -> int:
    """Size of the file for these windows."""
    return _HEADER.size + windows.tokens.size * 4 + len(windows) * windows.scored * 2 * _row_words(n_vocab)
