"""Fits a head to collected states: L-BFGS on the cross entropy with weight decay, in folds of problems.

Problems are few and samples of one problem alike, so no problem is set aside: each fold is rated by heads that learnt
from the others, and these ratings choose features and decay, calibrate, and are what is reported. The head is the mean
of the folds' heads.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import numpy as np
import numpy.typing as npt

from tilebeam.errors import TilebeamError
from tilebeam.evaluation.log import Record
from tilebeam.scoring.reward_heads import Head, sigmoid
from tilebeam.text_state import NARROW, Feature, width
from tilebeam.training.collection import FEATURES

Array = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Loss = Callable[[Array], tuple[float, Array]]

FOLDS = 5
_SETS: tuple[tuple[Feature, ...], ...] = (
    ("length", "confidence"),
    ("mean", "length", "confidence"),
    ("recent", "length", "confidence"),
    ("last", "length", "confidence"),
    ("mean", "recent", "last", "length", "confidence"),
)
_DECAYS = (0.003, 0.001, 0.0003, 0.0001, 0.00003, 0.00001)  # weight of the squares of the weights, strong ones first
_STEPS = 200
_ROUNDED = 2e-3  # of a float16


@dataclass(frozen=True)
class Samples:
    """Judged samples.

    Attributes:
        records: of the samples.
        problem: number of each one's problem.
        fold: of each one's problem, 0 .. FOLDS - 1.
        ends: row of each one's end.
        rows, owner: all rows, ends included, and the sample that each belongs to.
    """

    records: list[Record]
    problem: npt.NDArray[np.int64]
    fold: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    owner: npt.NDArray[np.int64]

    @cached_property
    def at_end(self) -> npt.NDArray[np.bool_]:
        """Return for each row whether it is the end of its sample."""
        return np.isin(self.rows, self.ends)

    @property
    def correct(self) -> Doubles:
        """The share of each sample that is right, 0 to 1."""
        return np.array([r["correct"] for r in self.records], np.float64)


def folds_of(records: Sequence[Record], seed: int) -> list[int]:
    """Assign each problem to a fold: in an order that the seed decides, problems that were solved now and then, always
    or never each by themselves, so that all folds have their share of them."""

    def order(i: int) -> tuple[int, bool, bytes]:
        kinds = {s["correct"] >= 0.5 for s in records[i]["samples"]}
        name = f"{seed}/{records[i]['unit']}".encode(errors="surrogatepass")
        return len(kinds), True in kinds, hashlib.sha256(name).digest()

    folds = [0] * len(records)
    for place, i in enumerate(sorted(range(len(records)), key=order)):
        folds[i] = place % FOLDS
    return folds


def samples_of(records: Sequence[Record], seed: int) -> Samples:
    """Take the samples of collected problems, to learn from.

    Raises:
        TilebeamError: the folds besides one have no right or no wrong samples.
    """
    found = gathered(records, folds_of(records, seed))
    for fold in range(FOLDS):
        kinds = set((found.correct[found.fold != fold] >= 0.5).tolist())
        if len(kinds) < 2 or not (found.fold == fold).any():
            raise TilebeamError(
                f"There is too little to learn from: {len(records)} problems in {FOLDS} folds, and the samples of all "
                "but one are not both right and wrong. Collect more --items, or choose problems that the model "
                "sometimes solves."
            )
    return found


def gathered(records: Sequence[Record], folds: Sequence[int]) -> Samples:
    """Take the samples of collected problems, each problem in its fold."""
    samples: list[Record] = []
    columns: dict[str, list[int]] = {name: [] for name in ("problem", "fold", "ends", "rows", "owner")}
    for number, (record, fold) in enumerate(zip(records, folds, strict=True)):
        row = record["row"]
        for sample in record["samples"]:
            columns["rows"] += range(row, row + sample["states"])
            columns["owner"] += [len(samples)] * sample["states"]
            row += sample["states"]
            samples.append(sample)
            columns["problem"].append(number)
            columns["fold"].append(fold)
            columns["ends"].append(row - 1)
    return Samples(samples, **{name: np.array(column, np.int64) for name, column in columns.items()})


@dataclass(frozen=True)
class Fitted:
    """A head, and what was tried for it.

    Attributes:
        head: calibrated, the mean of those of the folds.
        decay: the chosen one.
        scores: of each row of `Samples.rows`, by heads that did not learn from its problem; what was chosen for them,
            features, decay and calibration, goes by the other folds, too.
        tried: of each set of features and decay the loss on problems that the head did not learn from.
    """

    head: Head
    decay: float
    scores: Doubles
    tried: list[dict[str, object]]


@dataclass
class _FittedSetting:
    """A set of features and a decay: the folds' heads, and what they say of the rows that they did not learn from."""

    names: tuple[Feature, ...]
    decay: float
    heads: list[Head]
    logits: Doubles

    def losses(self, samples: Samples) -> Doubles:
        """Return the loss of each fold, summed over its samples."""
        at_ends = self.logits[samples.at_end]
        each = np.logaddexp(0, at_ends) - samples.correct * at_ends
        return np.bincount(samples.fold, each, FOLDS).astype(np.float64)


def fit(
    states: npt.NDArray[np.float16],
    samples: Samples,
    features: tuple[str, ...],
    maker: dict[str, str],
    progress: Callable[[int, int], object] | None = None,
) -> Fitted:
    """Fit the head that does best on problems that it did not learn from.

    Args:
        states: rows of `Collection.states`.
        features: that it reads; empty: those that do best.
        maker: what the head's file says of the model.
        progress: called with fits done, and all.
    """
    sets = [cast(tuple[Feature, ...], features)] if features else list(_SETS)
    total = len(sets) * FOLDS * len(_DECAYS)
    candidates: list[_FittedSetting] = []
    for names in sets:
        path = [_FittedSetting(names, decay, [], np.zeros(len(samples.rows))) for decay in _DECAYS]
        for fold in range(FOLDS):
            held = samples.fold[samples.owner] == fold
            x = inputs(states, samples.rows[held], names)
            for candidate, head in zip(path, _path(states, samples, fold, names, maker), strict=True):
                candidate.heads.append(head)
                candidate.logits[held] = logits_of(head(x))
                if progress is not None:
                    progress(len(candidates) * FOLDS + sum(len(c.heads) for c in path), total)
        candidates += path
    losses = np.array([c.losses(samples) for c in candidates])
    best = candidates[int(losses.sum(1).argmin())]
    tried: list[dict[str, object]] = [
        {"features": list(c.names), "decay": c.decay, "loss": float(row.sum() / len(samples.records))}
        for c, row in zip(candidates, losses, strict=True)
    ]
    head = calibrated(mean_of(best.heads), *_calibration(best.logits, samples, samples.fold >= 0))
    return Fitted(head, best.decay, _held_out(candidates, losses, samples), tried)


def _held_out(candidates: Sequence[_FittedSetting], losses: Doubles, samples: Samples) -> Doubles:
    """Return scores of all rows; of each fold by the candidate that the others choose, as the others calibrate it."""
    scores = np.zeros(len(samples.rows))
    for fold in range(FOLDS):
        chosen = candidates[int(np.delete(losses, fold, axis=1).sum(1).argmin())]
        stretch, move = _calibration(chosen.logits, samples, samples.fold != fold)
        rows = samples.fold[samples.owner] == fold
        scores[rows] = sigmoid(stretch * chosen.logits[rows] + move)
    return scores


def logits_of(scores: npt.ArrayLike) -> Doubles:
    """Invert a sigmoid."""
    clipped = np.clip(scores, 1e-7, 1 - 1e-7)
    return np.asarray(np.log(clipped / (1 - clipped)))


def mean_of(heads: Sequence[Head]) -> Head:
    """Make the head whose logit is the mean of theirs."""
    weights, biases = (np.stack([h.layers[0][i] for h in heads]).mean(0).astype(np.float32) for i in (0, 1))
    return replace(heads[0], layers=((weights, biases),))


def inputs(states: npt.NDArray[np.float16], rows: npt.NDArray[np.int64], names: Sequence[Feature]) -> Array:
    """Return features of rows: float32 [rows, inputs]."""
    n = n_embd_of(states)
    sizes = [width([name], n) for name in FEATURES]
    first = dict(zip(FEATURES, itertools.accumulate(sizes, initial=0), strict=False))
    wide = [slice(first[name], first[name] + width([name], n)) for name in names]
    return np.concatenate([states[rows, part].astype(np.float32) for part in wide], axis=1)


def n_embd_of(states: npt.NDArray[np.float16]) -> int:
    """Return elements of a hidden state."""
    narrow = sum(NARROW.values())
    return int(states.shape[1] - narrow) // (len(FEATURES) - len(NARROW))


def _path(
    states: npt.NDArray[np.float16],
    samples: Samples,
    fold: int,
    names: tuple[Feature, ...],
    maker: dict[str, str],
) -> Iterator[Head]:
    """Fit a head for each decay on the other folds; each fit goes on from the one before."""
    learnt = samples.fold[samples.owner] != fold
    x = inputs(states, samples.rows[learnt], names)
    mean = x.mean(0, dtype=np.float64)
    x -= mean.astype(np.float32)
    scale = np.sqrt(np.einsum("ij,ij->j", x, x, dtype=np.float64) / len(x))
    # What differs by less than the states were rounded by says nothing.
    scale = np.maximum(scale, _ROUNDED * np.abs(mean) + 1e-6).astype(np.float32)
    # The elements of hidden states weigh together what a single value weighs: of so many, most are noise.
    n = n_embd_of(states)
    scale *= np.sqrt(np.concatenate([np.full(width([f], n), 1 if f in NARROW else n) for f in names])).astype(
        np.float32
    )
    mean = mean.astype(np.float32)
    x /= scale
    y = samples.correct[samples.owner[learnt]].astype(np.float32)
    weights = np.zeros(x.shape[1] + 1, np.float32)
    weights[-1] = logits_of(np.clip(y.mean(), 0.01, 0.99))
    row_weights = _row_weights(samples)[learnt]
    row_weights /= row_weights.sum()
    for decay in _DECAYS:
        weights = minimize(cross_entropy(x, y, row_weights, decay), weights)
        w = weights[:-1] / scale
        yield Head(((w[None], weights[-1:] - w @ mean),), "sigmoid", features=names, maker=maker)


def _row_weights(samples: Samples) -> Array:
    """Return the weights of rows: a sample's end counts as much as its beginnings together."""
    counts = np.bincount(samples.owner)[samples.owner]
    return np.where(counts == 1, 1.0, np.where(samples.at_end, 0.5, 0.5 / np.maximum(1, counts - 1))).astype(np.float32)


def cross_entropy(x: Array, y: Array, row_weights: Array, decay: float) -> Loss:
    """Make the loss of a logistic regression, with its gradient: cross entropy, and the decay of all weights but the
    last, which is the bias.

    Args:
        x: float32 [rows, inputs]; y: 0 to 1, [rows].
    """

    def value(weights: Array) -> tuple[float, Array]:
        w = weights[:-1]
        z = (x @ w + weights[-1]).astype(np.float64)
        total = float(row_weights @ (np.logaddexp(0, z) - y * z)) + decay / 2 * float((w.astype(np.float64) ** 2).sum())
        d = (row_weights * (sigmoid(z) - y)).astype(np.float32)
        return total, np.append(d @ x + decay * w, d.sum()).astype(np.float32)

    return value


def minimize(loss: Loss, start: Array) -> Array:
    """Minimize by L-BFGS (Nocedal & Wright, algorithm 7.5) with backtracking, 200 steps at most: the weights."""
    w = start
    value, grad = loss(w)
    steps: deque[tuple[Array, Array, float]] = deque(maxlen=10)
    for _ in range(_STEPS):
        direction = -_scaled(grad, steps)
        slope = float(grad @ direction)
        if slope > -1e-12:
            break
        size = 1.0 if steps else min(1.0, 1 / float(np.abs(grad).sum()))
        while True:
            new = w + np.float32(size) * direction
            new_value, new_grad = loss(new)
            if new_value <= value + 1e-4 * size * slope:
                break
            size /= 2
            if size < 1e-8:
                return w
        s, y = new - w, new_grad - grad
        curvature = float(s @ y)
        if curvature > 1e-12:
            steps.append((s, y, curvature))
        converged = value - new_value < 1e-6 * max(1.0, abs(value))
        w, value, grad = new, new_value, new_grad
        if converged:
            break
    return w


def _scaled(grad: Array, steps: Sequence[tuple[Array, Array, float]]) -> Array:
    """Multiply the gradient by what is known of the inverse Hessian."""
    q = grad.copy()
    shares = []
    for s, y, curvature in reversed(steps):
        share = np.float32(float(s @ q) / curvature)
        shares.append(share)
        q -= share * y
    if steps:
        _, y, curvature = steps[-1]
        q *= np.float32(curvature / float(y @ y))
    for (s, y, curvature), share in zip(steps, reversed(shares), strict=True):
        q += (share - np.float32(float(y @ q) / curvature)) * s
    return q


def _calibration(logits: Doubles, samples: Samples, chosen: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """Calibrate logits, of all rows, on the ends of chosen samples."""
    return platt(logits[samples.at_end][chosen], samples.correct[chosen])


def platt(logits: Doubles, correct: Doubles) -> tuple[float, float]:
    """Find how to stretch and move logits so that they are those of probabilities (Platt 1999, with his targets, which
    few samples do not drive to 0 and 1)."""
    z, right = logits.astype(np.float32), correct.sum()
    low, high = 1 / (len(z) - right + 2), (right + 1) / (right + 2)
    targets = (low + (high - low) * correct).astype(np.float32)
    row_weights = np.full(len(z), 1 / len(z), np.float32)
    stretch, move = minimize(cross_entropy(z[:, None], targets, row_weights, 1e-4), np.array([1, 0], np.float32))
    return max(float(stretch), 0.05), float(move)  # the order stays


def calibrated(head: Head, stretch: float, move: float) -> Head:
    """Stretch and move a head's logits."""
    [(w, b)] = head.layers
    return replace(head, layers=((w * np.float32(stretch), b * np.float32(stretch) + np.float32(move)),))
