"""Decode throughput over the number of parallel sequences, and over the length of a prompt that they share: the stock
CPU backend and Tilebeam, runs interleaved (the paper's figures 11 and 17).

    python -m bench.decode_scaling [-m MODEL] [-npl 1,2,4,8,16] [-d 512,1024,2048,4096]
        [-dnpl 1,4,16] [--prefill 512] [--kv q8_0] [--json] [--quick] [--plot PNG] [--resume FILE --seconds S]

Both sides have the same settings: one unified KV cache in F16 (--kv: another type), flash attention, the same threads
and batches. (The stock backend decodes many sequences behind a long prompt faster without flash attention:
`--cpu-flash-attn off`.) A prompt's cells are those of 512 tokens, decoded outside the clock, again and again at later
positions: to decode 32768 takes the stock backend more than ten minutes. All sequences share them
(llama_memory_seq_cp); the cache has no room for a second copy, so a side that copied them would fail. --prefill: also
so many more tokens of the prompt, read in one batch at each depth. Without -m it writes a random model with the shape
of Qwen2.5-0.5B, Q4_0 with a Q8_0 embedding table that is the output matrix too (--quick: a small one). The share of the
limit, for rows without a prompt, is the larger of two: weight bytes read per second over the machine's streaming read
bandwidth, and int8 operations over its dot-product peak, both measured beside each round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tilebeam import load
from tilebeam.cli.bench import numbers
from tilebeam.measure.throughput import Case, Runner
from tilebeam.model.lm import LM
from tilebeam.native.llama import C

from bench.lib import limits, models, plots, report, rounds
from bench.lib.options import Parser
from bench.lib.rounds import Rounds

CHUNK = 512  # tokens of a prompt that are decoded


def label(case: Case) -> str:
    sequences = f"decode, {case.n_parallel} sequence{'s' if case.n_parallel > 1 else ''}"
    if case.n_prompt:
        sequences = f"prefill of {case.n_prompt}"
    return sequences + (f", prompt of {case.n_depth}" if case.n_depth else "")


class Prompt:
    """The cells of a prompt of `depth` tokens: those of its first CHUNK random ones, again and again at later
    positions."""

    def __init__(self, runner: Runner, depth: int) -> None:
        self._runner, self._depth = runner, depth
        context, memory = runner._context, runner._context._memory
        first, other = min(CHUNK, depth), context.n_seq_max - 1
        runner.run(Case(0, 1, 1, first, True))
        context.truncate(0, first)
        chunk = context.save_sequence(0)
        for at in range(first, depth, first):
            self._load(other, chunk)
            C.llama_memory_seq_add(memory, other, 0, -1, at)
            C.llama_memory_seq_cp(memory, other, 0, -1, -1)
            context.drop(other)
        context.truncate(0, depth)
        runner._step(1, depth)  # which turns keys to their positions
        context.truncate(0, depth)
        self._cells = context.save_sequence(0)

    def _load(self, seq: int, cells: npt.NDArray[np.uint8]) -> None:
        if not self._runner._context.load_sequence(seq, cells):
            raise ValueError("llama.cpp does not take cells that it saved")

    def restore(self) -> None:
        """Put all cells into the cache, of which the runner's next runs keep what they want."""
        self._runner._context.clear()
        self._load(0, self._cells)
        self._runner._kept = self._depth


def measure(lms: Mapping[str, LM], cases: Sequence[Case], log: Rounds, wanted: int, threads: int) -> None:
    """Measure rounds of all cases until each has as many as wanted or the time is over."""
    runners = {name: Runner(lms[name]) for name in ("npu", "cpu")}
    deepest = max(case.n_depth for case in cases)
    with ExitStack() as stack:
        for runner in runners.values():
            stack.enter_context(runner.keeping())
        prompts = [Prompt(runner, deepest) for runner in runners.values()] if deepest else []
        warm: set[Case] = set()
        by_name = {label(case): case for case in cases}
        # Up and down, so that the prompt in the cache is cut or the same, seldom written anew.
        for name in log.turns(by_name, wanted, back_and_forth=True):
            case = by_name[name]
            if case.n_depth > min(runner._kept or 0 for runner in runners.values()):
                for prompt in prompts:
                    prompt.restore()
            if case not in warm:
                for runner in runners.values():
                    runner.warm_up(Case(0, 1, 1, case.n_depth, True) if case.n_prompt else case)
                warm.add(case)
            steps = case.n_gen or 1  # or one batch of the prompt
            ours, baseline = (runners[device].run(case).seconds / steps for device in ("npu", "cpu"))
            read, int8 = limits.read_gbs(threads), limits.int8_gops(threads, 0.02)
            log.end(ours=ours, baseline=baseline, read_gbs=read, int8_gops=int8)


def rows_of(cases: Sequence[Case], log: Rounds, matrices: models.Matrices) -> list[dict[str, Any]]:
    """Return the report's rows, of the cases that have rounds."""
    rows = []
    for case in cases:
        name = label(case)
        if name not in log:
            continue
        work = case.n_prompt or case.n_parallel
        row = log.row(name, work, "tokens/s", n_parallel=case.n_parallel, n_depth=case.n_depth)
        if not case.n_depth:
            steps = row["value"] / case.n_parallel
            read = matrices.bytes * steps / (log.median(name, "read_gbs") * 1e9)
            operations = 2 * matrices.weights * row["value"] / (log.median(name, "int8_gops") * 1e9)
            row["share_of_limit"] = report.three_digits(max(read, operations))
        rows.append(row)
    return rows


def cases_of(o: Any) -> list[Case]:
    """Return what the options ask for: sequences without a prompt, then sequences behind prompts."""
    depths = [d for d in numbers(o.n_depth or ("512" if o.quick else "512,1024,2048,4096"), "-d") if d]
    both = numbers(o.depth_n_parallel or ("16" if o.quick else "1,4,16"), "-dnpl")
    cases = [Case(0, o.n_gen, n, 0, True) for n in numbers(o.n_parallel, "-npl") if n]
    for d in depths:
        cases += [Case(0, o.n_gen, n, d, True) for n in both]
        cases += [Case(o.prefill, 0, 1, d, True)] if o.prefill else []
    for case in cases:
        case.validate()
    return cases


def main() -> None:
    p = Parser(__doc__, "a small model, short runs")
    p.add_model("ordinary GGUF file")
    p.add_argument("-npl", "--n-parallel", default="1,2,4,8,16", help="sequences without a prompt; 0: none")
    p.add_count("-n", "--n-gen", usual=16, quick=8, what="tokens per sequence and run")
    p.add_argument(
        "-d", "--n-depth", help="lengths of the prompt (default 512,1024,2048,4096; 512 with --quick; 0: none)"
    )
    p.add_argument("-dnpl", "--depth-n-parallel", help="sequences with a prompt (default 1,4,16; 16 with --quick)")
    p.add_argument("--prefill", type=int, default=0, metavar="N", help="tokens that follow a prompt in one batch")
    p.add_argument("--kv", default="f16", choices=["f16", "q8_0", "q4_0"], help="type of K and V")
    p.add_threads()
    p.add_argument("--cpu-flash-attn", choices=["on", "off"], default="on", help="of the stock backend")
    p.add_rounds(5, 2)
    p.add_argument("--plot", type=Path, help="write a plot (needs matplotlib)")
    rounds.add_options(p)
    o = p.parse()
    cases = cases_of(o)
    path = o.model or models.synthetic("small" if o.quick else "bench-0.5b", types={"token_embd": "q8_0"}, tied=True)
    setting = {"bench": "decode_scaling", "model": path.name, "threads": o.threads, "n_gen": o.n_gen}
    setting |= {"cpu_flash_attn": o.cpu_flash_attn, "kv": o.kv}
    log = Rounds(o.resume, setting, o.seconds, first=min(30.0, 0.4 * (o.seconds or 0)))
    room, most = max(c.cells for c in cases) + CHUNK, max(2, *(c.n_parallel for c in cases))
    with ExitStack() as stack:
        lms = {}
        for d in ("cpu", "npu"):
            flash = d == "npu" or o.cpu_flash_attn == "on"
            types = {"type_k": o.kv, "type_v": o.kv, "n_batch": max(512, o.prefill)}
            lm = load(path, device=d, n_ctx=room, n_seq_max=most, threads=o.threads, flash_attn=flash, **types)
            lms[d] = stack.enter_context(lm)
        measure(lms, cases, log, o.rounds, o.threads)
    rows = report.Rows("decode_scaling", o.json)
    for row in rows_of(cases, log, models.Matrices.of(path)):
        without = ", stock without flash attention" if o.cpu_flash_attn == "off" else ""
        rows.add(row | {"name": row["name"] + without})
    rows.finish({f: log.overall(f, map(label, cases)) for f in ("int8_gops", "read_gbs")} if rows.rows else {})
    log.warn()
    if o.plot and rows.rows:
        plots.scaling(rows.rows, f"Decoding, {path.stem}, {o.threads} threads", o.plot)


if __name__ == "__main__":
    report.start(main)
