"""Engines that do the same work, for bench/peers.py: prompts of random tokens, and samples of a given length behind
them. Each tells how long its prompts took, and what follows their first token."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tilebeam
from tilebeam import LM, SamplingParams

from bench.lib.batched_bench import BatchedBench
from bench.lib.clients import Answers, Load, Served, ask_all, server

SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "top_k": 40}  # llama.cpp's defaults, of its server too
_LEAST = 0.2  # seconds of measuring that difference
_SEEDS = 1 << 20  # of one round


@dataclass(frozen=True)
class Work:
    """One case.

    Attributes:
        n_parallel: samples at once.
        n_prompt, n_gen: tokens of each prompt, and of each sample, its first one included.
        shared: the samples are of one prompt; else each has its own.
    """

    n_parallel: int
    n_prompt: int
    n_gen: int
    shared: bool = False

    @property
    def prompt_tokens(self) -> int:
        return self.n_prompt * (1 if self.shared else self.n_parallel)

    @property
    def decoded_tokens(self) -> int:
        """Return how many tokens of all samples are decoded: not their first ones, which come with the prompts."""
        return self.n_parallel * (self.n_gen - 1)

    @property
    def cells(self) -> int:
        """KV cells that hold it where every sample has its own."""
        return self.n_parallel * (self.n_prompt + self.n_gen)

    @property
    def name(self) -> str:
        prompts = f"{self.n_prompt} tokens" + (", shared" if self.shared and self.n_parallel > 1 else "")
        return f"{self.n_parallel} x ({prompts})"

    def prompts(self, seed: int, n_vocab: int) -> list[list[int]]:
        """Random ones, of tokens from the middle of a vocabulary, where no control tokens are."""
        rng = np.random.default_rng([seed, self.n_parallel, self.n_prompt, self.shared])
        count = 1 if self.shared else self.n_parallel
        return [[int(t) for t in rng.integers(n_vocab // 4, n_vocab // 2, self.n_prompt)] for _ in range(count)]


# Seconds up to the first token of all samples, and of the others; RuntimeError if it failed, or gave other counts.
Engine = Callable[[Work, int], tuple[float, float]]
# Seconds of all: prompts, tokens of each sample, seed.
Run = Callable[[Work, list[list[int]], int, int], float]


def in_two(run: Run, n_vocab: int) -> Engine:
    """Make an engine that only tells how long everything took: with one token a sample, then with all of them, and both
    again where that was too short to tell them apart, or where noise made the longer run the faster one (of all runs so
    far, for ten times that long at most). No prompt comes twice, so that no cache knows it."""

    def engine(work: Work, seed: int) -> tuple[float, float]:
        first = whole = 0.0
        count = 0
        while first + whole < _LEAST or (first >= whole and first + whole < 10 * _LEAST):
            one, other = (seed * _SEEDS + 2 * count + i for i in range(2))
            first += run(work, work.prompts(one, n_vocab), 1, one)
            whole += run(work, work.prompts(other, n_vocab), work.n_gen, other)
            count += 1
        return first / count, (whole - first) / count

    return engine


def program(bench: BatchedBench, model: Path, threads: int) -> Engine:
    """Make an engine of a build's llama-batched-bench, which samples nothing and has prompts of its own."""
    return lambda w, _: bench.phases(model, w.n_prompt, w.n_gen - 1, w.n_parallel, threads, shared=w.shared)


def in_process(lm: LM) -> Engine:
    """Tilebeam, or llama.cpp's own CPU backend under the same scheduler."""

    def run(work: Work, prompts: list[list[int]], n_gen: int, seed: int) -> float:
        n = work.n_parallel // len(prompts)
        params = SamplingParams(n=n, max_tokens=n_gen, seed=seed, ignore_eos=True, **SAMPLING)
        began = time.perf_counter()
        found = lm.generate(prompts, params)
        seconds = time.perf_counter() - began
        _check(sum(len(s.token_ids) for o in found for s in o.outputs), n_gen * work.n_parallel)
        return seconds

    return in_two(run, lm.n_vocab)


def served(port: int, n_vocab: int) -> Engine:
    """Make an engine of a server with OpenAI's /v1/completions: each sample is a client's request, all at once."""

    def run(work: Work, prompts: list[list[int]], n_gen: int, seed: int) -> float:
        del seed
        load = Load([[(prompts[i % len(prompts)], n_gen)] for i in range(work.n_parallel)])
        answers = Answers()
        began = time.perf_counter()
        asyncio.run(ask_all(port, load, False, answers))
        seconds = time.perf_counter() - began
        if answers.failures:
            raise RuntimeError(f"a server's answer: {answers.failures[0][:300]}")
        return seconds

    return in_two(run, n_vocab)


@contextmanager
def loaded(model: Path, device: Literal["npu", "cpu"], threads: int, works: Sequence[Work]) -> Iterator[LM]:
    """Load a model with room for all cases."""
    room, most = max(w.cells for w in works), max(w.n_parallel for w in works)
    with tilebeam.load(model, device, n_ctx=room, n_seq_max=most, threads=threads, lookup=False) as lm:
        yield lm


@contextmanager
def stock(model: Path, threads: int, works: Sequence[Work]) -> Iterator[Engine]:
    with loaded(model, "cpu", threads, works) as lm:
        yield in_process(lm)


@contextmanager
def server_of(command: Sequence[str], threads: int, works: Sequence[Work], n_vocab: int) -> Iterator[Engine]:
    """Run a server with slots that hold all cases. llama-server gives each slot an equal part of the cells."""
    slots, longest = max(w.n_parallel for w in works), max(w.n_prompt + w.n_gen for w in works)
    size = ["-c", str(slots * longest), "-np", str(slots), "-t", str(threads)]
    with server([*command, *size]) as running:
        yield served(running.port, n_vocab)


def tilebeam_command(model: Path) -> list[str]:
    return [sys.executable, "-m", "tilebeam", "serve", "-m", str(model), "--no-cache-prompt", "--no-speculation"]


def llama_server_command(program: Path, model: Path, threads: int) -> list[str]:
    """Return the command that starts llama-server, but for its slots and threads."""
    usual = ("-b", 512, "-ub", 512, "-ngl", 0, "-fa", "on", "-tb", threads, "--no-cache-prompt", "--no-webui")
    return [str(program), "-m", str(model), *map(str, usual)]


# Runs a script of llama-cpp-python that imports its bindings of libmtmd, which is for images and not built here.
_TEXT_ONLY = """\
import runpy, sys, types
sys.modules["llama_cpp.mtmd_cpp"] = types.ModuleType("llama_cpp.mtmd_cpp")
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@contextmanager
def llama_cpp_server(script: Path, model: Path, threads: int, slots: int, cells: int) -> Iterator[Served]:
    """Run the batched server of llama-cpp-python's examples (examples/server/server.py), whose slots share the context.

    Raises:
        RuntimeError: it did not start.
    """
    settings = {"path": str(model), "alias": "model", "n_ctx": cells, "n_seq_max": slots, "kv_unified": True}
    settings |= {"n_batch": 512, "n_ubatch": 512, "threads": threads, "threads_batch": threads}
    settings |= {"flash_attn": True, "n_gpu_layers": 0}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"

        def command(port: int) -> list[str]:
            config.write_text(json.dumps({"server": {"port": port}, "model": settings}), encoding="utf-8")
            return [sys.executable, "-c", _TEXT_ONLY, str(script), "-C", str(config)]

        with server(command, health="/healthz") as served:
            yield served


def never_ending(lm: LM) -> dict[str, Any]:
    """`IGNORE_EOS` for servers that do not know it: a bias against control tokens, those that end a text among them."""
    return {"logit_bias": {str(t): -100 for t in range(lm.n_vocab) if lm.is_control(t)}}


@contextmanager
def openvino(python: str, model: Path, threads: int, works: Sequence[Work], n_vocab: int) -> Iterator[Engine]:
    """OpenVINO GenAI as that Python has it, by openvino_worker.py.

    Raises:
        RuntimeError: it is not there, or does not read this file.
    """
    worker = Path(__file__).with_name("openvino_worker.py")
    most = max(w.n_parallel for w in works)
    process = subprocess.Popen(
        [python, str(worker), str(model), str(threads), str(most)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def run(work: Work, prompts: list[list[int]], n_gen: int, seed: int) -> float:
        asked = {"prompts": prompts, "samples": work.n_parallel // len(prompts), "max_tokens": n_gen, "seed": seed}
        assert process.stdin is not None
        process.stdin.write(json.dumps(asked | {"sampling": SAMPLING}) + "\n")
        process.stdin.flush()
        answer = _answer(process)
        _check(answer["tokens"], n_gen * work.n_parallel)
        return float(answer["seconds"])

    try:
        _answer(process)
        yield in_two(run, n_vocab)
    finally:
        process.kill()
        process.wait()


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Read the worker's next line; what it prints besides is left out."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            answer: dict[str, Any] = json.loads(line)
            if "error" in answer:
                raise RuntimeError(answer["error"])
            return answer
    raise RuntimeError(f"it ended with status {process.wait()}")


def _check(found: int, wanted: int) -> None:
    if found != wanted:
        raise RuntimeError(f"{found} tokens instead of {wanted}")
