"""Scales of 8-bit activations: what each way to have them costs a model, and an inner loop.

    python -m bench.activation_scales -m MODEL.gguf -f wiki.test.raw [--windows 4] [-c 512] [--json] [--quick]

A product with a scale for each 32 of an activation row multiplies twice beside eight dot products, for the weights'
scales and for the row's, on the ports that dot products need. The ways here do with less:

    a float for each 32                  what the product does
    a float of 3 bits for each 32        its mantissa rounded up to 3 bits: a table has the weights' scales times these
                                         8 numbers, and the power of two comes with the conversion to float
    an integer for each 32               1 to 255 of a float for each 256: the sums are multiplied as integers
    a power of two for each 32           of a float for each 256
    one for each 64, one for each 256    `without`: fewer multiplications, with 256 next to none

Accuracy: all that enters a layer's products is rounded so, everything else is float32 (bench/lib/numpy_model.py); by
perplexity and divergence, as bench.agile_quant. The loops ("loop, ..") run in L1 on AVX-512 VNNI, against the product's
own, as a share of the machine's 8-bit peak; other machines have no such rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bench.lib import limits, numpy_scores, report
from bench.lib.numpy_model import F32, Model, Numerics
from bench.lib.numpy_scores import Way
from bench.lib.options import Parser

LOOPS = ("a float for each 32", "a float of 3 bits for each 32", "an integer for each 32", "without")
_ROW = np.dtype(  # struct record
    [("q", np.int8, 32), ("scale", np.float32), ("whole", np.int32), ("shifted", np.float32), ("level", np.int32)]
)
_ROWS = 32


def rounded(x: F32, scale: F32) -> F32:
    """(rows, groups, group) to multiples of a scale each, -127 to 127 of them."""
    found: F32 = np.clip(np.rint(x / np.maximum(scale, np.float32(1e-30))), -127, 127) * scale
    return found


def scales_of(x: F32) -> F32:
    """The least that keep (rows, groups, group) within 127 of them, (rows, groups, 1)."""
    scale: F32 = np.abs(x).max(axis=2, keepdims=True) / np.float32(127)
    return scale


def by_float(x: F32, size: int = 32) -> F32:
    """A float for each `size`; where they do not come out even, the last has fewer."""
    width = x.shape[1]
    padded = np.pad(x, ((0, 0), (0, -width % size))).reshape(len(x), -1, size)
    return rounded(padded, scales_of(padded)).reshape(len(x), -1)[:, :width]


def three_bits(scale: F32) -> F32:
    """The next float with 3 bits of mantissa, upwards."""
    bits = (scale.view(np.uint32) + np.uint32((1 << 20) - 1)) & ~np.uint32((1 << 20) - 1)
    return bits.view(np.float32)


def by_three_bits(x: F32) -> F32:
    """A float of 3 bits for each 32."""
    groups = x.reshape(len(x), -1, 32)
    return rounded(groups, three_bits(scales_of(groups))).reshape(x.shape)


def by_parts(x: F32, part: Callable[[F32], F32]) -> F32:
    """A float for each 256, of which each 32 have a part; `part` rounds shares of the largest (0 to 1) upwards."""
    width = x.shape[1]
    groups = np.pad(x, ((0, 0), (0, -width % 256))).reshape(len(x), -1, 32)
    own = scales_of(groups).reshape(len(x), -1, 8, 1)
    largest = np.maximum(own.max(axis=2, keepdims=True), np.float32(1e-30))
    scale = (part(own / largest) * largest).reshape(len(x), -1, 1)
    return rounded(groups, scale).reshape(len(x), -1)[:, :width]


def by_integer(x: F32) -> F32:
    """An integer for each 32."""
    return by_parts(x, lambda share: np.maximum(np.ceil(share * np.float32(255)), np.float32(1)) / np.float32(255))


def by_power(x: F32) -> F32:
    """A power of two for each 32."""
    return by_parts(x, lambda share: np.exp2(np.ceil(np.log2(np.maximum(share, np.float32(2**-20))))))


WAYS: dict[str, Callable[[F32], F32]] = {
    "a float for each 32": by_float,
    "a float of 3 bits for each 32": by_three_bits,
    "an integer for each 32": by_integer,
    "a power of two for each 32": by_power,
    "one for each 64": lambda x: by_float(x, 64),
    "one for each 256": lambda x: by_float(x, 256),
}


def ways(_model: Model, _prompt: int) -> list[Way]:
    """All that is compared with float32."""
    return [Way(name, Numerics(lambda _layer, _site, x, way=way: way(x))) for name, way in WAYS.items()]  # type: ignore[misc]


def loops(rounds: int, seconds: float) -> list[dict[str, Any]]:
    """The inner loops' rates against the first one's.

    Raises:
        RuntimeError: a loop computes something else.
    """
    library = limits.compile("activation_scales.cpp")
    if not library.tb_scale_ways():
        return []
    rng = np.random.default_rng(1)
    w = rng.integers(0, 16, (2, 8, 16, 4), np.uint8)
    column_scales = rng.uniform(0.5, 1, 32).astype(np.float32)
    weights = np.frombuffer(w.tobytes() + column_scales.tobytes(), np.uint8)
    rows = np.zeros(_ROWS, _ROW)
    rows["q"] = rng.integers(-127, 128, (_ROWS, 32))
    rows["level"], exponent = rng.integers(0, 8, _ROWS), rng.integers(-3, 4, _ROWS)
    rows["scale"] = np.ldexp(1 + rows["level"] / 8, exponent)
    rows["shifted"] = np.ldexp(np.float32(1.5 * 2**23), exponent)
    rows["whole"] = rng.integers(1, 256, _ROWS)
    quads = rows["q"].reshape(_ROWS, 8, 4).astype(np.int64)
    dots = np.einsum("ijck,mjk->mic", w.astype(np.int64), quads).reshape(_ROWS, 32) * column_scales
    wanted = [dots * rows["scale"][:, None], dots * rows["scale"][:, None], dots * rows["whole"][:, None], dots]

    def run(way: int, fours: int, repeats: int) -> F32:
        sums = np.zeros((_ROWS, 32), np.float32)
        w_at, rows_at, sums_at = (ctypes.c_void_p(a.ctypes.data) for a in (weights, rows, sums))
        library.tb_scaled_products(way, fours, w_at, rows_at, _ROWS, sums_at, ctypes.c_size_t(repeats))
        return sums

    repeats, work = 2000, 2e-9 * 32 * 32 * _ROWS
    rates = np.zeros((rounds, len(LOOPS), 2))
    for way, name in enumerate(LOOPS):
        for fours in (0, 1):
            if not np.allclose(run(way, fours, 1), wanted[way], rtol=1e-5):
                raise RuntimeError(f"{name}: the products are wrong")
    peaks = []
    for i in range(rounds):
        peaks.append(limits.int8_gops(1, seconds))
        for way in range(len(LOOPS)):
            for fours in (0, 1):
                once = report.seconds_of(partial(run, way, fours, repeats), seconds)
                rates[i, way, fours] = work * repeats / once
    best = rates[:, np.arange(len(LOOPS)), np.median(rates, axis=0).argmax(axis=1)]
    first, peak = float(np.median(best[:, 0])), float(np.median(peaks))
    return [
        report.figures(
            f"loop, {name}",
            round(first, 1),
            round(rate := float(np.median(best[:, way])), 1),
            "GOPS",
            (best[:, way] / best[:, 0]).tolist(),
            rate / peak,
        )
        for way, name in enumerate(LOOPS)
    ]


def main() -> None:
    """Measure and print."""
    p = Parser(__doc__, "one window of a small random model")
    numpy_scores.add_options(p)
    p.add_rounds(9, 2)
    args = p.parse()
    rows = report.Rows("activation_scales", args.json)
    for row in numpy_scores.compare(args, ways):
        rows.add(row, numpy_scores.note(row))
    for row in loops(args.rounds, 0.01 if args.quick else 0.1):
        rows.add(row)
    rows.finish()


if __name__ == "__main__":
    report.start(main)
