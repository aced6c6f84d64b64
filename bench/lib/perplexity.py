"""Perplexity of models on a text, and how far their predictions are from a base's, as llama-perplexity measures them.

The text is cut into windows of n_ctx tokens without overlap, the first token of each replaced by BOS where the model
wants one; the second half of every window is scored (llama.cpp, tools/perplexity). The base is another model, run
beside the measured ones window by window, so that nothing of it is rounded or written.

Formulas, and the names of the figures, are llama-perplexity's: a mean over n tokens has the standard error
sqrt(variance / (n - 1)); the logarithms of two perplexities of the same text are compared with their covariance, which
makes the error of the difference much smaller than either's own.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tilebeam.engine.reading import log_sum_exp
from tilebeam.errors import TilebeamError
from tilebeam.model.lm import LM

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


# --- windows ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Windows:
    """A tokenized text cut into windows.

    Attributes:
        tokens: int32 [windows, n_ctx], as in the text.
        bos: what replaces each window's first token; None: nothing.
    """

    tokens: I32
    bos: int | None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def n_ctx(self) -> int:
        """Tokens per window."""
        return int(self.tokens.shape[1])

    @property
    def first(self) -> int:
        """The first position whose prediction is scored."""
        return self.n_ctx // 2

    @property
    def scored(self) -> int:
        """Predictions scored per window: those of positions first .. n_ctx - 2."""
        return self.n_ctx - 1 - self.first

    def inputs(self, window: int) -> I32:
        """Return what the model reads of a window, [n_ctx]."""
        row: I32 = self.tokens[window].copy()
        if self.bos is not None:
            row[0] = self.bos
        return row

    def targets(self, window: int) -> I32:
        """Return the tokens whose probability is measured, [scored]."""
        targets: I32 = self.tokens[window, self.first + 1 :]
        return targets


def cut(tokens: Sequence[int], n_ctx: int, bos: int | None, chunks: int = -1) -> Windows:
    """Return windows of a tokenized text.

    Args:
        tokens: the whole text, with its own BOS if the model adds one.
        n_ctx: tokens per window, at least 4.
        bos: replaces the first token of each window; None if the model wants no BOS.
        chunks: use only so many windows; -1: all.

    Raises:
        TilebeamError: the text has fewer than 2 * n_ctx tokens (llama-perplexity's own condition).
    """
    if n_ctx < 4:
        raise TilebeamError(f"A window has at least 4 tokens, not {n_ctx}.")
    if chunks == 0 or chunks < -1:
        raise TilebeamError(f"chunks must be positive, or -1 for all, not {chunks}.")
    if len(tokens) < 2 * n_ctx:
        raise TilebeamError(
            f"The text has {len(tokens)} tokens; windows of {n_ctx} need at least {2 * n_ctx}: "
            "take a longer text or a smaller context."
        )
    n = len(tokens) // n_ctx if chunks < 0 else min(chunks, len(tokens) // n_ctx)
    return Windows(np.asarray(tokens[: n * n_ctx], np.int32).reshape(n, n_ctx), bos)


def windows_of(lm: LM, text: str, n_ctx: int, chunks: int = -1) -> Windows:
    """Cut a text into windows with a model's own tokenizer; control tokens spelled out in the text are text."""
    tokens = lm.tokenize(text, parse_special=False)
    return cut(tokens, n_ctx, lm.bos if lm.adds_bos else None, chunks)


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class TokenScores:
    """What was measured of each scored token, in text order; NaN until it is.

    Attributes:
        nll, nll_base: negative log-likelihood, nats, and the base's.
        kld: KL divergence of this model from the base, nats.
        same_top: whether both think the same token likeliest.
    """

    nll: F64
    nll_base: F64
    kld: F64
    same_top: npt.NDArray[np.bool_]

    @staticmethod
    def empty(n: int) -> TokenScores:
        """Return room for n tokens."""
        return TokenScores(*(np.full(n, np.nan) for _ in range(3)), np.zeros(n, np.bool_))


def divergence(base: F32, base_sum: float, row: F32, row_sum: float, work: F32, weights: F32) -> float:
    """Return the KL divergence of softmax(row) from softmax(base), nats. Differences are taken before they are weighed:
    equal rows diverge by exactly 0.

    Args:
        base, row: logits, [n_vocab]; base_sum, row_sum: the logs of the sums of their exponentials.
        work, weights: scratch, [n_vocab].
    """
    np.subtract(base, np.float32(base_sum), out=weights)
    np.exp(weights, out=weights)
    np.subtract(base, row, out=work)
    np.multiply(work, weights, out=work)
    expected = float(work.sum(dtype=np.float64)) / float(weights.sum(dtype=np.float64))
    return expected - (base_sum - row_sum)


class LogitScorer:
    """Scores rows of logits on several threads (numpy lets go of the interpreter's lock); a context manager."""

    def __init__(self, n_vocab: int, threads: int) -> None:
        self._n_vocab = n_vocab
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)
        self._local = threading.local()

    def __enter__(self) -> LogitScorer:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def score(self, rows: F32, targets: I32, base: F32, out: TokenScores, at: int) -> None:
        """Score row i against its target and base[i], into out[at + i]."""

        def some(part: range) -> None:
            if not hasattr(self._local, "work"):
                self._local.work = np.empty((2, self._n_vocab), np.float32)
            work, weights = self._local.work
            for i in part:
                target = int(targets[i])
                top, log_sum = log_sum_exp(rows[i], work)
                base_top, base_sum = log_sum_exp(base[i], work)
                out.nll[at + i] = log_sum - float(rows[i][target])
                out.nll_base[at + i] = base_sum - float(base[i][target])
                out.kld[at + i] = divergence(base[i], base_sum, rows[i], log_sum, work, weights)
                out.same_top[at + i] = top == base_top

        share = max(1, -(-len(rows) // self._threads))
        list(self._pool.map(some, (range(i, min(len(rows), i + share)) for i in range(0, len(rows), share))))


@dataclass(frozen=True)
class Subject:
    """A model to be measured. `prepare` is called before each of its turns, to set the options of a shared device."""

    name: str
    lm: LM
    prepare: Callable[[], None] = lambda: None


def measure(
    subjects: Sequence[Subject],
    windows: Windows,
    base: Subject,
    *,
    threads: int = 1,
    seconds: dict[str, float] | None = None,
) -> dict[str, TokenScores]:
    """Score all windows with each subject, against the base.

    Args:
        subjects: models with distinct names; several may share one LM and differ in what `prepare` does.
        windows: of a text tokenized with these models' vocabulary.
        base: the model to compare with; it is decoded once.
        threads: for the sums over the vocabulary.
        seconds: the time that each subject's decoding took is added here.

    Returns:
        Scores of every scored token by subject.

    Raises:
        TilebeamError: vocabularies differ, windows do not fit, decoding fails, or logits are not numbers.
    """
    n_vocab = base.lm.n_vocab
    for subject in subjects:
        if subject.lm.n_vocab != n_vocab:
            raise TilebeamError(
                f"{subject.lm.info.path} has a vocabulary of {subject.lm.n_vocab} tokens, what it is compared with has "
                f"{n_vocab}: only models with the same tokenizer can be compared."
            )
    group = min(_at_once(s.lm, windows) for s in (*subjects, base))
    scores = {s.name: TokenScores.empty(len(windows) * windows.scored) for s in subjects}
    with LogitScorer(n_vocab, threads) as scorer:
        for start in range(0, len(windows), group):
            wanted = range(start, min(len(windows), start + group))
            expected = _read(base, windows, wanted)
            for subject in subjects:
                started = time.monotonic()
                rows = _read(subject, windows, wanted)
                if seconds is not None:
                    seconds[subject.name] = seconds.get(subject.name, 0.0) + time.monotonic() - started
                for window, own, others in zip(wanted, rows, expected, strict=True):
                    at = window * windows.scored
                    scorer.score(own, windows.targets(window), others, scores[subject.name], at)
    return scores


def _at_once(lm: LM, windows: Windows) -> int:
    """Return how many windows a model reads together: all their logits are in memory."""
    outputs = lm.max_outputs // windows.scored
    return max(1, min(lm.info.n_batch // windows.n_ctx, outputs, lm.n_seq_max, lm.n_ctx // windows.n_ctx))


def _read(subject: Subject, windows: Windows, wanted: Sequence[int]) -> list[F32]:
    """Read some windows; of each the logits that are scored, [scored, n_vocab]."""
    subject.prepare()
    with subject.lm.raw_decode():  # from the first cell on: where cells lie decides in what order attention adds up
        pass
    places = range(windows.first, windows.n_ctx - 1)
    found = subject.lm.read([windows.inputs(w).tolist() for w in wanted], [places] * len(wanted))
    return [reading.logits for reading in found]


# --- figures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A figure and its standard error."""

    value: float
    error: float


def mean(values: npt.NDArray[Any]) -> Estimate:
    """Return mean and its standard error, 0 with fewer than 2 values."""
    n = len(values)
    return Estimate(float(np.mean(values)), math.sqrt(float(np.var(values)) / (n - 1)) if n > 1 else 0.0)


def perplexity(nll: F64) -> Estimate:
    """Return exp of the mean negative log-likelihood."""
    log = mean(nll)
    ppl = math.exp(log.value)
    return Estimate(ppl, ppl * log.error)


def log_ratio(nll: F64, nll_other: F64) -> Estimate:
    """Return ln(PPL / PPL other) over the same tokens; its error is that of the mean of paired differences."""
    return mean(nll - nll_other)


@dataclass(frozen=True)
class Figures:
    """All figures of one model on one text.

    Attributes:
        n: tokens scored.
        ppl, ppl_base: perplexity, and the base's; log_ratio: ln(ppl / ppl_base).
        kld: mean KL divergence, nats; kld_percentiles: 99 and 50, by percentage; kld_max.
        same_top: share of tokens where both think the same one likeliest.
    """

    n: int
    ppl: Estimate
    ppl_base: Estimate
    log_ratio: Estimate
    kld: Estimate
    kld_percentiles: dict[float, float]
    kld_max: float
    same_top: Estimate


def figures(scores: TokenScores) -> Figures:
    """Return figures of all tokens that were measured; what is NaN was not."""
    done = np.isfinite(scores.nll)
    nll, base, kld, same = scores.nll[done], scores.nll_base[done], scores.kld[done], scores.same_top[done]
    return Figures(
        n=len(nll),
        ppl=perplexity(nll),
        ppl_base=perplexity(base),
        log_ratio=log_ratio(nll, base),
        kld=mean(kld),
        kld_percentiles={p: float(np.percentile(kld, p)) for p in (99.0, 50.0)},
        kld_max=float(kld.max()),
        same_top=mean(same),
    )
