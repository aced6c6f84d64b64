"""Decode throughput over the number of parallel sequences, and over the length of a prompt that they share: the stock
CPU backend and Tilebeam, runs interleaved (the paper's figures 11 and 17).

    python -m bench.decode_scaling [-m MODEL] [-npl 1,2,4,8,16] [-d 512,1024,2048,4096]
        [-dnpl 1,4,16] [--json] [--quick] [--plot PNG] [--resume FILE --seconds S]

Both sides have the same settings: one unified KV cache in F16, flash attention, the same threads and batches. (The
stock backend decodes many sequences behind a long prompt faster without flash attention: `--cpu-flash-attn off`.) The
prompt is decoded once, outside the clock, and its cells are shared by all sequences (llama_memory_seq_cp); the cache
has no room for a second copy, so a side that copied it would fail. Without -m it writes a random model with the shape
of Qwen2.5-0.5B, Q4_0 with a Q8_0 embedding table that is the output matrix too (--quick: a small one). The share of the
limit, for rows without a prompt, is the larger of two: weight bytes read per second over the machine's streaming read
bandwidth, and int8 operations over its dot-product peak, both measured beside each round.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tilebeam import TilebeamError, load
from tilebeam.cli import console
from tilebeam.cli.bench import numbers
from tilebeam.measure.throughput import Case, Runner
from tilebeam.model.lm import LM

from bench.lib import limits, models, plots, report, rounds
from bench.lib.rounds import Rounds


def label(case: Case) -> str:
    """A row's name."""
    sequences = f"decode, {case.n_parallel} sequence{'s' if case.n_parallel > 1 else ''}"
    return sequences + (f", prompt of {case.n_depth}" if case.n_depth else "")


def measure(lms: Mapping[str, LM], cases: Sequence[Case], log: Rounds, wanted: int, threads: int, bar: Any) -> None:
    """Rounds of all cases until each has as many as wanted or the time is over."""
    runners = {name: Runner(lm) for name, lm in lms.items()}
    with ExitStack() as stack:
        for runner in runners.values():
            stack.enter_context(runner.keeping())
        warm: set[Case] = set()
        order = list(cases)
        while (least := log.fewest(map(label, cases))) < wanted:
            begun = 0
            for case in (c for c in order if log.count(label(c)) == least):
                if not log.begin(label(case)):
                    continue
                begun += 1
                bar(case)
                if case not in warm:
                    for runner in runners.values():
                        runner.warm_up(case)
                    warm.add(case)
                ours = runners["npu"].run(case)
                baseline = runners["cpu"].run(case)
                log.end(
                    ours=ours / case.n_gen,
                    baseline=baseline / case.n_gen,
                    read_gbs=limits.read_gbs(threads),
                    int8_gops=limits.int8_gops(threads, 0.02),
                )
            if not begun:
                return
            order.reverse()  # up and down, so that the prompt in the cache grows or is cut, seldom decoded anew


def rows_of(cases: Sequence[Case], log: Rounds, matrices: models.Matrices) -> list[dict[str, Any]]:
    """The report's rows, of the cases that have rounds."""
    rows = []
    for case in cases:
        name = label(case)
        if name not in log:
            continue
        row = log.row(name, case.n_parallel, "tokens/s", n_parallel=case.n_parallel, n_depth=case.n_depth)
        if not case.n_depth:
            steps = row["value"] / case.n_parallel
            read = matrices.bytes * steps / (log.median(name, "read_gbs") * 1e9)
            operations = 2 * matrices.weights * row["value"] / (log.median(name, "int8_gops") * 1e9)
            row["share_of_limit"] = round(max(read, operations), 3)
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Exit status."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-m", "--model", type=Path, help="ordinary GGUF file")
    p.add_argument("-npl", "--n-parallel", default="1,2,4,8,16", help="sequences without a prompt; 0: none")
    p.add_argument("-n", "--n-gen", type=int, help="tokens per sequence and run (default 16, 8 with --quick)")
    p.add_argument(
        "-d", "--n-depth", help="lengths of the prompt (default 512,1024,2048,4096; 512 with --quick; 0: none)"
    )
    p.add_argument("-dnpl", "--depth-n-parallel", help="sequences with a prompt (default 1,4,16; 16 with --quick)")
    p.add_argument("-t", "--threads", type=int, default=limits.machine()["cpus"])
    p.add_argument("--cpu-flash-attn", choices=["on", "off"], default="on", help="of the stock backend")
    p.add_argument("-r", "--rounds", type=int, help="default 5, 2 with --quick")
    p.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    p.add_argument("--quick", action="store_true", help="a small model, short runs")
    p.add_argument("--plot", type=Path, help="write a plot (needs matplotlib)")
    rounds.add_options(p)
    o = p.parse_args(argv)
    n_gen, wanted = o.n_gen or (8 if o.quick else 16), o.rounds or (2 if o.quick else 5)
    try:
        sequences = [n for n in numbers(o.n_parallel, "-npl") if n]
        depths = [d for d in numbers(o.n_depth or ("512" if o.quick else "512,1024,2048,4096"), "-d") if d]
        cases = [Case(0, n_gen, n, 0, True) for n in sequences]
        both = numbers(o.depth_n_parallel or ("16" if o.quick else "1,4,16"), "-dnpl")
        cases += [Case(0, n_gen, n, d, True) for d in depths for n in both]
        for case in cases:
            case.validate()
        path = o.model or (
            models.synthetic("small" if o.quick else "bench-0.5b", types={"token_embd": "q8_0"}, tied=True)
        )
        setting = {"bench": "decode_scaling", "model": path.name, "threads": o.threads, "n_gen": n_gen}
        setting["cpu_flash_attn"] = o.cpu_flash_attn
        log = Rounds(o.resume, setting, o.seconds)
        with ExitStack() as stack:
            progress = stack.enter_context(console.bar("decode"))
            task = progress.add_task(
                "", total=max(1, sum(max(0, wanted - log.count(label(c))) for c in cases)), note=""
            )
            lms = {
                d: stack.enter_context(
                    load(
                        path,
                        device=d,
                        n_ctx=max(c.cells for c in cases),
                        n_seq_max=max(c.n_parallel for c in cases),
                        threads=o.threads,
                        flash_attn=d == "npu" or o.cpu_flash_attn == "on",
                    )
                )
                for d in ("cpu", "npu")
            }
            measure(
                lms, cases, log, wanted, o.threads, lambda c: progress.update(task, advance=1, description=label(c))
            )
        rows = rows_of(cases, log, models.Matrices.of(path))
        if o.cpu_flash_attn == "off":
            rows = [row | {"name": f"{row['name']}, stock without flash attention"} for row in rows]
    except (TilebeamError, OSError, ValueError, RuntimeError) as error:
        print(f"decode_scaling: {error}", file=sys.stderr)
        return 1
    if o.json:
        peaks = {f: log.overall(f, map(label, cases)) for f in ("int8_gops", "read_gbs")} if rows else {}
        report.emit("decode_scaling", peaks, rows)
    else:
        for row in rows:
            report.show(row)
    if note := log.note():
        print(note, file=sys.stderr)
    if o.plot and rows:
        plots.scaling(rows, f"Decoding, {path.stem}, {o.threads} threads", o.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
