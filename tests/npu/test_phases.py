"""Products of the same activations run in one phase of the schedule, wherever llama.cpp's list of ops has them.

ggml's allocator puts V where Q was before its rotation, unless the plugin asks it not to (`plugin/graph_optimize.h`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tilebeam
from numpy.typing import NDArray
from tilebeam.measure import trace as traces
from tilebeam.measure.trace import Tracer

from bench.lib import synth

LAYERS = 3


def decode_step(path: Path, sequences: int) -> NDArray[Any]:
    """Records of all ops of one decode step, on a schedule for two threads."""
    with tilebeam.load(path, n_ctx=256, n_seq_max=sequences, threads=2, executor="thread") as lm, Tracer(lm) as trace:
        lm.generate(["a b c"], tilebeam.SamplingParams(n=sequences, max_tokens=6, temperature=0.7, seed=1))
    ops = trace.records[trace.records["span"] == traces._SPAN["OP"]]
    last: NDArray[Any] = ops[ops["seq"] == ops["seq"].max()]
    return last


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("sequences", [1, 12])
def test_products_of_the_same_activations_share_a_phase(tmp_path: Path, arch: str, sequences: int) -> None:
    config = synth.SynthConfig(
        arch=arch, type="q4_0", n_layer=LAYERS, n_embd=256, n_head=4, n_head_kv=2, head_dim=64, n_ff=512
    )
    ops = decode_step(synth.write_model(tmp_path / "model.gguf", config), sequences)
    products = ops[ops["code"] == 1]  # TB_OP_MUL_MAT
    # What was converted for a product is stamped as the product, in an earlier phase.
    phase = {
        bytes(name).rstrip(b"\0").decode(): products["phase"][products["name"] == name].max()
        for name in set(products["name"])
    }
    for layer in range(LAYERS):
        for together in (("Qcur", "Kcur", "Vcur"), ("ffn_gate", "ffn_up")):
            names = [f"{name}-{layer}" for name in together]
            assert len({int(phase[name]) for name in names}) == 1, {name: int(phase[name]) for name in names}
    if arch != "qwen3":  # which norms Q and K first
        rotated = ops[ops["code"] == 6]  # TB_OP_ROPE
        for layer in range(LAYERS):
            of_layer = [bytes(name).endswith(f"-{layer}".encode()) for name in rotated["name"]]
            assert len(set(rotated["phase"][of_layer])) == 1
