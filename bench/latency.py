"""What one user waits for, and what decoding takes from the machine: the stock CPU backend and Tilebeam, runs
interleaved.

    python -m bench.latency [-m MODEL] [-p LENGTHS] [-npl SAMPLES] [-n 64] [--json] [--quick]
        [--resume FILE --seconds S]

Rows: time to first token (TTFT) and time per output token after it (TPOT) of one request over the length of its prompt
(the table of the NPU service paper); then, over the number of samples of one request behind the longest prompt, CPU
time per token, use of the CPUs and memory while decoding (the paper's figure 16). Each side has a process of its own
for every number of samples, with a context of just the cells that these need, and requests go through the whole engine:
prompt, sampling, detokenizing. No tokens are guessed ahead: prompts are random tokens, and no end of text ends a
sample. Memory is what is resident, pages of the file included, as the kernel counts it after the run; anonymous memory
is the part of it that is no page of a file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tilebeam
from tilebeam.cli.bench import numbers
from tilebeam.outputs import Progress

from bench.lib import models, report, rounds
from bench.lib.child import Child, answer
from bench.lib.options import Parser
from bench.lib.rounds import Rounds

SIDES = ("npu", "cpu")
PROMPTS = "256,512,768,1024"  # tokens
FIGURES = ("ttft", "tpot", "cpu", "busy", "resident", "anonymous")


def serve(device: Literal["npu", "cpu"], path: str, n_seq: int, n_ctx: int, threads: int) -> None:
    """Serve as the process of a side: run a request of so many tokens of prompt and answer, and say what it took."""
    rng = np.random.default_rng(0)
    with tilebeam.load(path, device=device, n_ctx=n_ctx, n_seq_max=n_seq, threads=threads, lookup=False) as lm:

        def run(lengths: list[int]) -> dict[str, float]:
            n_prompt, n_gen = lengths
            with lm.raw_decode():  # which leaves no prefix in the cache
                pass
            prompt = rng.integers(0, lm.n_vocab, n_prompt).tolist()
            marks: list[tuple[float, float]] = []

            def note(progress: Progress) -> None:
                if not marks and progress.tokens >= n_seq:
                    marks.append((time.perf_counter(), time.process_time()))

            began = time.perf_counter()
            lm.generate([prompt], progress=note, n=n_seq, max_tokens=n_gen, temperature=0.8, seed=1, ignore_eos=True)
            (first, cpu), ended, cpu_ended = marks[0], time.perf_counter(), time.process_time()
            tokens = n_seq * (n_gen - 1)
            took = {"ttft": first - began, "tpot": (ended - first) / (n_gen - 1), "cpu": (cpu_ended - cpu) / tokens}
            return took | {"busy": (cpu_ended - cpu) / (ended - first)} | memory()

        answer(None, run)


def memory() -> dict[str, int]:
    """Bytes of this process that are resident, and those of them that are no pages of files. Memory that is shared with
    the NPU has two mappings; the kernel's proportional sizes count it once."""
    kib: dict[str, int] = {}
    for name in ("status", "smaps_rollup"):
        lines = Path("/proc/self", name).read_text(encoding="utf-8", errors="replace").splitlines()
        kib |= {key: int(rest.split()[0]) for key, _, rest in (x.partition(":") for x in lines) if rest.endswith(" kB")}
    anonymous = kib["Pss_Anon"] + kib["Pss_Shmem"]
    return {"resident": (anonymous + kib["RssFile"]) << 10, "anonymous": anonymous << 10}


def label(n_prompt: int, n_seq: int) -> str:
    return f"prompt of {n_prompt}, {n_seq} sample{'s' if n_seq > 1 else ''}"


def measure(path: Path, prompts: Sequence[int], n_seq: int, o: Any, log: Rounds) -> None:
    """Measure rounds of the prompts with that many samples, until each has as many as wanted or the time is over."""
    cases = {label(p, n_seq): p for p in prompts}
    if log.fewest(cases) >= o.rounds:
        return
    room = max(prompts) + n_seq * o.n_gen + 64
    with ExitStack() as stack:
        how = str(path), n_seq, room, o.threads
        sides = {d: stack.enter_context(Child("bench.latency", "serve", d, *how)) for d in SIDES}
        for side in sides.values():
            side.ask([min(prompts), 2])  # pages of weights are read, threads run
        for case in log.turns(cases, o.rounds):
            took = {d: side.ask([cases[case], o.n_gen]) for d, side in sides.items()}
            log.end(**{f"{f}_{d}": took[d][f] for d in SIDES for f in FIGURES})


def row(log: Rounds, case: str, name: str, figure: str, scale: float, unit: str, **more: Any) -> dict[str, Any]:
    ours, baseline = (log.values(case, f"{figure}_{d}") for d in SIDES)
    ratios = [b / a for a, b in zip(ours, baseline, strict=True)]
    value, stock = (log.median(case, f"{figure}_{d}") * scale for d in SIDES)
    return report.figures(name, round(stock, 4), round(value, 4), unit, ratios, None, **more)


def rows_of(prompts: Sequence[int], samples: Sequence[int], threads: int, log: Rounds) -> Iterator[Mapping[str, Any]]:
    """Return the report's rows, of the cases that have rounds."""
    for n_prompt in prompts:
        if (case := label(n_prompt, 1)) in log:
            yield row(log, case, f"TTFT, prompt of {n_prompt}", "ttft", 1, "s", n_prompt=n_prompt)
            yield row(log, case, f"TPOT behind {n_prompt}", "tpot", 1e3, "ms", n_prompt=n_prompt)
    for n in samples:
        if (case := label(max(prompts), n)) in log:
            name = case.rpartition(", ")[2]
            used = {f"use_of_cpus_{d}": round(log.median(case, f"busy_{d}") / threads, 3) for d in SIDES}
            rate = {f"tokens_per_second_{d}": round(n / log.median(case, f"tpot_{d}"), 2) for d in SIDES}
            yield row(log, case, f"CPU time per token, {name}", "cpu", 1e3, "ms", n_parallel=n, **used, **rate)
            anonymous = {f"anonymous_{d}": round(log.median(case, f"anonymous_{d}") / 2**20) for d in SIDES}
            yield row(log, case, f"memory, {name}", "resident", 2**-20, "MiB", n_parallel=n, **anonymous)


def main() -> None:
    p = Parser(__doc__, "a small model, short runs")
    p.add_model("ordinary GGUF file")
    p.add_argument("-p", "--n-prompt", help=f"tokens of prompts (default {PROMPTS}; 64,128 with --quick)")
    p.add_argument("-npl", "--n-parallel", help="samples behind the longest (default 1,2,4,8,16; 1,4 with --quick)")
    p.add_count("-n", "--n-gen", usual=64, quick=8, what="tokens per sample")
    p.add_threads()
    p.add_rounds(3, 1)
    rounds.add_options(p)
    o = p.parse()
    prompts = numbers(o.n_prompt or ("64,128" if o.quick else PROMPTS), "-p")
    samples = numbers(o.n_parallel or ("1,4" if o.quick else "1,2,4,8,16"), "-npl")
    if o.n_gen < 2 or min(prompts) < 1 or min(samples) < 1:
        p.error("prompts and samples must be at least 1, tokens per sample at least 2")
    path = o.model or models.synthetic("small" if o.quick else "bench-1.4b", tied=False)
    setting = {"bench": "latency", "model": path.name, "threads": o.threads, "n_gen": o.n_gen}
    log = Rounds(o.resume, setting, o.seconds)
    work = {1: prompts} | {n: [max(prompts)] for n in samples if n > 1}
    for n, group in work.items():
        measure(path, group, n, o, log)
    rows = report.Rows("latency", o.json)
    for found in rows_of(prompts, samples, o.threads, log):
        rows.add(found)
    rows.finish()
    log.warn()


if __name__ == "__main__":
    report.start(main)
