"""Mixtures of experts: expert stacks packed and unpacked, MUL_MAT_ID alone, and whole models against the stock backend.

What is particular to them is that rounding may decide which expert a token goes to. Where the router's last choice is a
near tie, two sound backends take different experts and their logits are far apart at that position: the stock backend
itself is, at a few positions of a hundred, from a float32 run. So the models that leave no choice (all experts used,
with the router's weights) must keep the mean figures that models without experts keep, and those that choose must keep
them at most positions (median) and be close in the mean.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import accuracy
import gguf
import k_quants
import npu_ops as t
import numpy as np
import pytest
from accuracy import Job, Result, WorkerError, compare, got
from gemm_reference import (
    BLOCKS,
    COLUMN,
    FLAG_FP16,
    FLOATS,
    MORE_BLOCKS,
    MORE_COLUMN,
    TILE,
    Weights,
    device,
    float_product,
    int8_error_bound,
    int8_product,
    make_weights,
)
from gguf_kit import stored, writer
from hypothesis import given, settings
from hypothesis import strategies as st
from k_quants import K_PANELS
from tilebeam import _ext as ggml_ext
from tilebeam import gguf as gguf_tools
from tilebeam._ext import Type
from tilebeam.native import executor as _npu

from bench.lib.float32 import in_float32
from bench.lib.synth import MIXTURES, SynthConfig, write_model

Q = gguf.GGMLQuantizationType
Array = np.ndarray[Any, Any]

SMALL = SynthConfig(n_layer=2, n_expert=4, n_expert_used=2)
EXPERTS = ("blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight", "blk.0.ffn_down_exps.weight")


# ---- files


@pytest.mark.parametrize("arch", MIXTURES)
@pytest.mark.parametrize("type", ["q4_0", "q8_0", "iq4_nl"])
def test_packing_and_back(tmp_path: Path, arch: str, type: str) -> None:
    model = write_model(tmp_path / "m.gguf", replace(SMALL, arch=arch, type=type))
    packed = tmp_path / "p.gguf"
    report = gguf_tools.pack(model, packed, threads=2)
    # seven matrices or stacks a layer and the output; neither the routers nor the embeddings
    assert report.lossless
    assert report.n_tiled == 2 * 7 + 1
    layouts = {x["name"]: x["layout"] for x in gguf_tools.inspect(packed)["tensors"]}
    assert [layouts[name] for name in EXPERTS] == [f"{type}_col"] * 3
    assert layouts["blk.0.ffn_gate_inp.weight"] is None
    assert gguf_tools.verify(packed, against=model).exact == report.n_tensors
    assert gguf_tools.verify(packed).unpacks
    gguf_tools.unpack(packed, tmp_path / "back.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == model.read_bytes()


def test_each_expert_has_tiles_of_its_own(tmp_path: Path) -> None:
    """The tiles of expert e are those that the expert's matrix would have alone."""
    model = write_model(tmp_path / "m.gguf", SMALL)
    gguf_tools.pack(model, tmp_path / "p.gguf")
    for name, (k, n) in zip(EXPERTS, [(256, 512), (256, 512), (512, 256)], strict=True):
        blocks, tiles = (stored(tmp_path / f, name).reshape(4, -1) for f in ("m.gguf", "p.gguf"))
        for e in range(4):
            assert np.array_equal(tiles[e], ggml_ext.pack(Type.Q4_0_COL, blocks[e], k, n))


@pytest.mark.parametrize("source", ["f32", "q8_0"])
def test_requantizing_to_tile_grouping(tmp_path: Path, source: str) -> None:
    model, packed = write_model(tmp_path / "m.gguf", replace(SMALL, type=source)), tmp_path / "p.gguf"
    report = gguf_tools.pack(model, packed, policy=gguf_tools.Policy.make(preset="paper"))
    types = {x.name: x.type for x in report.tensors}
    assert [types[name] for name in EXPERTS] == ["q4_0_tile", "q4_0_tile", "q8_0_tile"]
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


ISAS = _npu.isas()
ALL = (*FLOATS, *BLOCKS, *COLUMN, *TILE, *MORE_BLOCKS, *MORE_COLUMN)


def run_op(
    stack: list[Weights], x: Array, ids: Array, isa: str, threads: int, *, pad: int = 0, flags: int = 0
) -> tuple[int, str, Array, Array]:
    """MUL_MAT_ID of experts `stack`, x F32 (T, a divisor of n_used, K) and ids I32 (T, n_used).

    Rows of x, ids and dst are `pad` numbers apart. Status, why, dst (T, n_used, N), and the whole arena but for dst
    before and after, one behind the other.
    """
    w = stack[0]
    data = [np.ascontiguousarray(e.data).reshape(-1).view(np.uint8) for e in stack]
    arena = t.Arena(1 << 22)
    size = data[0].nbytes
    room = arena.add(t.I32, (-(-size * len(stack) // 4),))  # at offset 0: tiles want multiples of 128
    arena.bytes[room.offset : room.offset + size * len(stack)] = np.concatenate(data)
    src = arena.add(t.F32, (w.k, x.shape[1], x.shape[0]), x, pad=(pad, 0, 0, 0))
    src_ids = arena.add(t.I32, (ids.shape[1], ids.shape[0]), ids, pad=(pad, 0, 0, 0))
    dst = arena.add(t.F32, (w.n, ids.shape[1], ids.shape[0]), pad=(pad, 1, 0, 0))
    op = t.make_op("MUL_MAT_ID", dst, [room, src, src_ids])
    op.flags = flags
    op.src[0].type, op.src[0].offset = int(w.type), room.offset
    op.src[0].ne = [w.k, w.n, len(stack), 1]
    if not ggml_ext.is_tiled(w.type):
        op.src[0].nb = [int(ggml_ext.lib.tb_type_size(w.type)), size // w.n, size, size * len(stack)]
    else:
        op.src[0].nb = [1, 1, size, size * len(stack)]
    why = ggml_ext.ffi.new("const char **")
    assert ggml_ext.lib.tb_op_check_shape(op, why) == 0, ggml_ext.ffi.string(why[0])
    before = arena.bytes.copy()
    status, text = t.try_run(arena, op, isa, threads)
    after = arena.bytes.copy()
    result = dst.array[0].copy()
    for memory in (before, after):
        np.ndarray(dst.array.shape, np.float32, memory.data, dst.offset, dst.array.strides)[...] = 0
    return status, text, result, np.stack([before, after])


@pytest.mark.parametrize("isa", ISAS)
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
    # `rows` different inputs of a token, one for each expert used or for several
    used = rows * repeat
    x = rng.standard_normal((tokens, rows, k)).astype(np.float32)
    # `lonely`: everything goes to one expert, the others get no row
    ids = rng.integers(0, experts, (tokens, used) if not lonely else 1).astype(np.int32)
    ids = np.broadcast_to(ids, (tokens, used)).copy()
    status, why, out, (before, after) = run_op(stack, x, ids, isa, threads, pad=pad)
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
            exact, bound = float_product(w, of_expert)
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
    k = 512 if type in K_PANELS else 160
    counts = [0, 1, 2, 3, 16, 17, 33, 300]
    make = k_quants.make_weights if type in K_PANELS else make_weights
    stack = [make(type, k, 96, rng) for _ in counts]
    x = rng.standard_normal((sum(counts) // 2, 2, k)).astype(np.float32)
    ids = rng.permutation(np.repeat(np.arange(8, dtype=np.int32), counts)).reshape(-1, 2)
    status, why, out, _ = run_op(stack, x, ids, isa, 2, flags=flags)
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
        status, why, _, (before, after) = run_op(stack, x, ids, isa, threads)
        assert status == ggml_ext.lib.TB_E_BOUNDS
        assert "MUL_MAT_ID" in why
        assert np.array_equal(before, after)
    # the executor is as good as before
    status, why, out, _ = run_op(stack, x, np.ones((5, 2), np.int32), isa, threads)
    assert status == 0, why
    assert np.isfinite(out).all()


# ---- whole models

MODES = ("prefill", "decode", "parallel")
MODELS = {
    "llama-q4_0": replace(SMALL, type="q4_0"),
    "llama-f16": replace(SMALL, type="f16"),
    "llama-q4_k": replace(SMALL, type="q4_k", types={"ffn_down_exps": "q6_k"}),
    "llama-all-used": replace(SMALL, type="q4_0", n_expert=3, n_expert_used=3),
    "qwen3moe-q8_0": replace(SMALL, arch="qwen3moe", type="q8_0", n_expert=8, n_expert_used=2, n_ff=256),
    "qwen3moe-all-used": replace(SMALL, arch="qwen3moe", type="iq4_nl", n_expert=3, n_expert_used=3),
}
TILED = [name for name, cfg in MODELS.items() if cfg.type != "f16"]
CASES = [(name, mode) for name in MODELS for mode in MODES]
TILED_CASES = [(name, mode) for name in TILED for mode in MODES]
# of models without experts, see test_models.py
KL_LIMIT = 1e-3
K_KL_LIMIT = 2e-3
TOP1_LIMIT = 0.90
ERROR_RATIO = 1.1
MEDIAN_RATIO = 1.2  # a median of 256 positions is known to 8 %


def choices_matter(name: str) -> bool:
    return MODELS[name].n_expert_used < MODELS[name].n_expert


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str, str], Result | WorkerError]:
    """By (model, what, mode): what is "stock", "exact" (float32), "npu", "repacked" or "process"."""
    folder = tmp_path_factory.mktemp("mixtures")
    jobs: dict[tuple[str, str, str], Job] = {}
    for name, cfg in MODELS.items():
        path = write_model(folder / f"{name}.gguf", cfg)
        exact = in_float32(path, folder / f"{name}-exact.gguf")
        packed = folder / f"{name}-packed.gguf"
        if name in TILED:
            gguf_tools.pack(path, packed)
        for mode in MODES:
            job = Job(str(path), device="npu", mode=mode)
            # one thread: two of ggml's spin against each other for ages when the machine is busy
            jobs[name, "stock", mode] = replace(job, device="cpu", n_threads=1)
            jobs[name, "exact", mode] = replace(job, model=str(exact), device="cpu", n_threads=1, kv="f32", flash=False)
            jobs[name, "npu", mode] = job
            if name in TILED:
                jobs[name, "repacked", mode] = replace(job, model=str(packed))
                jobs[name, "process", mode] = replace(job, model=str(packed), executor="process")
    answers = accuracy.run(list(jobs.values()), folder / "logits")
    return dict(zip(jobs, answers, strict=True))


def median_kl(reference: Array, other: Array) -> float:
    """Median over positions of the KL divergence from the reference's softmax, nats."""

    def log_softmax(logits: Array) -> Array:
        z = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
        return np.asarray(z - np.log(np.exp(z).sum(axis=1, keepdims=True)))

    r, x = log_softmax(reference), log_softmax(other)
    return float(np.median((np.exp(r) * (r - x)).sum(axis=1)))


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_whole_graph_runs_on_the_device(runs: Any, name: str, mode: str) -> None:
    for what in ("npu", "repacked")[: 1 + (name in TILED)]:
        result = got(runs[name, what, mode])
        assert result.logits.shape[0] >= 256
        # the CPU looks the embeddings up, everything else is one graph on the device
        assert result.splits == (2, 2)
        assert result.failures == 0
        assert result.graphs == {"prefill": 1, "decode": 256, "parallel": 17}[mode]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_logits_are_those_of_the_stock_backend(runs: Any, name: str, mode: str) -> None:
    stock, npu = (got(runs[name, what, mode]).logits for what in ("stock", "npu"))
    figures = compare(stock, npu)
    assert figures.top1 >= TOP1_LIMIT, figures
    limit = K_KL_LIMIT if MODELS[name].type.endswith("_k") else KL_LIMIT
    if choices_matter(name):
        assert median_kl(stock, npu) < limit
        assert figures.kl < 20 * limit, figures
    else:
        assert figures.kl < limit, figures


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_logits_are_as_good_as_the_stock_backends(runs: Any, name: str, mode: str) -> None:
    exact, stock, npu = (got(runs[name, what, mode]).logits for what in ("exact", "stock", "npu"))
    floor = 1e-7  # see test_models.py
    if choices_matter(name):
        assert median_kl(exact, npu) <= MEDIAN_RATIO * median_kl(exact, stock) + floor
    else:
        theirs, ours = compare(exact, stock), compare(exact, npu)
        assert ours.nmse <= ERROR_RATIO * theirs.nmse + floor, (ours, theirs)
        assert ours.kl <= ERROR_RATIO * theirs.kl + floor, (ours, theirs)


@pytest.mark.parametrize(("name", "mode"), TILED_CASES)
def test_repacked_file_and_process_executor_give_the_same_bits(runs: Any, name: str, mode: str) -> None:
    ordinary, repacked, process = (got(runs[name, what, mode]) for what in ("npu", "repacked", "process"))
    assert (ordinary.executor, process.executor) == ("thread", "process")
    np.testing.assert_array_equal(repacked.logits, ordinary.logits)
    np.testing.assert_array_equal(process.logits, ordinary.logits)
