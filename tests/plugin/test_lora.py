"""LoRA adapters on the NPU: all ops of the adapter run on the device, and the logits are those of the stock backend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import accuracy
import numpy as np
import pytest
from accuracy import Job, Result, WorkerError, compare, got
from lora_kit import MATRICES, Q, write_adapter
from tilebeam import gguf

from bench.lib.synth import SynthConfig, write_model

KL_LIMIT, TOP1_LIMIT = 1e-3, 0.90  # those of test_models.py
MOVED = 0.02  # nats from the model without adapter: what these adapters do is far above any rounding
MODELS = {
    "llama-q4_0": SynthConfig(n_layer=3, type="q4_0"),
    "qwen2-q8_0": SynthConfig(n_layer=3, arch="qwen2", type="q8_0"),
    "gemma3-iq4_nl": SynthConfig(n_layer=3, arch="gemma3", type="iq4_nl"),
    # All experts used: no near ties of the router, which rounding decides.
    "experts-q4_0": SynthConfig(n_layer=2, arch="qwen3moe", n_expert=3, n_expert_used=3, type="q4_0"),
}
# (model, the adapters' types and scales, what changes in the run)
CASES: dict[str, tuple[str, list[tuple[str, float]], dict[str, object]]] = {
    "f32": ("llama-q4_0", [("f32", 1.0)], {}),
    "f16": ("llama-q4_0", [("f16", 1.0)], {"mode": "parallel"}),
    "bf16": ("llama-q4_0", [("bf16", 1.0)], {"mode": "decode", "n_positions": 64}),
    "q8_0": ("llama-q4_0", [("q8_0", 1.0)], {}),
    "several with scales of their own": ("qwen2-q8_0", [("f32", 0.7), ("f16", -1.2), ("q8_0", 0.5)], {}),
    "f32 on q8_0": ("qwen2-q8_0", [("f32", 1.0)], {"mode": "parallel"}),
    "on iq4_nl": ("gemma3-iq4_nl", [("f16", 1.0)], {}),
    "on experts": ("experts-q4_0", [("f32", 1.0)], {}),
}


def adapter(folder: Path, model: str, kind: str) -> Path:
    path = folder / f"{model}-lora-{kind}.gguf"
    if not path.exists():
        matrices = MATRICES if "experts" not in model else ("attn_q", "ffn_up_exps", "ffn_down_exps")
        rank = 32 if kind == "q8_0" else 8
        strength = 1.0 if "experts" in model else 0.3
        write_adapter(
            path,
            folder / f"{model}.gguf",
            rank=rank,
            type=Q[kind.upper()],
            matrices=matrices,
            strength=strength,
            seed=len(kind),
        )
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    for name, config in MODELS.items():
        path = write_model(folder / f"{name}.gguf", config)
        gguf.pack(path, folder / f"{name}-packed.gguf")
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[tuple[str, str], Result | WorkerError]:
    jobs: dict[tuple[str, str], Job] = {}
    for name, (model, adapters, changes) in CASES.items():
        lora = tuple((str(adapter(folder, model, kind)), scale) for kind, scale in adapters)
        job = replace(Job(str(folder / f"{model}.gguf"), device="npu", lora=lora), **changes)
        jobs[name, "npu"] = job
        jobs[name, "without"] = replace(job, lora=())
        # One thread: two of ggml's spin against each other for ages when the machine is busy.
        jobs[name, "stock"] = replace(job, device="cpu", n_threads=1)
        jobs[name, "packed"] = replace(job, model=str(folder / f"{model}-packed.gguf"))
        jobs[name, "process"] = replace(job, executor="process")
    return dict(zip(jobs, accuracy.run(list(jobs.values()), folder / "logits"), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_stock_backend(runs: dict[tuple[str, str], Result], name: str) -> None:
    npu, stock, without = (got(runs[name, what]).logits for what in ("npu", "stock", "without"))
    figures = compare(stock, npu)
    assert figures.kl < KL_LIMIT, figures
    assert figures.top1 >= TOP1_LIMIT, figures
    assert compare(without, npu).kl > MOVED


@pytest.mark.parametrize("name", CASES)
def test_adapters_run_on_the_device(runs: dict[tuple[str, str], Result], name: str) -> None:
    npu, without = got(runs[name, "npu"]), got(runs[name, "without"])
    assert npu.splits == (2, 2)  # the token look-up, and all the rest
    assert npu.graphs == without.graphs
    adapters = sum(scale != 0 for _, scale in CASES[name][1])
    # two products, a scaling and an addition for each matrix of each layer
    matrices = 3 if "experts" in name else 7
    assert npu.ops - without.ops >= npu.graphs * adapters * matrices * 4 * MODELS[CASES[name][0]].n_layer
    assert npu.failures == 0


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", ["packed", "process"])
def test_repacked_files_and_the_process_give_the_same_logits(
    runs: dict[tuple[str, str], Result], name: str, how: str
) -> None:
    other, npu = got(runs[name, how]).logits, got(runs[name, "npu"]).logits
    if len(CASES[name][1]) == 1:
        np.testing.assert_array_equal(other, npu)
    else:  # llama.cpp keeps a context's adapters in a hash table by address: the order of its sums differs by chance
        figures = compare(npu, other)
        assert figures.kl < KL_LIMIT, figures
    assert got(runs[name, how]).executor == ("process" if how == "process" else "thread")
