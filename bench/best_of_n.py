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

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean

import llama_cpp
import numpy as np
import tilebeam
from tilebeam.cli import console
from tilebeam.model.lm import LM

from bench import load
from bench.lib import limits, report, rounds
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
    p.add_argument("--calls", type=int, help="calls of Llama to make (default all N, 4 with --quick)")
    p.add_argument("--against", choices=["calls", "context"], help="one of the two baselines (default both)")
    p.add_argument(
        "--cpu-flash-attn",
        choices=["on", "off"],
        help="of the stock backend (default: off for Llama, on for the context)",
    )
    p.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    p.add_argument("--quick", action="store_true", help="a smaller model, fewer tokens, one round")
    rounds.add_options(p)
    a = p.parse_args()
    n, wanted = a.n_samples, a.rounds or (1 if a.quick else 3)
    calls = min(n, a.calls or (4 if a.quick else n))
    n_prompt, n_gen = a.n_prompt or (128 if a.quick else 512), a.n_gen or (16 if a.quick else 128)
    if n > 1 and calls < 2:
        p.error("--calls must be at least 2: the first call, which decodes the prompt, is unlike the others")
    path = a.model or load.files(None, a.quick)[0]
    flash = {"calls": a.cpu_flash_attn == "on", "context": a.cpu_flash_attn != "off"}
    measured = "" if calls == n else f", {calls} of them measured"
    what = f"Best-of-{n}, prompt {n_prompt}, {n_gen} new"
    cases = {"calls": f"{what}, against {n} calls of Llama{measured}", "context": f"{what}, against one context of {n}"}
    cases = {a.against: cases[a.against]} if a.against else cases
    if a.cpu_flash_attn:
        cases = {way: f"{name}, flash attention {a.cpu_flash_attn}" for way, name in cases.items()}
    try:
        log = Rounds(a.resume, {"bench": "best_of_n", "model": path.name, "threads": a.threads}, a.seconds)
        with ExitStack() as stack:
            ways: dict[str, Callable[[], dict[str, float]]] = {}
            room = n_prompt + n * n_gen
            lms = {
                d: stack.enter_context(
                    tilebeam.load(
                        path,
                        device=d,
                        n_ctx=room,
                        n_seq_max=n,
                        threads=a.threads,
                        flash_attn=flash["context"] or d == "npu",
                    )
                )
                for d in ("npu", "cpu")
            }
            llm = llama_cpp.Llama(
                str(path),
                n_ctx=n_prompt + n_gen,
                n_threads=a.threads,
                n_threads_batch=a.threads,
                n_gpu_layers=0,
                flash_attn=flash["calls"],
                verbose=False,
            )
            stack.callback(llm.close)
            prompt = np.random.default_rng(1).integers(1, lms["npu"].n_vocab, n_prompt).tolist()
            ways["calls"] = lambda: one_after_the_other(llm, prompt, n, n_gen, calls)
            ways["context"] = lambda: {"baseline": seconds_of(lambda: together(lms["cpu"], prompt, n, n_gen))}
            for lm in lms.values():
                together(lm, prompt, n, 4)
            progress = stack.enter_context(console.bar("Best-of-N"))
            task = progress.add_task("", total=wanted * len(cases), note="")
            while (least := log.fewest(cases.values())) < wanted:
                begun = 0
                for way, name in cases.items():
                    if log.count(name) > least or not log.begin(name):
                        continue
                    begun += 1
                    progress.update(task, description=way)
                    ours = seconds_of(lambda: together(lms["npu"], prompt, n, n_gen))
                    baseline = ways[way]()
                    time.sleep(0.2)  # the stock backend's threads spin for a while after a run
                    log.end(ours=ours, **baseline)
                    progress.update(task, advance=1)
                if not begun:
                    break
    except (tilebeam.TilebeamError, OSError, ValueError, RuntimeError) as error:
        sys.exit(f"best_of_n: {error}")
    rows = []
    for way, name in cases.items():
        if name in log:
            parts = ("ours", "baseline", *(("first_call", "later_call") if way == "calls" else ()))
            seconds = {f"seconds_{part}": round(log.median(name, part), 3) for part in parts}
            rows.append(log.row(name, n * n_gen, "tokens/s", **seconds))
    if note := log.note():
        print(note, file=sys.stderr)
    if a.json:
        report.emit("best_of_n", {}, rows)
        return
    for r in rows:
        report.show(r)
        times = ", ".join(f"{k.removeprefix('seconds_')} {v:.2f} s" for k, v in r.items() if k.startswith("seconds_"))
        print(f"{'':44} {times}")


if __name__ == "__main__":
    main()
