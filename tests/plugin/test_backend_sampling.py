"""llama.cpp's sampling as part of the graph, on the device: the same tokens as when the CPU backend runs that graph.

The model is float32, so that both backends see nearly the same logits, and both are fed the same random tokens, so that
one near tie does not change what follows. TOP_K promises no order, and drawing depends on it: its candidates are
compared as sets, and the token drawn must be one of them.
"""

from __future__ import annotations

import ctypes
import re
from contextlib import ExitStack
from pathlib import Path

import llama_cpp as llama
import numpy as np
import pytest
import tilebeam
from tilebeam.native.llama import log_router

from bench.lib.synth import SynthConfig, write_model

STEPS = 60
N_VOCAB = 700

# One sequence each, with its own chain.
CHAINS = {
    "greedy": lambda: [llama.llama_sampler_init_greedy()],
    "top-k": lambda: [
        llama.llama_sampler_init_top_k(40),
        llama.llama_sampler_init_temp(0.8),
        llama.llama_sampler_init_dist(7),
    ],
    "top-p": lambda: [llama.llama_sampler_init_top_p(0.9, 1), llama.llama_sampler_init_dist(8)],
    "min-p, dynamic temperature": lambda: [
        llama.llama_sampler_init_min_p(0.05, 1),
        llama.llama_sampler_init_temp_ext(0.8, 0.2, 1.0),
        llama.llama_sampler_init_dist(9),
    ],
}


class Run:
    """Sampled tokens `[STEPS, sequences]`, the candidates of each step and sequence, and the graph splits."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.candidates: list[list[set[int]]] = []
        self.splits = 0


def _decode(path: Path, on_device: bool) -> Run:
    run = Run()
    with ExitStack() as stack:
        log = stack.enter_context(log_router().capture())
        model_params = llama.llama_model_default_params()
        model_params.n_gpu_layers = -1 if on_device else 0
        model = llama.llama_model_load_from_file(str(path).encode(), model_params)
        assert model
        stack.callback(llama.llama_model_free, model)

        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = 512, len(CHAINS), True
        params.n_threads = params.n_threads_batch = 1  # beside other tests, more wait for each other at barriers
        params.offload_kqv = params.op_offload = on_device
        chains = []
        for build in CHAINS.values():
            chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
            stack.callback(llama.llama_sampler_free, chain)
            for sampler in build():
                llama.llama_sampler_chain_add(chain, sampler)
            chains.append(ctypes.cast(chain, ctypes.c_void_p))
        configs = (llama.llama_sampler_seq_config * len(chains))(
            *[llama.llama_sampler_seq_config(i, chain) for i, chain in enumerate(chains)]
        )
        params.samplers, params.n_samplers = configs, len(chains)
        context = llama.llama_init_from_model(model, params)
        assert context
        stack.callback(llama.llama_free, context)

        batch = llama.llama_batch_init(len(chains), 0, 1)
        stack.callback(llama.llama_batch_free, batch)
        tokens = np.random.default_rng(3).integers(0, N_VOCAB, (STEPS, len(chains)))
        for position, row in enumerate(tokens):
            batch.n_tokens = len(chains)
            for i, token in enumerate(row):
                batch.token[i], batch.pos[i] = int(token), position
                batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, i, 1
            assert llama.llama_decode(context, batch) == 0
            run.tokens.append([llama.llama_get_sampled_token_ith(context, i) for i in range(len(chains))])
            run.candidates.append(
                [
                    set(
                        llama.llama_get_sampled_candidates_ith(context, i)[
                            : llama.llama_get_sampled_candidates_count_ith(context, i)
                        ]
                    )
                    for i in range(len(chains))
                ]
            )
    run.splits = max(int(n) for n in re.findall(r"splits = (\d+)", "".join(text for _, text in log)))
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write_model(path, SynthConfig(n_layer=2, n_vocab=N_VOCAB, type="f32"))
    tilebeam.register()
    return _decode(path, on_device=False), _decode(path, on_device=True)


def test_the_whole_chain_runs_on_the_device(runs: tuple[Run, Run]) -> None:
    assert runs[1].splits == 2  # the token embedding look-up, and all else


@pytest.mark.parametrize("name", [name for name in CHAINS if name != "top-k"])
def test_tokens(runs: tuple[Run, Run], name: str) -> None:
    i = list(CHAINS).index(name)
    cpu, npu = (np.array(run.tokens)[:, i] for run in runs)
    assert np.mean(cpu == npu) >= 0.95
    assert len(set(npu)) > STEPS // 4  # the chain looks at the logits


def test_top_k(runs: tuple[Run, Run]) -> None:
    i = list(CHAINS).index("top-k")
    pairs = [(a[i], b[i]) for a, b in zip(runs[0].candidates, runs[1].candidates, strict=True)]
    assert all(len(a) == len(b) == 40 for a, b in pairs)
    assert np.mean([len(a & b) for a, b in pairs]) >= 39.5
    assert all(row[i] in seen[i] for row, seen in zip(runs[1].tokens, runs[1].candidates, strict=True))
