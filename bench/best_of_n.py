"""Wall time of Best-of-N: N samples of one prompt, as people get them today and with Tilebeam, runs interleaved.

    python -m bench.best_of_n [-m MODEL.gguf] [-N 16] [--calls 4] [--json] [--quick]
        [--resume FILE --seconds S]

Three ways to the same number of tokens, on the same libllama with the same threads, models loaded before the clock
starts: Tilebeam; `llama_cpp.Llama` called N times, one after the other (it finds the prompt in its cache after the
first call, so that it decodes the prompt once, too); and one context of the stock CPU backend that decodes N sequences
at a time, driven by the same scheduler as Tilebeam. `Llama` runs as it does by default, without flash attention, the
context with it, as Tilebeam; `--cpu-flash-attn` sets both. Each round starts with an empty cache. Tokens are sampled
(temperature 0.8, top-k 40, top-p 0.95) and an end of text does not end a sample, so that all do the same work.

With `--calls C` only C of the N calls are made: the later ones do equal work, so the wall time of all is that of the
first and N - 1 times the mean of the others, and the row says so. Without -m it writes a random model with the shape of
Qwen2.5-1.5B (--quick: of Qwen2.5-0.5B, fewer tokens, 4 calls).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

import llama_cpp
import numpy as np
import tilebeam
from tilebeam.model.lm import LM

from bench.lib import models, report, rounds
from bench.lib.options import Parser
from bench.lib.rounds import Rounds


def one_after_the_other(llm: llama_cpp.Llama, prompt: list[int], n: int, n_gen: int, calls: int) -> dict[str, float]:
    """N calls of the binding's own token loop, or the first `calls` of them and the rest by their mean.

    Returns:
        "baseline": seconds of all N; "first_call" and "later_call": of the first, and the mean of the others.
    """
    llm.reset()
    llm._ctx.kv_cache_clear()
    spent = []
    for _ in range(calls):
        started = time.perf_counter()
        for count, _ in enumerate(llm.generate(prompt, temp=0.8, top_k=40, top_p=0.95), 1):
            if count == n_gen:
                break
        spent.append(time.perf_counter() - started)
    later = fmean(spent[1:]) if calls > 1 else 0.0
    return {"baseline": spent[0] + (n - 1) * later, "first_call": spent[0], "later_call": later}


def together(lm: LM, prompt: list[int], n: int, n_gen: int) -> None:
    params = tilebeam.SamplingParams(
        n=n, max_tokens=n_gen, temperature=0.8, top_k=40, top_p=0.95, seed=1, ignore_eos=True
    )
    lm.generate([prompt], params)


def seconds_of(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def arguments() -> Any:
    p = Parser(__doc__, "a smaller model, fewer tokens, one round")
    p.add_model("ordinary GGUF file")
    p.add_argument("-N", "--n-samples", type=int, default=16)
    p.add_count("-p", "--n-prompt", usual=512, quick=128, what="prompt tokens")
    p.add_count("-n", "--n-gen", usual=128, quick=16, what="tokens per sample")
    p.add_threads()
    p.add_rounds(3, 1)
    p.add_argument("--calls", type=int, metavar="C", help="calls of Llama to make (default all N, 4 with --quick)")
    p.add_argument("--against", choices=["calls", "context"], help="one of the two baselines (default both)")
    p.add_argument(
        "--cpu-flash-attn",
        choices=["on", "off"],
        help="of the stock backend (default: off for Llama, on for the context)",
    )
    rounds.add_options(p)
    a = p.parse()
    a.calls = min(a.n_samples, a.calls or (4 if a.quick else a.n_samples))
    if a.n_samples > 1 and a.calls < 2:
        p.error("--calls must be at least 2: the first call, which decodes the prompt, is unlike the others")
    return a


def cases_of(a: Any) -> dict[str, str]:
    n = a.n_samples
    measured = "" if a.calls == n else f", {a.calls} of them measured"
    what = f"Best-of-{n}, prompt {a.n_prompt}, {a.n_gen} new"
    cases = {"calls": f"{what}, against {n} calls of Llama{measured}", "context": f"{what}, against one context of {n}"}
    cases = {a.against: cases[a.against]} if a.against else cases
    if a.cpu_flash_attn:
        cases = {way: f"{name}, flash attention {a.cpu_flash_attn}" for way, name in cases.items()}
    return cases


def measure(a: Any, path: Path, cases: dict[str, str], log: Rounds) -> None:
    """Measure rounds of all cases until each has as many as wanted or the time is over."""
    n, room = a.n_samples, a.n_prompt + a.n_samples * a.n_gen
    flash = {"calls": a.cpu_flash_attn == "on", "context": a.cpu_flash_attn != "off"}
    with ExitStack() as stack:
        lms = {}
        for d in ("npu", "cpu"):
            with_flash = flash["context"] or d == "npu"
            lm = tilebeam.load(
                path, device=d, n_ctx=room, n_seq_max=n, threads=a.threads, flash_attn=with_flash, lookup=False
            )
            lms[d] = stack.enter_context(lm)
        llm = llama_cpp.Llama(
            str(path),
            n_ctx=a.n_prompt + a.n_gen,
            n_threads=a.threads,
            n_threads_batch=a.threads,
            n_gpu_layers=0,
            flash_attn=flash["calls"],
            verbose=False,
        )
        stack.callback(llm.close)
        prompt = np.random.default_rng(1).integers(1, lms["npu"].n_vocab, a.n_prompt).tolist()
        ways: dict[str, Callable[[], dict[str, float]]] = {
            "calls": lambda: one_after_the_other(llm, prompt, n, a.n_gen, a.calls),
            "context": lambda: {"baseline": seconds_of(lambda: together(lms["cpu"], prompt, n, a.n_gen))},
        }
        for lm in lms.values():
            together(lm, prompt, n, 4)
        way_of = {name: way for way, name in cases.items()}
        for name in log.turns(way_of, a.rounds):
            way = way_of[name]
            ours = seconds_of(lambda: together(lms["npu"], prompt, n, a.n_gen))
            baseline = ways[way]()
            time.sleep(0.2)  # the stock backend's threads spin for a while after a run
            log.end(ours=ours, **baseline)


def main() -> None:
    a = arguments()
    cases = cases_of(a)
    path = a.model or models.synthetic("bench-0.5b" if a.quick else "bench-1.4b", tied=False)
    log = Rounds(a.resume, {"bench": "best_of_n", "model": path.name, "threads": a.threads}, a.seconds)
    measure(a, path, cases, log)
    rows = report.Rows("best_of_n", a.json)
    for way, name in cases.items():
        if name in log:
            parts = ("ours", "baseline", *(("first_call", "later_call") if way == "calls" else ()))
            spent = {part: round(log.median(name, part), 3) for part in parts}
            row = log.row(name, a.n_samples * a.n_gen, "tokens/s", **{f"seconds_{k}": v for k, v in spent.items()})
            rows.add(row, ", ".join(f"{part} {v:.2f} s" for part, v in spent.items()))
    rows.finish()
    log.warn()


if __name__ == "__main__":
    report.start(main)
