"""agile_quant.py: its forward pass against llama.cpp, and its quantizers against what they promise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tilebeam
from hypothesis import given
from hypothesis import strategies as st

from bench.lib import synth
from bench.papers import agile_quant as agile
from bench.papers.numpy_model import Model, Numerics

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
