"""`tilebeam trace`: run a prompt, write the timeline, print the table."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilebeam.cli import console
from tilebeam.cli.options import (
    Escape,
    Json,
    ModelOptions,
    NPredict,
    Prompt,
    PromptsFile,
    Seed,
    Temp,
    grouped,
)
from tilebeam.cli.read_prompts import prompts
from tilebeam.errors import TilebeamError
from tilebeam.gguf.whole_file import check_target, whole_file
from tilebeam.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tilebeam.measure.trace import Summary
    from tilebeam.model.lm import LM

_LIMIT = {"memory": "read", "arithmetic": "peak"}


@grouped
def trace(
    *,
    model: ModelOptions,
    out: Annotated[Path, typer.Option("-o", "--out", help="File for the timeline.")] = Path("trace.json"),
    prompt: Prompt = None,
    file: PromptsFile = None,
    escape: Escape = True,
    n_prompt: Annotated[
        int, typer.Option("--n-prompt", min=1, help="Without -p and -f: tokens of a random prompt.")
    ] = 128,
    n_predict: NPredict = 32,
    n_samples: Annotated[int, typer.Option("-N", "--n-samples", min=1, help="Samples, side by side.")] = 1,
    temp: Temp = SamplingParams.temperature,
    seed: Seed = None,
    json_: Json = False,
) -> None:
    """Record what CPU side and NPU do, op by op: a timeline for Perfetto, and a table per kind of op.

    Example: tilebeam trace -m model.gguf -p "Once upon a time" -n 16 -o trace.json

    The timeline (-o) opens at https://ui.perfetto.dev: calls of llama.cpp, lowering, messages and waiting on the CPU
    side; messages and every worker's part of every op on the NPU. The table says how long the ops took, what they read
    and computed, and how near that is to what this machine can do, which is measured right after the run.
    """
    if model.run.device == "cpu":
        raise TilebeamError("A trace is of the NPU: leave --device cpu out.")
    check_target(out)
    random = prompt is None and file is None
    texts: list[str] = [] if random else [asked.alone for asked in prompts(prompt, file, escape)]
    params = SamplingParams(
        n=n_samples, temperature=temp, top_p=1.0, top_k=0, max_tokens=n_predict, seed=seed, ignore_eos=random
    ).resolved()
    model = replace(model, run=model.run.on("npu"))
    with model.load(n_samples * max(1, len(texts))) as lm:
        _run(lm, texts or [_random_prompt(lm, n_prompt, params.seed or 0)], params, out, json_)


def _random_prompt(lm: LM, length: int, seed: int) -> list[int]:
    """Return token ids to run when no text is given."""
    import numpy as np

    return [int(t) for t in np.random.default_rng(seed).integers(0, lm.n_vocab, length)]


def _run(lm: LM, prompts: Sequence[str | list[int]], params: SamplingParams, out: Path, as_json: bool) -> None:
    """Trace one `LM.generate` of all prompts, write the timeline to `out`, print the summary to stdout."""
    from tilebeam.measure.machine import OtherLoad
    from tilebeam.measure.trace import MachineLimits, Tracer

    with OtherLoad() as load, console.generating("trace", params.n * len(prompts)) as hook, Tracer(lm) as tracer:
        lm.generate(prompts, params, progress=hook)
    with whole_file(out) as partial:
        partial.write_text(json.dumps(tracer.timeline()), encoding="utf-8")
    summary = tracer.summary(MachineLimits.measure(lm.info.threads))
    if as_json:
        json.dump({"trace": str(out), "other_load": load.share, **summary.as_dict()}, sys.stdout, indent=2)
        print()
    else:
        _show(summary)
        console.err().print(f"{out}: open it at https://ui.perfetto.dev or chrome://tracing", style="dim")
    if load.share >= 0.1 and not as_json:
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
    for column in ("ops", "ms", "share", "GB/s", "GOPS", "of limit"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in summary.ops:
        limit = "" if row.share_of_limit is None else f"{row.share_of_limit:.0%} {_LIMIT[row.bound]}"
        table.add_row(
            row.op,
            row.weights,
            row.kernel,
            str(row.count),
            f"{row.seconds * 1e3:.2f}",
            f"{row.share:.1%}",
            f"{row.gbs:.2f}",
            f"{row.gops:.1f}" if row.gops else "",
            limit,
        )
    busy = summary.busy_seconds
    table.add_section()
    between = f"{summary.between_seconds / busy:.1%}" if busy > 0 else ""
    table.add_row("between ops", "", "", "", f"{summary.between_seconds * 1e3:.2f}", between, "", "", "")
    out = console.out()
    out.print(table)
    parts = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in summary.seconds.items() if seconds)
    out.print(f"NPU busy {busy * 1e3:.1f} ms in {summary.graphs} graphs. CPU side: {parts}.")
    if summary.limits:
        m = summary.limits
        out.print(
            f"Limits of this machine: {m.int8_gops:.0f} GOPS int8, {m.fma_gflops:.0f} GFLOPS, {m.read_gbs:.1f} GB/s."
        )
    if summary.lost or summary.damaged:
        out.print(f"Missing: {summary.lost} records that did not fit, {summary.damaged} damaged ones.", style="yellow")
