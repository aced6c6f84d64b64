"""agile_quant.py: its forward pass against llama.cpp, its quantizers against what they promise, and pruning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import tilebeam
from hypothesis import given
from hypothesis import strategies as st

from bench.lib import synth
from bench.papers import agile_quant as agile
from bench.papers.numpy_model import F32, Ints, Model, Numerics, softmax_attention

TOKENS = np.arange(300, 348, dtype=np.int32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = synth.preset("tiny", arch="qwen2", type="f32")
    return synth.write_model(tmp_path_factory.mktemp("agile") / "tiny.gguf", spec)


def test_the_forward_pass_is_that_of_llama_cpp(path: Path) -> None:
    found = Model(path).logits(TOKENS, 8, Numerics())
    with tilebeam.load(path, device="cpu", n_ctx=256, n_seq_max=1, threads=1) as lm:
        want = lm.logits(TOKENS.tolist())[-8:]
    assert found.read == 1
    assert np.linalg.norm(found.values - want) < 2e-3 * np.linalg.norm(want)  # llama.cpp keeps K and V in FP16
    assert np.ptp(want) > 1  # logits that say something


@given(st.integers(0, 2**32 - 1), st.sampled_from([4, 8]), st.sampled_from([32, 64, 96]))
def test_quantizers_are_off_by_half_a_step(seed: int, bits: int, channels: int) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((3, channels)) * np.exp2(rng.integers(-8, 8, channels))).astype(np.float32)
    groups = np.abs(x.reshape(3, -1, agile.GROUP))
    step = np.repeat(groups.max(axis=2) / (2 ** (bits - 1) - 1), agile.GROUP, axis=1)
    assert np.all(np.abs(agile.grouped(x, bits) - x) <= 0.501 * step)
    step = (np.maximum(x.max(axis=1), 0) - np.minimum(x.min(axis=1), 0)) / (2**bits - 1)
    assert np.all(np.abs(agile.by_token(x, bits) - x) <= 1.001 * step[:, None])  # the zero point is rounded, too
    assert all(len(np.unique(row)) <= 2**bits for row in agile.by_token(x, bits))


def test_trip_leaves_channels_without_outliers_their_precision() -> None:
    x = np.random.default_rng(1).standard_normal((64, 64)).astype(np.float32)
    x[:, 7] *= 16
    factors = agile.trip_factors(x, 4)
    assert factors[7] == factors.max() > np.median(factors)
    trip = agile.Trip(4, agile.by_token)
    assert trip.watch(0, "qkv", x) is x
    rest = np.arange(64) != 7
    errors = [np.linalg.norm((y - x)[:, rest]) for y in (trip(0, "qkv", x), agile.by_token(x, 4))]
    assert errors[0] < 0.5 * errors[1]


def test_attention_in_integers_is_near_that_of_floats() -> None:
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((16, 32)).astype(np.float32) for _ in range(3))
    seen = np.tril(np.ones((16, 16), np.bool_))
    want = softmax_attention(q, k, v, seen)[1]
    scores = agile.integer_scores(q, k, v, seen)[1]
    rounded = agile.log2_softmax(q, k, v, seen)[1]
    norm = np.linalg.norm(want)
    assert np.linalg.norm(scores - want) < 0.02 * norm < np.linalg.norm(rounded - want) < 0.3 * norm
    np.testing.assert_allclose(rounded[0], agile.symmetric(v)[0], rtol=1e-6)  # one cell: all of it


@pytest.mark.parametrize("at_random", [False, True])
def test_pruning_reads_the_share_that_it_says_and_keeps_both_ends(path: Path, at_random: bool) -> None:
    model = Model(path)
    prompt = len(TOKENS) - 8
    inner = agile.pruned(0.25, model.n_layer, prompt, np.random.default_rng(3) if at_random else None)
    left: list[list[int]] = []

    def watched(layer: int, to_first: F32, positions: Ints) -> npt.NDArray[np.bool_]:
        stays = inner(layer, to_first, positions)
        left.append(positions[stays].tolist())
        return stays

    found = model.logits(TOKENS, 8, Numerics(pruning=watched))
    assert found.values.shape == model.logits(TOKENS, 8, Numerics()).values.shape
    assert 1 - found.read == pytest.approx(0.25 * prompt / len(TOKENS), abs=0.02)
    for before, after in zip([list(range(len(TOKENS))), *left], left, strict=False):
        assert set(after) <= set(before)
        assert {0, *range(prompt, len(TOKENS))} <= set(after)
