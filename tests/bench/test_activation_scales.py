"""bench/activation_scales.py: every way keeps to the steps that its scales allow. The loops check their own sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import activation_scales as bench


def activations(seed: int, width: int) -> bench.F32:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((3, width)) * np.exp2(rng.integers(-8, 8, width))
    return x.astype(np.float32)


@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_three_bits_are_the_next_above(scale: float) -> None:
    (found,) = bench.three_bits(np.array([scale], np.float32))
    mantissa = np.frexp(found)[0] * 16
    assert mantissa == int(mantissa)
    assert scale <= found < scale * 1.125


@given(st.integers(0, 2**32 - 1), st.sampled_from([32, 96, 256, 896]), st.sampled_from(sorted(bench.WAYS)))
def test_what_is_rounded_is_off_by_half_a_step(seed: int, width: int, way: str) -> None:
    x = activations(seed, width)
    size = {"one for each 64": 64, "one for each 256": 256}.get(way, 32)

    def largest(of: int) -> bench.F32:
        padded = np.pad(np.abs(x), ((0, 0), (0, -width % of))).reshape(3, -1, of)
        return np.repeat(padded.max(axis=2), of, axis=1)[:, :width]

    step = largest(size) / 127
    step = {
        "a float of 3 bits for each 32": step * 1.125,
        "a power of two for each 32": step * 2,
        "an integer for each 32": step + largest(256) / 127 / 255,
    }.get(way, step)
    assert np.all(np.abs(bench.WAYS[way](x) - x) <= 0.501 * step)


def test_finer_scales_lose_less() -> None:
    x = activations(1, 1024)
    loss = {name: float(np.linalg.norm(way(x) - x)) for name, way in bench.WAYS.items()}
    own = loss["a float for each 32"]
    assert loss["an integer for each 32"] == pytest.approx(own, rel=0.05)
    assert own < loss["a float of 3 bits for each 32"] < 1.12 * own
    assert 1.2 * own < loss["a power of two for each 32"] < 2 * own
    assert own < loss["one for each 64"] < loss["one for each 256"]
