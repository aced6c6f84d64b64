"""Mixtures of experts: expert stacks packed and unpacked, and MUL_MAT_ID. Whole models: tests/plugin/test_models.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import k_quants
import npu_ops as t
import numpy as np
import pytest
import tilebeam
from gemm_reference import (
    BLOCKS,
    COLUMN,
    FLAG_FP16,
    FLOATS,
    MORE_BLOCKS,
    MORE_COLUMN,
    TILE,
    device,
    float_product,
    int8_error_bound,
    int8_product,
    make_weights,
    run_experts,
)
from gguf_kit import writer
from hypothesis import given, settings
from hypothesis import strategies as st
from k_quants import K_PANELS
from tilebeam import _ext as ggml_ext
from tilebeam import gguf as gguf_tools
from tilebeam._ext import Type
from tilebeam.native import executor as _npu

from bench.lib.synth import SynthConfig, write_model

Q = gguf.GGMLQuantizationType
Array = np.ndarray[Any, Any]

SMALL = SynthConfig(n_layer=2, n_expert=4, n_expert_used=2)
EXPERTS = ("blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight", "blk.0.ffn_down_exps.weight")


# ---- files


@pytest.mark.parametrize("source", ["f32", "q8_0"])
def test_requantizing_to_tile_grouping(tmp_path: Path, source: str) -> None:
    model, packed = write_model(tmp_path / "m.gguf", replace(SMALL, type=source)), tmp_path / "p.gguf"
    report = gguf_tools.pack(model, packed, policy=gguf_tools.Policy.make(preset="paper"))
    types = {x.name: x.type for x in report.tensors}
    assert [types[name] for name in EXPERTS] == ["q4_0_tile", "q4_0_tile", "q8_0_tile"]
    assert types["blk.0.ffn_gate_inp.weight"] == "f32"  # of the router
    assert set(EXPERTS) <= {x.name for x in report.tensors if x.error is not None}
    gguf_tools.unpack(packed, tmp_path / "back.gguf")
    with gguf_tools.GGUFFile(tmp_path / "back.gguf") as f:
        assert [(f.tensors[name].type, f.tensors[name].ne) for name in EXPERTS] == [
            (Q.Q4_0, (256, 512, 4)),
            (Q.Q4_0, (256, 512, 4)),
            (Q.Q8_0, (512, 256, 4)),
        ]


def test_biases_of_experts_stay_plain(tmp_path: Path) -> None:
    """They are as wide as a matrix where there are 32 experts, but ADD_ID reads them."""
    rng = np.random.default_rng(1)
    with writer(tmp_path / "m.gguf") as w:
        w.add_block_count(1)
        for name, shape in {"ffn_up_exps.weight": (32, 32, 64), "ffn_up_exps.bias": (32, 64)}.items():
            x = rng.standard_normal(shape).astype(np.float32)
            w.add_tensor(f"blk.0.{name}", gguf.quants.quantize(x, Q.Q8_0), raw_dtype=Q.Q8_0)
    gguf_tools.pack(tmp_path / "m.gguf", tmp_path / "p.gguf")
    tensors = gguf_tools.inspect(tmp_path / "p.gguf")["tensors"]
    assert {x["name"]: (x["layout"], x["device"]) for x in tensors} == {
        "blk.0.ffn_up_exps.weight": ("q8_0_col", "NPU"),
        "blk.0.ffn_up_exps.bias": (None, "CPU"),
    }


# ---- the op


ISAS = t.ISAS
ALL = (*FLOATS, *BLOCKS, *COLUMN, *TILE, *MORE_BLOCKS, *MORE_COLUMN)


@pytest.mark.parametrize("isa", _npu.isas())
@pytest.mark.parametrize("type", ALL, ids=lambda x: x.label)
@settings(max_examples=8, deadline=None)
@given(
    k=st.sampled_from([32, 96, 544]),
    n=st.sampled_from([1, 31, 32, 64, 70]),
    experts=st.integers(1, 6),
    rows=st.integers(1, 3),
    tokens=st.sampled_from([1, 2, 3, 9, 40]),
    repeat=st.integers(1, 2),
    lonely=st.booleans(),
    pad=st.integers(0, 3),
    threads=st.sampled_from(t.THREADS),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_go_through_the_experts_they_name(
    isa: str,
    type: Type,
    k: int,
    n: int,
    experts: int,
    rows: int,
    tokens: int,
    repeat: int,
    lonely: bool,
    pad: int,
    threads: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    stack = [make_weights(type, k, n, rng) for _ in range(experts)]
    k = stack[0].k
    # `rows` different inputs of a token, one for each expert used or for several
    used = rows * repeat
    x = rng.standard_normal((tokens, rows, k)).astype(np.float32)
    # `lonely`: everything goes to one expert, the others get no row
    ids = rng.integers(0, experts, (tokens, used) if not lonely else 1).astype(np.int32)
    ids = np.broadcast_to(ids, (tokens, used)).copy()
    status, why, out, (before, after) = run_experts(stack, x, ids, isa, threads, pad=pad)
    assert status == 0, why
    assert np.array_equal(before, after), "bytes outside dst changed"
    inputs = np.tile(x, (1, repeat, 1))
    for e in range(experts):
        chosen, w = ids == e, stack[e]
        if not chosen.any():
            continue
        got_rows, of_expert = out[chosen].astype(np.float64), inputs[chosen]
        exact = of_expert.astype(np.float64) @ w.values.T
        if type in FLOATS:
            exact, bound = float_product(w, of_expert, isa)
        else:
            model, magnitude = int8_product(w, of_expert)
            assert np.all(np.abs(got_rows - model) <= magnitude * (2.0**-23) * (k / 32 + 4) + 1e-30)
            bound = int8_error_bound(w, of_expert) + magnitude * 1e-5
        assert np.all(np.abs(got_rows - exact) <= bound)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("flags", [0, FLAG_FP16], ids=["int8", "fp16"])
@pytest.mark.parametrize(
    "type", [Type.F16, Type.Q4_0, Type.Q8_0_COL, Type.Q4_0_TILE, *MORE_COLUMN, *K_PANELS], ids=lambda x: x.label
)
def test_an_experts_rows_are_those_of_a_mul_mat(isa: str, type: Type, flags: int) -> None:
    """Bit for bit: experts of 0 to 33 rows and of more than an item takes, at once in one op."""
    rng = np.random.default_rng(8)
    k = 512 if type in K_PANELS else 256
    counts = [0, 1, 2, 3, 16, 17, 33, 300]
    make = k_quants.make_weights if type in K_PANELS else make_weights
    stack = [make(type, k, 160, rng) for _ in counts]
    x = rng.standard_normal((sum(counts) // 2, 2, k)).astype(np.float32)
    ids = rng.permutation(np.repeat(np.arange(8, dtype=np.int32), counts)).reshape(-1, 2)
    status, why, out, _ = run_experts(stack, x, ids, isa, 2, flags=flags)
    assert status == 0, why
    for e, w in enumerate(stack):
        if counts[e]:
            assert np.array_equal(out[ids == e], device(isa, 2).product(w, x[ids == e], flags=flags))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("threads", t.THREADS)
@pytest.mark.parametrize("bad", [-1, 3, 2**31 - 1, -(2**31)])
def test_an_index_of_no_expert_is_refused(isa: str, threads: int, bad: int) -> None:
    rng = np.random.default_rng(3)
    stack = [make_weights(Type.Q4_0_COL, 64, 64, rng) for _ in range(3)]
    x = rng.standard_normal((5, 1, 64)).astype(np.float32)
    for at in ((0, 0), (4, 1)):
        ids = np.ones((5, 2), np.int32)
        ids[at] = bad
        status, why, _, (before, after) = run_experts(stack, x, ids, isa, threads)
        assert status == ggml_ext.lib.TB_E_BOUNDS
        assert "MUL_MAT_ID" in why
        assert np.array_equal(before, after)
    # the executor is as good as before
    status, why, out, _ = run_experts(stack, x, np.ones((5, 2), np.int32), isa, threads)
    assert status == 0, why
    assert np.isfinite(out).all()


def test_a_router_that_answers_nan_is_told_of(tmp_path: Path) -> None:
    """As on the stock backend: no expert is taken for it without a word."""
    cfg = replace(SMALL, arch="qwen3moe", n_ff=256, router_std=float("nan"))
    model = write_model(tmp_path / "nan.gguf", cfg)
    for where in ("npu", "cpu"):
        lm = tilebeam.load(model, device=where, n_ctx=256, threads=2)
        with lm, pytest.raises(tilebeam.TilebeamError, match="logits that are not numbers"):
            lm.generate("the answer", tilebeam.SamplingParams(max_tokens=2))
