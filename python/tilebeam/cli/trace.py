"""`tilebeam trace`: run a prompt, write the timeline, print the table."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tilebeam.cli import console
from tilebeam.cli.options import Json, ModelOptions, NPredict, Prompt, PromptsFile, Seed, grouped, option
from tilebeam.cli.read_prompts import prompts
from tilebeam.errors import TilebeamError
from tilebeam.gguf.whole_file import check_target, whole_file
from tilebeam.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tilebeam.measure.trace import Summary


@grouped
def trace(
    *,
    model: ModelOptions,
    out: Path = option(Path("trace.json"), "-o", "--out", help="File for the timeline."),
    prompt: Prompt = None,
    file: PromptsFile = None,
    n_prompt: int = option(128, min=1, help="Without -p and -f: tokens of a random prompt."),
    n_predict: NPredict = 32,
    n_samples: int = option(1, "-N", "--n-samples", min=1, help="Samples, side by side."),
    seed: Seed = None,
    json_: Json = False,
) -> None:
    """Record what CPU side and NPU do, op by op: a timeline for Perfetto, and a table per kind of op.

    Example: tilebeam trace -m model.gguf -p "Once upon a time" -n 16 -o trace.json

    The timeline (-o) opens at https://ui.perfetto.dev: calls of llama.cpp, lowering, messages and waiting on the CPU
    side; messages and every worker's part of every op on the NPU. The table says how long the ops took, what they read
    and computed.
    """
    import numpy as np

    from tilebeam.measure.machine import OtherLoad
    from tilebeam.measure.trace import Tracer

    if model.run.device == "cpu":
        raise TilebeamError("A trace is of the NPU: leave --device cpu out.")
    check_target(out)
    random = prompt is None and file is None
    texts: list[str] = [] if random else [asked.alone for asked in prompts(prompt, file, escape=True)]
    params = SamplingParams(
        n=n_samples, top_p=1.0, top_k=0, max_tokens=n_predict, seed=seed, ignore_eos=random
    ).resolved()
    model = replace(model, run=replace(model.run, device="npu"))
    with model.load(n_samples * max(1, len(texts))) as lm:
        if random:
            ids = np.random.default_rng(params.seed or 0).integers(0, lm.n_vocab, n_prompt)
        asked: list[str | list[int]] = [ids.tolist()] if random else [*texts]
        with OtherLoad() as load, console.generating("trace", n_samples * len(asked)) as hook, Tracer(lm) as tracer:
            lm.generate(asked, params, progress=hook)
        with whole_file(out) as partial:
            partial.write_text(json.dumps(tracer.timeline()), encoding="utf-8")
    summary = tracer.summary()
    if json_:
        print(json.dumps({"trace": str(out), "other_load": load.share, **asdict(summary)}, indent=2))
        return
    _show(summary)
    console.err().print(f"{out}: open it at https://ui.perfetto.dev or chrome://tracing", style="dim")
    if load.share >= 0.1:
        console.err().print(
            f"Other programs used {load.share:.0%} of the CPUs meanwhile: take the times on a quiet machine.",
            style="yellow",
        )


def _show(summary: Summary) -> None:
    """Print the table."""
    from rich import box
    from rich.table import Table

    table = Table(title="What the NPU did", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("op", "weights", "kernel"):
        table.add_column(column, no_wrap=True)
    for column in ("ops", "ms", "share", "GB/s", "GOPS"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in summary.ops:
        rates = f"{row.gbs:.2f}", f"{row.gops:.1f}" if row.gops else ""
        count, ms = str(row.count), f"{row.seconds * 1e3:.2f}"
        table.add_row(row.op, row.weights, row.kernel, count, ms, f"{row.share:.1%}", *rates)
    busy = summary.busy_seconds
    table.add_section()
    between = f"{summary.between_seconds / busy:.1%}" if busy > 0 else ""
    table.add_row("between ops", "", "", "", f"{summary.between_seconds * 1e3:.2f}", between, "", "")
    out = console.out()
    out.print(table)
    parts = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in summary.seconds.items() if seconds)
    out.print(f"NPU busy {busy * 1e3:.1f} ms in {summary.graphs} graphs. CPU side: {parts}.")
    if summary.lost or summary.damaged:
        out.print(f"Missing: {summary.lost} records that did not fit, {summary.damaged} damaged ones.", style="yellow")
