"""Fits a head to collected states: L-BFGS on the cross entropy, stopped early, calibrated, all by held-out problems.

Problems are split into three parts: to learn from, to stop, choose and calibrate by, and to report on, which nothing
else looks at.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from tilebeam.errors import TilebeamError
from tilebeam.evaluation.log import Record
from tilebeam.scoring.reward_heads import Head, sigmoid
from tilebeam.text_state import NARROW, Feature, width
from tilebeam.training.collection import FEATURES
from tilebeam.training.options import FitOptions

Array = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Loss = Callable[[Array], tuple[float, Array]]

PARTS = ("train", "choose", "report")
_TURNS = ("train", "choose", "train", "report", "train", "train", "train")
_SETS: tuple[tuple[Feature, ...], ...] = (
    ("length", "confidence"),
    ("mean", "length", "confidence"),
    ("recent", "length", "confidence"),
    ("last", "length", "confidence"),
    ("mean", "recent", "last", "length", "confidence"),
)
_DECAYS = (0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)  # weight of the squares of the weights, strong ones first
_STEPS, _PATIENCE = 200, 8
_ROUNDED = 2e-3  # of a float16


@dataclass(frozen=True)
class Samples:
    """Judged samples of one part.

    Attributes:
        records: of the samples.
        problem: number of each one's problem.
        ends: row of each one's end.
        rows, owner: all rows, ends included, and the sample that each belongs to.
    """

    records: list[Record]
    problem: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    owner: npt.NDArray[np.int64]

    @property
    def correct(self) -> Doubles:
        """How right each sample is, 0 to 1."""
        return np.array([r["correct"] for r in self.records], np.float64)

    def grouped(self) -> list[list[int]]:
        """Numbers of the samples of each problem."""
        return [np.flatnonzero(self.problem == p).tolist() for p in np.unique(self.problem)]


def parts_of(records: Sequence[Record], seed: int) -> dict[str, str]:
    """The part of each problem: in an order that the seed decides, problems that were solved now and then, always or
    never each by themselves, so that all parts have their share of them."""

    def order(record: Record) -> tuple[int, bytes]:
        kinds = {s["correct"] >= 0.5 for s in record["samples"]}
        return -len(kinds), hashlib.sha256(f"{seed}/{record['unit']}".encode()).digest()

    solved = [[r for r in records if (max(s["correct"] for s in r["samples"]) >= 0.5) is is_] for is_ in (True, False)]
    ordered = [r for group in solved for r in sorted(group, key=order)]
    return {r["unit"]: _TURNS[i % len(_TURNS)] for i, r in enumerate(ordered)}


def split(records: Sequence[Record], seed: int) -> dict[str, Samples]:
    """The samples of each part.

    Raises:
        TilebeamError: a part has no right or no wrong samples.
    """
    found, of = {}, parts_of(records, seed)
    for part in PARTS:
        chosen = [(i, r) for i, r in enumerate(records) if of[r["unit"]] == part]
        samples: list[Record] = []
        problem: list[int] = []
        ends: list[int] = []
        rows: list[int] = []
        owner: list[int] = []
        for number, record in chosen:
            row = record["row"]
            for sample in record["samples"]:
                rows += range(row, row + sample["states"])
                owner += [len(samples)] * sample["states"]
                row += sample["states"]
                samples.append(sample)
                problem.append(number)
                ends.append(row - 1)
        if len({s["correct"] >= 0.5 for s in samples}) < 2:
            raise TilebeamError(
                f"There is too little to learn from: of {len(records)} problems {len(chosen)} are held for the part "
                f"{part!r}, whose {len(samples)} samples are not both right and wrong. Collect more --items, or choose "
                "problems that the model sometimes solves."
            )
        found[part] = Samples(samples, *(np.array(a, np.int64) for a in (problem, ends, rows, owner)))
    return found


@dataclass(frozen=True)
class Fitted:
    """A head, and what was tried for it.

    Attributes:
        head: calibrated.
        decay: the chosen one.
        tried: of each set of features and decay the loss on problems to choose by.
    """

    head: Head
    decay: float
    tried: list[dict[str, object]]


def fit(
    states: npt.NDArray[np.float16],
    parts: dict[str, Samples],
    options: FitOptions,
    maker: dict[str, str],
    progress: Callable[[int, int], object] | None = None,
) -> Fitted:
    """The head that does best on the problems to choose by.

    Args:
        states: rows of `Collection.states`.
        maker: what the head's file says of the model.
        progress: called with fits done, and all.
    """
    sets = [cast(tuple[Feature, ...], options.features)] if options.features else list(_SETS)
    total = len(sets) * len(_DECAYS)
    best: tuple[float, Head, float] | None = None
    tried: list[dict[str, object]] = []
    for names in sets:
        for decay, loss, head in _path(states, parts, names, options, maker):
            tried.append({"features": list(names), "decay": decay, "loss": loss})
            if progress is not None:
                progress(len(tried), total)
            if best is None or loss < best[0]:
                best = loss, head, decay
    assert best is not None
    return Fitted(calibrated(best[1], states, parts["choose"]), best[2], tried)


def inputs(states: npt.NDArray[np.float16], rows: npt.NDArray[np.int64], names: Sequence[Feature]) -> Array:
    """Features of rows: float32 [rows, inputs]."""
    n = n_embd_of(states)
    sizes = [width([name], n) for name in FEATURES]
    first = dict(zip(FEATURES, itertools.accumulate(sizes, initial=0), strict=False))
    wide = [slice(first[name], first[name] + width([name], n)) for name in names]
    return np.concatenate([states[rows, part].astype(np.float32) for part in wide], axis=1)


def n_embd_of(states: npt.NDArray[np.float16]) -> int:
    """Elements of a hidden state."""
    narrow = sum(NARROW.values())
    return int(states.shape[1] - narrow) // (len(FEATURES) - len(NARROW))


def _path(
    states: npt.NDArray[np.float16],
    parts: dict[str, Samples],
    names: tuple[Feature, ...],
    options: FitOptions,
    maker: dict[str, str],
) -> Iterator[tuple[float, float, Head]]:
    """Decay, loss and head for each decay; each fit goes on from the one before."""
    train, choose = parts["train"], parts["choose"]
    x = inputs(states, train.rows, names)
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
    y = train.correct[train.owner].astype(np.float32)
    held, held_y = (inputs(states, choose.ends, names) - mean) / scale, choose.correct
    network = _Network(x.shape[1], options.hidden, options.seed)
    weights = network.start(float(np.clip(y.mean(), 0.01, 0.99)))
    for decay in _DECAYS:
        seen = _Best(lambda w: cross_entropy(network.logits(w, held).astype(np.float64), held_y))
        minimize(network.loss(x, y, _row_weights(train), decay), weights, seen)
        weights = seen.weights
        layers = network.layers(weights)
        w, b = layers[0]
        layers[0] = (w / scale, b - (w / scale) @ mean)
        yield decay, seen.loss, Head(tuple(layers), "sigmoid", features=names, maker=maker)


def _row_weights(samples: Samples) -> Array:
    """Of rows: a sample's end counts as much as its beginnings together; all together 1."""
    counts = np.bincount(samples.owner)[samples.owner]
    is_end = np.isin(samples.rows, samples.ends)
    weights = np.where(counts == 1, 1.0, np.where(is_end, 0.5, 0.5 / np.maximum(1, counts - 1)))
    return np.asarray(weights / weights.sum(), np.float32)


class _Best:
    """Looks at held-out loss after every step; says when it has not fallen for long."""

    def __init__(self, loss_of: Callable[[Array], float]) -> None:
        self._loss_of = loss_of
        self.loss = float("inf")
        self.weights = np.zeros(0, np.float32)
        self._since = 0

    def __call__(self, weights: Array) -> bool:
        loss = self._loss_of(weights)
        if loss < self.loss:
            self.loss, self.weights, self._since = loss, weights.copy(), 0
        else:
            self._since += 1
        return self._since < _PATIENCE


class _Network:
    """A logistic regression, or one hidden layer with ReLU, over a flat vector of weights."""

    def __init__(self, n: int, hidden: int, seed: int) -> None:
        self._shapes = [(hidden, n), (hidden,), (1, hidden), (1,)] if hidden else [(1, n), (1,)]
        self._seed = seed

    def start(self, share: float) -> Array:
        """First weights; `share` of the samples is right."""
        rng = np.random.default_rng(self._seed)
        parts = [
            rng.normal(0, 1 if i == 0 else s[1] ** -0.5, s) if len(s) == 2 and len(self._shapes) > 2 else np.zeros(s)
            for i, s in enumerate(self._shapes)
        ]
        parts[-1][:] = np.log(share / (1 - share))
        return np.concatenate([p.ravel() for p in parts]).astype(np.float32)

    def _parts(self, weights: Array) -> list[Array]:
        sizes = [int(np.prod(s)) for s in self._shapes]
        cut = np.split(weights, np.cumsum(sizes)[:-1])
        return [part.reshape(shape) for part, shape in zip(cut, self._shapes, strict=True)]

    def layers(self, weights: Array) -> list[tuple[Array, Array]]:
        """(weight, bias) of each layer."""
        parts = [p.copy() for p in self._parts(weights)]
        return list(zip(parts[::2], parts[1::2], strict=True))

    def logits(self, weights: Array, x: Array) -> Array:
        """Of rows: float32 [rows]."""
        for i, (w, b) in enumerate(self.layers(weights)):
            x = (np.maximum(x, 0) if i else x) @ w.T + b
        return x[:, 0]

    def loss(self, x: Array, y: Array, row_weights: Array, decay: float) -> Loss:
        """Cross entropy and decay, with gradient."""

        def value(weights: Array) -> tuple[float, Array]:
            parts = self._parts(weights)
            below = x @ parts[0].T + parts[1]
            z = (np.maximum(below, 0) @ parts[2].T + parts[3] if len(parts) > 2 else below)[:, 0].astype(np.float64)
            total = float(row_weights @ (np.logaddexp(0, z) - y * z))
            d = (row_weights * (sigmoid(z) - y)).astype(np.float32)[:, None]
            if len(parts) == 2:
                grads = [d.T @ x, d.sum(0)]
            else:
                above = np.maximum(below, 0)
                lower = (d @ parts[2]) * (below > 0)
                grads = [lower.T @ x, lower.sum(0), d.T @ above, d.sum(0)]
            for i in range(0, len(parts), 2):
                total += decay / 2 * float((parts[i].astype(np.float64) ** 2).sum())
                grads[i] = grads[i] + decay * parts[i]
            return total, np.concatenate([g.ravel() for g in grads]).astype(np.float32)

        return value


def cross_entropy(logits: Doubles, right: Doubles) -> float:
    """Mean of -log of what a sample's own label was given."""
    return float((np.logaddexp(0, logits) - right * logits).mean())


def minimize(loss: Loss, start: Array, goes_on: Callable[[Array], bool], memory: int = 10) -> None:
    """L-BFGS (Nocedal & Wright, algorithm 7.5) with backtracking, until a minimum, or `goes_on` of the weights after a
    step says no."""
    w = start
    value, grad = loss(w)
    steps: deque[tuple[Array, Array, float]] = deque(maxlen=memory)
    if not goes_on(w):
        return
    for _ in range(_STEPS):
        direction = -_scaled(grad, steps)
        slope = float(grad @ direction)
        if slope > -1e-12:
            return
        size = 1.0 if steps else min(1.0, 1 / float(np.abs(grad).sum()))
        while True:
            new = w + np.float32(size) * direction
            new_value, new_grad = loss(new)
            if new_value <= value + 1e-4 * size * slope:
                break
            size /= 2
            if size < 1e-8:
                return
        s, y = new - w, new_grad - grad
        curvature = float(s @ y)
        if curvature > 1e-12:
            steps.append((s, y, curvature))
        converged = value - new_value < 1e-7 * max(1.0, abs(value))
        w, value, grad = new, new_value, new_grad
        if not goes_on(w) or converged:
            return


def _scaled(grad: Array, steps: Sequence[tuple[Array, Array, float]]) -> Array:
    """The gradient times what is known of the inverse Hessian."""
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


def calibrated(head: Head, states: npt.NDArray[np.float16], samples: Samples) -> Head:
    """The head whose logits are stretched and moved so that its scores are probabilities on these samples (Platt 1999,
    with his targets, which few samples do not drive to 0 and 1)."""
    scores = np.clip(head(inputs(states, samples.ends, head.features)), 1e-7, 1 - 1e-7)
    z = np.log(scores / (1 - scores)).astype(np.float32)
    one = _Network(1, 0, 0)
    right = samples.correct.sum()
    low, high = 1 / (len(z) - right + 2), (right + 1) / (right + 2)
    targets = low + (high - low) * samples.correct
    seen = _Best(lambda w: cross_entropy(one.logits(w, z[:, None]).astype(np.float64), targets))
    row_weights = np.full(len(z), 1 / len(z), np.float32)
    minimize(one.loss(z[:, None], targets.astype(np.float32), row_weights, 1e-4), np.array([1, 0], np.float32), seen)
    stretch, move = seen.weights
    stretch = max(stretch, np.float32(0.05))  # the order stays
    (*below, (w, b)) = head.layers
    return Head((*below, (w * stretch, b * stretch + move)), "sigmoid", features=head.features, maker=head.maker)
