"""Wall time of Best-of-N: N samples of one prompt, as people get them today and with Tilebeam, runs interleaved.

    PYTHONPATH=python:. python bench/best_of_n.py [-m MODEL.gguf] [-N 16] [--json] [--quick]

Three ways to the same number of tokens, on the same libllama with the same threads, models loaded before the clock
starts: Tilebeam; `llama_cpp.Llama` called N times, one after the other (it finds the prompt in its cache after the
first call, so that it decodes the prompt once, too); and one context of the stock CPU backend that decodes N sequences
at a time, driven by the same scheduler as Tilebeam. Each round starts with an empty cache. Tokens are sampled
(temperature 0.8, top-k 40, top-p 0.95) and an end of text does not end a sample, so that all do the same work. Without
-m it writes a random model with the shape of Qwen2.5-1.5B (--quick: of Qwen2.5-0.5B, fewer tokens).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import limits
import llama_cpp
import load
import numpy as np
import report
import tilebeam
from tilebeam.lm import LM
from tqdm import tqdm


def one_after_the_other(llm: llama_cpp.Llama, prompt: list[int], n: int, n_gen: int) -> None:
    """N calls of the binding's own token loop."""
    llm.reset()
    llm._ctx.kv_cache_clear()
    for _ in range(n):
        for count, _ in enumerate(llm.generate(prompt, temp=0.8, top_k=40, top_p=0.95), 1):
            if count == n_gen:
                break


def together(lm: LM, prompt: list[int], n: int, n_gen: int) -> None:
    """N samples of one request."""
    params = tilebeam.SamplingParams(
        n=n, max_tokens=n_gen, temperature=0.8, top_k=40, top_p=0.95, seed=1, ignore_eos=True
    )
    lm.generate([prompt], params)


def seconds_of(run: Callable[[], None]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def main() -> None:
    """Measure and print."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-m", "--model", type=Path, help="ordinary GGUF file")
    p.add_argument("-N", "--n-samples", type=int, default=16)
    p.add_argument("-p", "--n-prompt", type=int, help="prompt tokens (default 512, 128 with --quick)")
    p.add_argument("-n", "--n-gen", type=int, help="tokens per sample (default 128, 16 with --quick)")
    p.add_argument("-t", "--threads", type=int, default=limits.machine()["cpus"])
    p.add_argument("-r", "--rounds", type=int, help="default 3, 1 with --quick")
    p.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    p.add_argument("--quick", action="store_true", help="a smaller model, fewer tokens, one round")
    a = p.parse_args()
    n, rounds = a.n_samples, a.rounds or (1 if a.quick else 3)
    n_prompt, n_gen = a.n_prompt or (128 if a.quick else 512), a.n_gen or (16 if a.quick else 128)
    path = a.model or load.files(None, a.quick)[0]
    room = n_prompt + n * n_gen
    with ExitStack() as stack:
        llm = llama_cpp.Llama(
            str(path),
            n_ctx=n_prompt + n_gen,
            n_threads=a.threads,
            n_threads_batch=a.threads,
            n_gpu_layers=0,
            flash_attn=True,
            verbose=False,
        )
        stack.callback(llm.close)
        stock, ours = (
            stack.enter_context(tilebeam.load(path, device=d, n_ctx=room, n_seq_max=n, threads=a.threads))
            for d in ("cpu", "npu")
        )
        prompt = np.random.default_rng(1).integers(1, ours.n_vocab, n_prompt).tolist()
        ways: dict[str, Callable[[], None]] = {
            "ours": lambda: together(ours, prompt, n, n_gen),
            "one context": lambda: together(stock, prompt, n, n_gen),
            "one by one": lambda: one_after_the_other(llm, prompt, n, n_gen),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        together(ours, prompt, n, 2)
        together(stock, prompt, n, 2)
        with tqdm(total=rounds * len(ways), desc="runs", disable=None) as bar:
            for _ in range(rounds):
                for name, run in ways.items():
                    time.sleep(0.2)  # the stock backend's threads spin for a while after a run
                    seconds[name].append(seconds_of(run))
                    bar.update()
    tokens = n * n_gen
    rows = [
        report.row(
            f"Best-of-{n}, prompt {n_prompt}, {n_gen} new, against {label}",
            report.Pairs(seconds["ours"], seconds[name]),
            tokens,
            "tokens/s",
        )
        for name, label in (("one by one", f"{n} calls of Llama"), ("one context", f"one context of {n} sequences"))
    ]
    if a.json:
        report.emit("best_of_n", {}, rows)
        return
    for r in rows:
        report.show(r)


if __name__ == "__main__":
    main()
