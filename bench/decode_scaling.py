"""Decode throughput over the number of parallel sequences, and over the length of the prompt that they share: the stock
CPU backend and Tilebeam, runs interleaved (the paper's figures 11 and 17).

    python bench/decode_scaling.py [-m MODEL] [-npl 1,2,4,8,16] [-d 512,1024,2048,4096] [--json] [--quick] [--plot PNG]

Without -m it writes a random model with the shape of Qwen2.5-0.5B (--quick: a small one). The share of the limit is
the larger of two: weight bytes read per second over the machine's streaming read bandwidth, and int8 operations over
its dot-product peak, both measured in the same run; an embedding table of its own, which decoding only looks up,
counts as weights too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import limits
from tilebeam import TilebeamError, console, load
from tilebeam.bench_cli import MarkdownWriter, Row, measure, numbers
from tilebeam.machine import OtherLoad, busy_note
from tilebeam.throughput import Case

from gguf_tools import synth

CACHE = Path(__file__).resolve().parent.parent / "build" / "bench"


def model(quick: bool) -> Path:
    """The random model, written on first use."""
    name = "small" if quick else "bench-0.5b"
    path = CACHE / f"{name}-q4_0.gguf"
    if not path.is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        # q4_0 but for the output matrix, which is the embedding table: as common quantizations have it
        synth.write_model(path, synth.preset(name, arch="qwen2", types={"token_embd": "q8_0"}), progress=True)
    return path


def as_result(cpu: Row, npu: Row, peak: dict[str, float]) -> dict[str, Any]:
    """One row of the report from the two rows of a case."""
    value = statistics.median(npu.samples_ts)
    bandwidth = npu.model_size * value / npu.n_parallel / (peak["read_gbs"] * 1e9)
    operations = 2 * npu.model_n_params * value / (peak["int8_gops"] * 1e9)
    return {
        "name": f"{npu.test} x {npu.n_parallel}",
        "baseline": statistics.median(cpu.samples_ts),
        "value": value,
        "unit": "tokens/s",
        "ratio": npu.ratio_vs_cpu,
        "ratio_min": npu.ratio_vs_cpu_min,
        "ratio_max": npu.ratio_vs_cpu_max,
        "share_of_limit": max(bandwidth, operations),
    }


def plot(rows: list[Row], path: Path) -> None:
    """Tokens per second over sequences and over prompt lengths, one line per device."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    most = max(r.n_parallel for r in rows)
    figures = [
        ("parallel sequences", [r for r in rows if r.n_depth == 0], lambda r: r.n_parallel),
        (f"tokens of the shared prompt, {most} sequences", [r for r in rows if r.n_depth > 0], lambda r: r.n_depth),
    ]
    figures = [f for f in figures if f[1]]
    figure, plots = pyplot.subplots(1, len(figures), figsize=(6 * len(figures), 4), squeeze=False)
    for axes, (label, measured, place) in zip(plots[0], figures, strict=True):
        for device, name in (("cpu", "llama.cpp, stock CPU backend"), ("npu", "Tilebeam")):
            mine = [r for r in measured if r.device == device]
            axes.plot([place(r) for r in mine], [statistics.median(r.samples_ts) for r in mine], marker="o", label=name)
        axes.set_xlabel(label)
        axes.set_ylabel("tokens/s, all sequences")
        axes.set_title(f"decode, {rows[0].model_type}, {rows[0].n_threads} threads")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> int:
    """Exit status."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-m", "--model", type=Path, help="ordinary GGUF file")
    p.add_argument("-npl", "--n-parallel", default="1,2,4,8,16")
    p.add_argument("-n", "--n-gen", type=int, help="tokens per sequence and run (default 32, 8 with --quick)")
    p.add_argument(
        "-d",
        "--n-depth",
        help="tokens of a prompt that all sequences share, for the most sequences (default 512,1024,2048,4096, with "
        "--quick 512; 0: none)",
    )
    p.add_argument("-t", "--threads", type=int, default=limits.machine()["cpus"])
    p.add_argument("-r", "--repetitions", type=int, help="default 5, 2 with --quick")
    p.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    p.add_argument("--quick", action="store_true", help="a small model, short runs")
    p.add_argument("--plot", type=Path, help="write a plot (needs matplotlib)")
    o = p.parse_args(argv)
    n_gen, repetitions = o.n_gen or (8 if o.quick else 32), o.repetitions or (2 if o.quick else 5)
    try:
        sequences = numbers(o.n_parallel, "-npl")
        depths = numbers(o.n_depth or ("512" if o.quick else "512,1024,2048,4096"), "-d")
        cases = [Case(0, n_gen, n, 0, True) for n in sequences]
        cases += [Case(0, n_gen, max(sequences), d, True) for d in depths if d > 0]
        rows, results, note = run(o, cases, repetitions)
    except (TilebeamError, OSError, ValueError, RuntimeError) as error:
        print(f"decode_scaling: {error}", file=sys.stderr)
        return 1
    if o.json:
        print(json.dumps(results | {"measured": [asdict(r) for r in rows]}))
    if note:
        print(note, file=sys.stderr)
    if o.plot:
        plot(rows, o.plot)
    return 0


def run(o: argparse.Namespace, cases: list[Case], repetitions: int) -> tuple[list[Row], dict[str, Any], str | None]:
    """Measure all cases; rows, the report, and a warning if the machine was busy."""
    path = o.model or model(o.quick)
    room, slots = max(c.cells for c in cases), max(c.n_parallel for c in cases)
    rows: list[Row] = []
    writer = None if o.json else MarkdownWriter()
    with ExitStack() as stack:
        lms = {
            d: stack.enter_context(load(path, device=d, n_ctx=room, n_seq_max=slots, threads=o.threads))
            for d in ("cpu", "npu")
        }
        peak = {"int8_gops": limits.int8_gops(o.threads), "read_gbs": limits.read_gbs(o.threads)}
        others = stack.enter_context(OtherLoad())
        progress = stack.enter_context(console.bar("decode"))
        task = progress.add_task("", total=2 * len(cases) * (repetitions + 1), note="")
        for case in cases:
            progress.update(task, description=f"{case.n_parallel} sequences, prompt of {case.n_depth}")
            for row in measure(lms, case, repetitions, on_run=lambda d, _: progress.update(task, advance=1, note=d)):
                rows.append(row)
                if writer:
                    writer.row(row)
    if writer:
        writer.close()
    results = [as_result(cpu, npu, peak) for cpu, npu in zip(rows[::2], rows[1::2], strict=True)]
    report = {"bench": "decode_scaling", "machine": limits.machine(), "limits": peak, "rows": results}
    return rows, report, busy_note(others.share)


if __name__ == "__main__":
    sys.exit(main())
