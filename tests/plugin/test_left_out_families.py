"""Families that llama.cpp's test program leaves out of its own runs, as models made by bench/families.py: the logits of
the CPU backend, and few pieces of the graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accuracy
import pytest
import tilebeam
from accuracy import Job

from bench import families

# The splits of the graph of a token (two are the fewest, as the token embedding is on the CPU), and the error (NMSE) in
# float32. BitNet's output matrix is the embedding table. Gemma's scores are not scaled, so that random weights make
# much of the CPU backend's FP16 table of GELU.
FAMILIES = {
    "gemma3n": (2, 1e-4),
    "gemma4": (2, 1e-3),
    "apertus": (2, 1e-6),
    "bitnet": (3, 5e-6),
    "step35": (2, 1e-6),
    "rwkv6": (2, 1e-6),
    "rwkv7": (2, 1e-6),
    "arwkv7": (2, 1e-6),
    "rwkv6qwen2": (2, 1e-6),
}
ENCODERS = ("bert", "jina-bert-v2", "t5encoder", "gemma-embedding")
WIDTH, FLOAT32, Q8_0 = 256, "0", "7"  # llama.cpp's types of files


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_are_the_cpu_backends(family: str, tmp_path: Path) -> None:
    [model] = families.make(family, FLOAT32, tmp_path, WIDTH)
    settings: dict[str, Any] = {"mode": "mixed", "n_positions": 40, "n_threads": 1, "n_ctx": 256, "n_ubatch": 64}
    runs = [settings]
    if "rwkv" in family:  # the states of several sequences
        runs.append(settings | {"mode": "streams", "n_positions": 8, "n_ctx": 512, "kv_unified": False})
    jobs = [Job(str(model), device, **run) for run in runs for device in ("cpu", "npu")]
    results = [accuracy.got(result) for result in accuracy.run(jobs, tmp_path / "logits")]
    most, error = FAMILIES[family]
    for cpu, npu in zip(results[::2], results[1::2], strict=True):
        assert npu.ops > 0
        assert npu.splits[1] <= most
        assert accuracy.compare(cpu.logits, npu.logits).nmse < error


@pytest.mark.parametrize("family", ENCODERS)
def test_the_embeddings_are_the_cpu_backends(family: str, tmp_path: Path) -> None:
    [model] = families.make(family, Q8_0, tmp_path, WIDTH)
    found = []
    for device in ("cpu", "npu"):
        with tilebeam.load(model, device, n_ctx=256, n_seq_max=1, threads=1) as lm:
            found.append(lm.embed([[5, 6, 7, 8], [9, 10]], pooling="mean"))
    assert (found[0] * found[1]).sum(axis=1) == pytest.approx([1, 1], abs=1e-3)


def test_the_program_says_why_there_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no model of no-such-family"):
        families.make("no-such-family", Q8_0, tmp_path)
