"""Whole models on the NPU against the stock CPU backend: random models of every architecture and type.

Two questions are asked of the logits at 256 positions and more. Are they those of the stock CPU backend on the same
file: KL divergence and top-1. And are they as good: the error against a float32 run of the dequantized weights may be
at most 1.1 times the stock backend's own. The thresholds for random models: mean KL below 1e-3 nats (the stock backend
itself is 0.6e-3 to 1e-3 away from float32 on them), top-1 agreement of at least 90 %: their logits are noise, so near
ties are common, the stock backend agrees with float32 in 95 to 98 %, and two backends that each differ from float32 in
up to 5 % may differ from one another in twice that.

In a mixture of experts rounding may decide which expert a token goes to. Where the router's last choice is a near tie,
two sound backends take different experts and their logits are far apart at that position: the stock backend itself is,
at a few positions of a hundred, from a float32 run. So the models that leave no choice (all experts used, with the
router's weights) must keep the mean figures that models without experts keep, and those that choose must keep them at
most positions (median) and be close in the mean.

All runs are made once, in `runs`, in a handful of processes; the tests look at the results.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import accuracy
import numpy as np
import pytest
from accuracy import Figures, Job, Result, WorkerError, compare, got
from tilebeam import gguf as gguf_tools

from bench.lib import k_quants, synth
from bench.lib.float32 import in_float32
from bench.lib.synth import ARCHITECTURES, SynthConfig, write_model

MODES = ("prefill", "decode", "parallel")
TYPES = ("q4_0", "q8_0", "iq4_nl", "f16")
BLOCKS_OF_256 = tuple(name for name, q in synth.TYPES.items() if q in k_quants.TYPES)
TILED = ("q4_0", "q8_0", "iq4_nl", *BLOCKS_OF_256, *(name for name, q in synth.TYPES.items() if q in synth.BY_GGUF))
KL_LIMIT = 1e-3
# With blocks of 256 k both backends share one scale of activations among 256 k: each is up to 1.1e-3 nats from float32.
K_KL_LIMIT = 2e-3
TOP1_LIMIT = 0.90
ERROR_RATIO = 1.1
# Of float32 weights what is left is the rounding inside attention, 1000 times below that of quantized activations.
FLOOR = 1e-7
MEDIAN_RATIO = 1.2  # a median of 256 positions is known to 8 %
SMALL = SynthConfig(n_layer=3)
EXPERTS = SynthConfig(n_layer=2, n_expert=4, n_expert_used=2)
STACKS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")

# Shapes, types and options beyond the plain grid: one model each.
VARIANTS: dict[str, SynthConfig] = {
    "llama-bias-freqs": replace(SMALL, arch="llama", bias=True, rope_factors=True, type="q4_0"),
    "llama-yarn": replace(SMALL, arch="llama", yarn_factor=4.0, type="q8_0"),
    "llama-mixed-roles": replace(SMALL, arch="llama", type="q4_0", types={"ffn_down": "q8_0", "attn_v": "f16"}),
    "qwen2-odd-vocabulary": replace(SMALL, arch="qwen2", n_vocab=1001, type="q8_0"),
    "qwen3-head-128": replace(SMALL, arch="qwen3", n_head=4, n_head_kv=1, head_dim=128, type="q4_0"),
    "gemma3-head-256": replace(SMALL, arch="gemma3", n_head=2, n_head_kv=1, head_dim=256, type="q8_0"),
    "llama-head-80": replace(SMALL, arch="llama", n_embd=320, head_dim=80, type="iq4_nl"),
    "qwen3-head-96": replace(SMALL, arch="qwen3", head_dim=96, type="q8_0"),
    "llama-q4_k_m": replace(SMALL, arch="llama", type="q4_k", types={"ffn_down": "q6_k", "attn_v": "q6_k"}),
    "qwen3-q2_k-and-q3_k": replace(SMALL, arch="qwen3", type="q2_k", types={"ffn_down": "q3_k", "attn_v": "q3_k"}),
    "llama-q3_k": replace(SMALL, arch="llama", type="q3_k"),
    "llama-tq2_0-and-tq1_0": replace(SMALL, arch="llama", type="tq2_0", types={"ffn_down": "tq1_0", "attn_v": "tq1_0"}),
    "llama-iq2_xxs-and-iq2_s": replace(
        SMALL, arch="llama", type="iq2_xxs", types={"attn_v": "iq2_s", "attn_k": "q4_k"}
    ),
    "qwen3-iq3_xxs-and-iq2_xs": replace(
        SMALL, arch="qwen3", type="iq3_xxs", types={"ffn_down": "iq2_xs", "attn_q": "q4_0"}
    ),
    "qwen2-iq1_s-and-iq1_m": replace(
        SMALL, arch="qwen2", type="iq1_s", types={"ffn_down": "iq1_m", "attn_v": "iq3_s", "output": "q6_k"}
    ),
    "qwen2-iq4_xs": replace(SMALL, arch="qwen2", type="iq4_xs"),
    "qwen2-q5_k": replace(SMALL, arch="qwen2", type="q5_k"),
    "gemma3-q6_k": replace(SMALL, arch="gemma3", type="q6_k"),
    "qwen3-q4_k-and-q4_0": replace(SMALL, arch="qwen3", type="q4_k", types={"ffn_up": "q4_0", "attn_q": "q8_0"}),
    "qwen2-q5_0-and-q6_k": replace(SMALL, arch="qwen2", type="q5_0", types={"ffn_down": "q6_k", "attn_v": "q8_0"}),
    "llama-q4_1": replace(SMALL, arch="llama", type="q4_1"),
    "gemma3-q5_1-and-q5_0": replace(SMALL, arch="gemma3", type="q5_1", types={"attn_v": "q5_0"}),
    "qwen3-mxfp4": replace(SMALL, arch="qwen3", type="mxfp4"),
    "qwen2-nvfp4-and-q1_0": replace(SMALL, arch="qwen2", type="nvfp4", types={"ffn_up": "q1_0", "attn_q": "q8_0"}),
    "qwen2-float32": replace(SMALL, arch="qwen2", type="f32"),
    "experts-q4_0": replace(EXPERTS, type="q4_0"),
    "experts-f16": replace(EXPERTS, type="f16"),
    "experts-q4_k": replace(EXPERTS, type="q4_k", types={"ffn_down_exps": "q6_k"}),
    "experts-iq2_xs": replace(EXPERTS, type="iq2_xs", types={"ffn_down_exps": "iq3_s", "attn_q": "q8_0"}),
    "experts-q1_0": replace(EXPERTS, type="q1_0", types={"ffn_down_exps": "nvfp4", "output": "q6_k"}),
    "experts-all-used": replace(EXPERTS, type="q4_0", n_expert=3, n_expert_used=3),
    "qwen3moe-q8_0": replace(EXPERTS, arch="qwen3moe", type="q8_0", n_expert=8, n_ff=256),
    "qwen3moe-all-used": replace(EXPERTS, arch="qwen3moe", type="iq4_nl", n_expert=3, n_expert_used=3),
    "gpt-oss": replace(EXPERTS, arch="gpt-oss", type="q8_0", types=dict.fromkeys(STACKS, "mxfp4"), n_expert=8),
}

# Ways to run a model that is otherwise plain: changes to the job, on both devices.
SETTINGS: dict[str, tuple[str, dict[str, object]]] = {
    "small batches": ("llama-q4_0", {"n_batch": 48, "n_ubatch": 17}),
    "long context": ("qwen3-q8_0", {"n_positions": 700, "n_ctx": 1024}),
    "window cache": ("gemma3-q8_0", {"n_positions": 400, "swa_full": False, "n_batch": 64, "n_ubatch": 64}),
    "one stream per sequence": ("llama-q8_0", {"mode": "streams", "kv_unified": False, "n_ctx": 16 * 256}),
    "shifted cache": ("llama-q8_0", {"mode": "decode", "shift": 60}),
    "shifted window cache": ("gemma3-q8_0", {"mode": "decode", "shift": 60}),
    "without flash attention": ("llama-q4_0", {"flash": False}),
    "float32 cache": ("llama-q4_0", {"kv": "f32"}),
    "quantized cache": ("llama-q4_0", {"kv": "q8_0"}),
    "4-bit cache": ("llama-q4_0", {"kv": "q4_0"}),
    "two layers of three on the device": ("qwen2-q4_0", {"n_gpu_layers": 2}),
    "only the output on the device": ("qwen2-q4_0", {"n_gpu_layers": 1}),
    "nothing on the device": ("qwen2-q4_0", {"n_gpu_layers": 0}),
}


class Runs:
    """Results by (model, what): what is "stock", "exact" (float32), "npu" .. and the mode."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: dict[tuple[str, ...], Job] = {}
        self.results: dict[tuple[str, ...], Result | WorkerError] = {}

    def add(self, key: tuple[str, ...], job: Job) -> None:
        self.jobs[key] = job

    def run(self) -> None:
        answers = accuracy.run(list(self.jobs.values()), self.folder / "logits")
        self.results = dict(zip(self.jobs, answers, strict=True))

    def __getitem__(self, key: tuple[str, ...]) -> Result:
        return got(self.results[key])

    def figures(self, reference: tuple[str, ...], other: tuple[str, ...]) -> Figures:
        return compare(self[reference].logits, self[other].logits)

    def median_kl(self, reference: tuple[str, ...], other: tuple[str, ...]) -> float:
        """Median over positions of the KL divergence from the reference's softmax, nats."""
        logits = (self[key].logits.astype(np.float64) for key in (reference, other))
        r, x = (z - np.logaddexp.reduce(z, axis=1, keepdims=True) for z in logits)
        return float(np.median((np.exp(r) * (r - x)).sum(axis=1)))


def _stock(job: Job) -> Job:
    # One thread: two of ggml's spin against each other for ages when the machine is busy.
    return replace(job, device="cpu", n_threads=1)


def _exact(job: Job, path: Path) -> Job:
    return replace(_stock(job), model=str(path), kv="f32", flash=False)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("models")
    r = Runs(folder)
    configs = {f"{arch}-{t}": replace(SMALL, arch=arch, type=t) for arch in ARCHITECTURES for t in TYPES} | VARIANTS
    for name, cfg in configs.items():
        path = write_model(folder / f"{name}.gguf", cfg)
        exact = in_float32(path, folder / f"{name}-exact.gguf")
        packed = folder / f"{name}-packed.gguf"
        if cfg.type in TILED:
            gguf_tools.pack(path, packed)
        modes = MODES if name not in VARIANTS else ("prefill", "parallel")
        for mode in modes:
            job = Job(str(path), device="npu", mode=mode)
            r.add((name, "stock", mode), _stock(job))
            if mode != "decode":
                r.add((name, "exact", mode), _exact(job, exact))
            r.add((name, "npu", mode), job)
        if cfg.type in TILED:
            job = Job(str(packed), device="npu", mode="parallel")
            r.add((name, "repacked"), job)
            r.add((name, "process"), replace(job, executor="process"))
    for name, (model, changes) in SETTINGS.items():
        job = replace(Job(str(folder / f"{model}.gguf"), device="npu"), **changes)
        r.add((name, "stock"), _stock(job))
        r.add((name, "exact"), _exact(job, folder / f"{model}-exact.gguf"))
        r.add((name, "npu"), job)
    r.run()
    return r


GRID = [f"{arch}-{t}" for arch in ARCHITECTURES for t in TYPES]
CASES = [(name, mode) for name in GRID for mode in MODES] + [(n, m) for n in VARIANTS for m in ("prefill", "parallel")]
TILED_MODELS = [n for n in (*GRID, *VARIANTS) if (VARIANTS[n].type if n in VARIANTS else n.split("-")[1]) in TILED]
CHOOSING = [n for n, cfg in VARIANTS.items() if cfg.n_expert_used < cfg.n_expert]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_whole_graph_runs_on_the_device(runs: Runs, name: str, mode: str) -> None:
    result = runs[name, "npu", mode]
    assert result.logits.shape[0] >= 256
    # Two splits: the CPU looks the embeddings up, everything else is one graph on the device.
    assert result.splits == (2, 2)
    assert result.failures == 0
    calls = {"prefill": 1, "decode": 256, "parallel": 17}[mode]
    assert result.graphs == calls
    n_layer = VARIANTS[name].n_layer if name in VARIANTS else SMALL.n_layer
    # At least seven matrices, two norms and an attention per layer.
    assert result.ops >= calls * n_layer * 10
    assert runs[name, "stock", mode].graphs == 0


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_logits_are_those_of_the_stock_backend(runs: Runs, name: str, mode: str) -> None:
    figures = runs.figures((name, "stock", mode), (name, "npu", mode))
    limit = K_KL_LIMIT if name in VARIANTS and VARIANTS[name].type in BLOCKS_OF_256 else KL_LIMIT
    if name in CHOOSING:
        assert runs.median_kl((name, "stock", mode), (name, "npu", mode)) < limit
    assert figures.kl < limit * (20 if name in CHOOSING else 1), figures
    assert figures.top1 >= TOP1_LIMIT, figures


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_logits_are_as_good_as_the_stock_backends(runs: Runs, name: str, mode: str) -> None:
    exact = (name, "exact", "prefill" if mode == "decode" else mode)
    stock, npu = (name, "stock", mode), (name, "npu", mode)
    if name in CHOOSING:
        assert runs.median_kl(exact, npu) <= MEDIAN_RATIO * runs.median_kl(exact, stock) + FLOOR
    else:
        _assert_as_good(runs, exact, stock, npu)


def _assert_as_good(runs: Runs, exact: tuple[str, ...], stock: tuple[str, ...], npu: tuple[str, ...]) -> None:
    theirs, ours = runs.figures(exact, stock), runs.figures(exact, npu)
    assert ours.nmse <= ERROR_RATIO * theirs.nmse + FLOOR, (ours, theirs)
    assert ours.kl <= ERROR_RATIO * theirs.kl + FLOOR, (ours, theirs)
    # 257 near-tie coin flips on each side: three standard deviations of the difference of two 5 % shares are 6 %.
    assert ours.top1 >= theirs.top1 - 0.06, (ours, theirs)


@pytest.mark.parametrize("name", TILED_MODELS)
def test_repacked_file_and_process_executor_give_the_same_bits(runs: Runs, name: str) -> None:
    ordinary, thread, process = runs[name, "npu", "parallel"], runs[name, "repacked"], runs[name, "process"]
    assert process.executor == "process"
    assert process.npu_pid not in (0, process.pid)
    assert thread.executor == "thread"
    assert thread.npu_pid == thread.pid
    assert process.graphs == thread.graphs
    np.testing.assert_array_equal(thread.logits, ordinary.logits)
    np.testing.assert_array_equal(process.logits, ordinary.logits)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(runs: Runs, name: str) -> None:
    result = runs[name, "npu"]
    assert result.failures == 0
    offloaded = SETTINGS[name][1].get("n_gpu_layers") != 0
    assert (result.graphs > 0) == offloaded
    figures = runs.figures((name, "stock"), (name, "npu"))
    # Rounding to 4 bits turns a difference in the last bit of a float into a step of an eighth: with such a cache the
    # stock backend is 5 times KL_LIMIT from the same weights in float32.
    assert figures.kl < KL_LIMIT * (4 if name == "4-bit cache" else 1), figures
    assert figures.top1 >= TOP1_LIMIT, figures
    _assert_as_good(runs, (name, "exact"), (name, "stock"), (name, "npu"))


@pytest.mark.parametrize("name", GRID)
def test_decode_and_prefill_agree(runs: Runs, name: str) -> None:
    """The kernels for one row and for many are different code."""
    figures = runs.figures((name, "npu", "prefill"), (name, "npu", "decode"))
    assert figures.kl < KL_LIMIT, figures
    assert figures.top1 >= TOP1_LIMIT, figures
