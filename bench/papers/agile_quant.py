"""Agile-Quant's ways to less arithmetic, on a real model: 4-bit activations, integer attention, pruned prompts.

    python -m bench.papers.agile_quant -m MODEL.gguf -f wiki.test.raw [--windows 4] [-c 512] [--json] [--quick]

The weights are the file's, in float32, so what a row loses is its own: perplexity of the last tokens of each window,
against the same weights with nothing rounded. The forward pass is numpy's (bench/papers/numpy_model.py), architecture
qwen2; `tests/bench/test_agile_quant.py` compares it with llama.cpp. None of this is in the product:

    activations     all that enters a layer's products, by 8 or 4 bits: a scale for each 32 (the product's int8), or a
                    scale and a zero point for each token (the paper's). TRIP divides each channel by a power of two
                    first, which weights would be multiplied by: found by search on the first window, which is not
                    scored, for the least error under one scale of all its tokens
    QK              queries and keys in 8 bits, a scale for each head and token
    softmax         4 bits of its logarithm (weights 1, 1/2 .. 2^-7 of a row's greatest), values in 8 bits
    pruning         tokens that give the first token the least weight leave between layers, so that in the mean the
                    layers read a share less of the prompt (all but the window's last tokens); beside it, as many at
                    random

Last comes the paper's 4-bit multiplier: two weights in one 16-bit number, multiplied by one activation. Its rate of
products is compared with that of this CPU's 8-bit dot product, both in registers and cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.lib import limits, report
from bench.lib.options import Parser
from bench.papers import numpy_scores
from bench.papers.numpy_model import F32, SITES, Activations, Ints, Model, Numerics, Pruning, softmax
from bench.papers.numpy_scores import Way

FINEST = 4  # TRIP: channels are divided by up to 2^FINEST
GROUP = 32
PRUNED_FROM = 2  # layers that read all tokens


# --- activations ------------------------------------------------------------------------------------------------------


def grouped(x: F32, bits: int) -> F32:
    """Round with a scale for each 32, no zero point: the product's numerics with fewer bits."""
    g = x.reshape(len(x), -1, GROUP)
    most = np.float32(2 ** (bits - 1) - 1)
    scale = np.maximum(np.abs(g).max(axis=2, keepdims=True) / most, np.float32(1e-30))
    rounded: F32 = (np.rint(g / scale) * scale).reshape(x.shape)
    return rounded


def by_token(x: F32, bits: int) -> F32:
    """Round by the paper's uniform quantizer: a scale and a zero point for each token."""
    most = np.float32(2**bits - 1)
    low, high = np.minimum(x.min(axis=1, keepdims=True), 0), np.maximum(x.max(axis=1, keepdims=True), 0)
    scale = np.maximum((high - low) / most, np.float32(1e-30))
    zero = np.rint(-low / scale)
    rounded: F32 = (np.clip(np.rint(x / scale) + zero, 0, most) - zero) * scale
    return rounded


def trip_factors(x: F32, bits: int) -> F32:
    """By channel 2^a, 0 <= a <= FINEST, with the least squared error where one scale serves all tokens (n, channels).

    The scale is that of the whole range, divided by 2^FINEST; a channel with outliers takes the greatest factor.
    """
    scale = (x.max() - x.min()) / np.float32((2**bits - 1) * 2**FINEST)
    most = np.float32(2 ** (bits - 1))
    errors = []
    for a in range(FINEST + 1):
        step = scale * np.float32(2**a)
        rounded = np.clip(np.rint(x / step), -most, most) * step
        errors.append(np.sum((x - rounded) ** 2, axis=0))
    factors: F32 = np.exp2(np.argmin(errors, axis=0)).astype(np.float32)
    return factors


class Trip:
    """Another quantizer behind factors by channel, which come from what `watch` saw."""

    def __init__(self, bits: int, quantize: Callable[[F32, int], F32]) -> None:
        self._bits, self._quantize = bits, quantize
        self._factors: dict[tuple[int, str], F32] = {}

    def watch(self, layer: int, site: str, x: F32) -> F32:
        self._factors[layer, site] = trip_factors(x, self._bits)
        return x

    def __call__(self, layer: int, site: str, x: F32) -> F32:
        factors = self._factors[layer, site]
        return self._quantize(x / factors, self._bits) * factors


def plain(bits: int, quantize: Callable[[F32, int], F32], sites: tuple[str, ...] = SITES) -> Activations:
    return lambda _layer, site, x: quantize(x, bits) if site in sites else x


# --- attention --------------------------------------------------------------------------------------------------------


def symmetric(x: F32) -> F32:
    """8 bits, a scale for each row."""
    scale = np.maximum(np.abs(x).max(axis=-1, keepdims=True) / np.float32(127), np.float32(1e-30))
    rounded: F32 = np.rint(x / scale) * scale
    return rounded


def integer_scores(q: F32, k: F32, v: F32, seen: Any) -> tuple[F32, F32]:
    """QK by 8-bit integers."""
    weights = softmax(symmetric(q) @ symmetric(k).T, seen)
    return weights, weights @ v


def log2_softmax(q: F32, k: F32, v: F32, seen: Any) -> tuple[F32, F32]:
    """QK by 8-bit integers, weights 4 bits of a logarithm, values 8 bits: no product of floats is left.

    Weights are powers of two of the row's greatest, so a sum of values is one of shifts; what rounds to less than the
    smallest weighs nothing.
    """
    weights, _ = integer_scores(q, k, v, seen)
    greatest = weights.max(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        steps = np.rint(-np.log2(weights / greatest))
    rounded: F32 = np.where(steps < 8, np.exp2(-steps), 0).astype(np.float32)
    rounded /= rounded.sum(axis=1, keepdims=True)
    return weights, rounded @ symmetric(v)


# --- pruning ----------------------------------------------------------------------------------------------------------


def importance(to_first: F32) -> F32:
    """Rate tokens as the paper does: weight given to the first, as a share of what all before gave, log for later."""
    before = np.cumsum(to_first)
    score: F32 = (to_first / np.maximum(before, np.float32(1e-30)) * np.log(np.arange(len(to_first)) + 2)).astype(
        np.float32
    )
    return score


def pruned(sparsity: float, n_layer: int, prompt: int, rng: np.random.Generator | None = None) -> Pruning:
    """Drop a prompt's tokens, the same share behind each layer, so that layers read `sparsity` less of it in the mean.

    Args:
        rng: choose at random; None: by importance. The first token stays either way.
    """
    steps = n_layer - PRUNED_FROM
    low, high = 0.0, 1.0  # the share that stays each time: bisection of the mean, which grows with it
    for _ in range(60):
        share = (low + high) / 2
        left = PRUNED_FROM + sum(share**i for i in range(1, steps + 1))
        low, high = (share, high) if left / n_layer < 1 - sparsity else (low, share)

    def stays(layer: int, to_first: F32, positions: Ints) -> Any:
        if layer + 1 < PRUNED_FROM:
            return np.ones(len(positions), np.bool_)
        count = round(prompt * high ** (layer + 2 - PRUNED_FROM))
        mine = np.flatnonzero((positions < prompt) & (positions > 0))
        score = rng.random(len(mine)) if rng else importance(to_first)[mine]
        keep = np.ones(len(positions), np.bool_)
        keep[mine[np.argsort(score)[: max(0, len(mine) - count)]]] = False
        return keep

    return stays


# --- the report -------------------------------------------------------------------------------------------------------


def ways(model: Model, prompt: int) -> list[Way]:
    """All that is compared with float32."""
    found = [
        Way(f"{bits}-bit activations, {name}", Numerics(plain(bits, quantize)))
        for bits in (8, 4)
        for name, quantize in (("by 32", grouped), ("by token", by_token))
    ]
    found.append(Way("4-bit activations by 32, but 8 of ffn_down", Numerics(_mixed)))
    for bits, name, quantize in ((8, "by token", by_token), (4, "by token", by_token), (4, "by 32", grouped)):
        trip = Trip(bits, quantize)
        found.append(Way(f"{bits}-bit activations, {name}, TRIP", Numerics(trip), trip.watch))
    found.append(Way("QK in 8 bits", Numerics(attention=integer_scores)))
    found.append(Way("QK in 8 bits, softmax in 4, values in 8", Numerics(attention=log2_softmax)))
    for sparsity in (0.1, 0.2, 0.3):
        found.append(Way(f"pruned by {sparsity:.0%}", Numerics(pruning=pruned(sparsity, model.n_layer, prompt))))
        rng = np.random.default_rng(1)
        at_random = pruned(sparsity, model.n_layer, prompt, rng)
        found.append(Way(f"pruned by {sparsity:.0%}, at random", Numerics(pruning=at_random)))
    return found


def _mixed(_layer: int, site: str, x: F32) -> F32:
    return grouped(x, 8 if site == "ffn_down" else 4)


def multiplier(rounds: int, seconds: float) -> dict[str, Any]:
    """Return the rate of products of the paper's multiplier, beside that of 8-bit dot products."""
    library = limits.compile("papers/agile_multiplier.cpp")
    k, lanes = 256, int(library.tb_pair_lanes())
    rng = np.random.default_rng(1)
    low, high, a = (rng.integers(0, 16, shape, np.uint16) for shape in ((k, lanes), (k, lanes), k))
    pairs, sums = np.ascontiguousarray(low | high << 8), np.empty((2, lanes), np.uint16)
    call = [ctypes.c_void_p(v.ctypes.data) for v in (pairs, a, sums)]

    def run(repeats: int) -> None:
        library.tb_pairs(call[0], call[1], ctypes.c_size_t(k), ctypes.c_size_t(repeats), call[2])

    run(1)
    if not np.array_equal(sums, [a @ low, a @ high]):
        raise RuntimeError("the multiplier's sums are wrong")
    repeats = 20000
    once = min(report.seconds_of(lambda: run(repeats), seconds) for _ in range(3))
    rates, peaks = [], []
    for _ in range(rounds):
        rates.append(2e-9 * 2 * lanes * k * repeats / report.seconds_of(lambda: run(repeats), max(seconds, once)))
        peaks.append(limits.int8_gops(1, seconds))
    rate, peak = float(np.median(rates)), float(np.median(peaks))
    ratios = [r / p for r, p in zip(rates, peaks, strict=True)]
    return report.figures("4-bit multiplier", round(peak, 1), round(rate, 1), "GOPS", ratios, rate / peak)


def main() -> None:
    p = Parser(__doc__, "one window of a small random model")
    numpy_scores.add_options(p)
    p.add_rounds(9, 2)
    args = p.parse()
    rows = report.Rows("agile_quant", args.json)
    for row in numpy_scores.compare(args, ways):
        rows.add(row, numpy_scores.note(row))
    rows.add(multiplier(args.rounds, 0.02 if args.quick else 0.2))
    rows.finish()


if __name__ == "__main__":
    report.start(main)
