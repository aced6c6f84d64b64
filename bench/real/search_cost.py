"""Figures 5 and 10 of the paper with real models: a small model with search against a larger one, accuracy over cost.

    python -m bench.real.search_cost --data FOLDER --minutes 60 [--rows gsm8k,math]
    python -m bench.real.search_cost --data FOLDER --latency-items 10 --into docs/results.md    (on a quiet machine)

Qwen2.5-Coder 0.5B and 1.5B on GSM8K, MATH and HumanEval, with a reward head for each model that learns from GSM8K's
training problems first. All of it takes hours on two CPUs, so it is taken in slices: after --minutes it stops, and the
next call goes on. What is finished is kept packed in bench/real/logs and unpacked where it is missing; a call without
--minutes only reports. Models and FOLDER are those of `python -m bench.real`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import lzma
import math
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilebeam import TilebeamError
from tilebeam.cli import console
from tilebeam.evaluation.config import GREEDY
from tilebeam.evaluation.results import PASS
from tilebeam.gguf.whole_file import whole_file

from bench.lib import ROOT
from bench.lib.document import evaluated, plots, put_into
from bench.lib.options import Parser
from bench.lib.report import start
from bench.real.__main__ import data_there, found_in, model_file, named_models, named_rows
from bench.real.rows import DRAWN, GSM8K, MATH
from bench.real.sources import MODELS

HERE = Path(__file__).parent
HEADS, LOGS = HERE / "heads", HERE / "logs"
OUT = ROOT / "build" / "search-cost"
# Problems of GSM8K's training file that a model's head learns from, six samples of each.
LEARNING = {"0.5B": 240, "1.5B": 123}
# Behind which layer its hidden states are, if not behind the final norm: docs/reward-models.md says what pays.
LAYERS = {"1.5B": 19}
KEPT = ("log.jsonl", "latency.jsonl")


@dataclass(frozen=True)
class Evaluation:
    """One `tilebeam eval`.

    Attributes:
        name: of its folder and logs; title: for people.
        kind: of the task; files: names that the data file may have, () for HumanEval, which is fetched.
        items: how many; options: of `tilebeam eval` besides.
        models: which of `MODELS`.
    """

    name: str
    title: str
    kind: str
    files: tuple[str, ...]
    items: int
    options: tuple[str, ...]
    models: tuple[str, ...] = tuple(MODELS)


_CHOSEN = ("--method", "greedy,best-of-n,self-consistency", "--scorer", "logprob,head")
_SIXTEEN, _EIGHT = ("--budget", "1,2,4,8,16"), ("--budget", "1,2,4,8")
_CALLS = ("--method", "greedy,best-of-n,self-consistency", "--scorer", "logprob", *_EIGHT, "-n", "256")
_PROGRAMS = ("-n", "640", "--tir")  # programs take more tokens than words
EVALUATIONS = (
    Evaluation("gsm8k", "GSM8K", "gsm8k", GSM8K, 200, (*_CHOSEN, *_SIXTEEN, "-n", "448")),
    Evaluation("gsm8k-tir", "GSM8K, programs run", "gsm8k", GSM8K, 200, (*_CHOSEN, *_SIXTEEN, *_PROGRAMS), ("1.5B",)),
    Evaluation("bfcl-simple", "BFCL, one function", "bfcl", ("*BFCL_v4_simple_python.json",), 200, _CALLS),
    Evaluation("bfcl-multiple", "BFCL, several functions", "bfcl", ("*BFCL_v4_multiple.json",), 200, _CALLS),
    Evaluation("math", "MATH, heads from GSM8K", "math", MATH, 100, (*_CHOSEN, *_EIGHT, "-n", "600")),
    Evaluation(
        "humaneval",
        "HumanEval",
        "humaneval",
        (),
        164,
        ("--method", "greedy,best-of-n", "--scorer", "logprob,examples,behavior", *_EIGHT, "-n", "384"),
    ),
)


def program(words: list[str], until: float) -> bool:
    """Run one of Tilebeam's commands until a time of `time.monotonic` or infinity; whether it came to its end.

    Raises:
        TilebeamError: it failed.
    """
    console.err().print("tilebeam " + shlex.join(words), style="dim", soft_wrap=True)
    with subprocess.Popen([sys.executable, "-m", "tilebeam", *words], stdout=sys.stderr) as process:
        try:
            status = process.wait(None if until == math.inf else max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.terminate()  # not SIGINT, which a program in the background may ignore
            process.wait()
            return False
    if status:
        raise TilebeamError(f"tilebeam {words[0]} ended with status {status}.")
    return True


def shape(options: argparse.Namespace) -> list[str]:
    return ["-np", "32", "-c", "18432", *DRAWN, "-t", str(options.threads)]


def learnt(name: str, model: Path, options: argparse.Namespace, until: float) -> bool:
    """Train the head of a model, if it is not there; whether it is there then: False if time is over."""
    head = HEADS / f"{name}.gguf"
    if head.exists():
        return True
    if (problems := found_in(options.data, ("gsm8k_train*.jsonl",))) is None:
        raise TilebeamError(f"{head} is missing, and so is gsm8k_train.jsonl in --data, from which it is trained.")
    words = ["reward", "train", "-m", str(model), "--task", f"gsm8k:{problems}", "--items", str(LEARNING[name])]
    words += ["--samples", "6", "-n", "448", *shape(options), "-o", str(options.out / f"{name}.gguf")]
    if name in LAYERS:
        words += ["--layer", str(LAYERS[name])]
    if not program(words, until):
        return False
    HEADS.mkdir(exist_ok=True)
    shutil.copy(options.out / f"{name}.gguf", head)
    return True


def command(row: Evaluation, models: dict[str, Path], data: Path, options: argparse.Namespace) -> list[str]:
    words = ["eval", "--task", f"{row.kind}:{data}", "--items", str(row.items), "--unit-items", "10", "--seeds", "1"]
    for name in row.models:
        model = models[name]
        words += ["-m", f"{name}={model}"]
        if any("head" in option.split(",") for option in row.options):
            words += ["--reward-head", str(HEADS / f"{name}.gguf")]
    return [*words, *row.options, *shape(options), "-o", str(options.out / row.name)]


def unpack(row: Evaluation, folder: Path) -> None:
    """Put kept logs where an evaluation looks for its own, unless some are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        packed, log = LOGS / f"{row.name}-{name}.xz", folder / name
        if packed.exists() and not log.exists():
            with whole_file(log) as partial, lzma.open(packed) as source, open(partial, "wb") as target:
                shutil.copyfileobj(source, target)


def pack(row: Evaluation, folder: Path) -> None:
    LOGS.mkdir(exist_ok=True)
    for name in KEPT:
        if (log := folder / name).exists():
            with whole_file(LOGS / f"{row.name}-{name}.xz") as partial, lzma.open(partial, "wb", preset=9) as target:
                target.write(log.read_bytes())


def kept(row: Evaluation, folder: Path, words: list[str], until: float) -> bool:
    """Run `program`, whose logs are packed however it ends."""
    try:
        return program(words, until)
    finally:
        pack(row, folder)


def run(
    row: Evaluation, models: dict[str, Path], options: argparse.Namespace, until: float | None
) -> dict[str, Any] | None:
    """Go on with an evaluation until a time, None: only report; the report of what is done, None without any."""
    if (data := data_there(row, options)) is None:
        return None
    folder = options.out / row.name
    unpack(row, folder)
    words = command(row, models, data, options)
    if until is not None and time.monotonic() < until and not kept(row, folder, words, until):
        console.err().print(f"{row.name} is not finished: the same command goes on", style="yellow")
    if not (folder / "log.jsonl").exists():
        return None
    with contextlib.suppress(TilebeamError):  # no item is done by both models
        if options.latency_items:
            timed = ["--latency-items", str(options.latency_items), "--latency-device", "npu,cpu"]
            kept(row, folder, [*words, *timed, "--so-far"], math.inf)
        else:
            program([*words, "--so-far"], math.inf)
        report: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        return report
    return None


# --- the document -----------------------------------------------------------------------------------------------------

_SERIES = {
    GREEDY: "greedy, one answer",
    "pass": "any of k samples (bound)",
    "self-consistency": "majority",
    "self-consistency[logprob]": "votes weighted by log-probability",
    "self-consistency[head]": "votes weighted by the head",
    "best-of-n[logprob]": "best by log-probability",
    "best-of-n[head]": "best by the head",
    "best-of-n[examples]": "best by the examples of the docstring",
    "best-of-n[behavior]": "best by examples and behavior",
}


def section(row: Evaluation, report: dict[str, Any], folder: Path) -> Iterator[str]:
    """Return what the report says, as Markdown, and what each choice wins over the greedy answer at every budget."""
    yield from evaluated(folder, row.title, _SERIES)
    yield from _gains(report["comparisons"])


def _gains(comparisons: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Return what each choice wins over the same model's greedy answer."""
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for c in comparisons:
        first, second = c["first"], c["second"]
        if second["series"] == GREEDY and first["model"] == second["model"]:
            series = "one sample" if first["series"] == PASS else _SERIES.get(first["series"], first["series"])
            value, low, high = (100 * c[key] for key in ("value", "low", "high"))
            cells.setdefault((first["model"], series), {})[first["budget"]] = (
                f"{value:+.1f} ({low:+.1f} to {high:+.1f})"
            )
    if not cells:
        return
    budgets = sorted({budget for found in cells.values() for budget in found})
    yield from ("", "Points above the greedy answer, paired bootstrap with 95 % intervals, by samples:", "")
    yield f"| model | chosen by | {' | '.join(map(str, budgets))} |"
    yield "| --- | --- |" + " ---: |" * len(budgets)
    for (model, series), found in cells.items():
        yield f"| {model} | {series} | {' | '.join(found.get(k, '') for k in budgets)} |"


def main() -> None:
    p = Parser(__doc__, "has no effect")
    p.add_argument("--data", type=Path, help="folder with gsm8k_test.jsonl, gsm8k_train.jsonl, math.jsonl, BFCL_v4_*")
    p.add_argument("--model", action="append", default=[], metavar="NAME=FILE", help=f"instead of {', '.join(MODELS)}")
    p.add_argument("--rows", help=f"comma separated, of {', '.join(e.name for e in EVALUATIONS)} (default: all)")
    p.add_argument("--minutes", type=float, help="how long to go on (default: not at all)")
    p.add_argument("--latency-items", type=int, default=0, help="also time on so many prompts, on both devices")
    p.add_argument("-t", "--threads", type=int, default=2, help="kept results are of one number (default: 2)")
    p.add_argument("--out", type=Path, default=OUT, help="logs and reports (default: build/search-cost)")
    p.add_argument("--into", type=Path, help="a document that holds the marks of search-cost")
    options = p.parse()
    wanted = named_rows(p, options.rows, [e.name for e in EVALUATIONS])
    rows = [e for e in EVALUATIONS if e.name in wanted]
    named = named_models(p, options)
    models = {name: model_file(name, named) for name in MODELS}
    until = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    if until is not None and not all(learnt(name, model, options, until) for name, model in models.items()):
        return
    lines: list[str] = []
    reports = {}
    for row in rows:
        if (report := run(row, models, options, until)) is not None:
            reports[row.name] = report
            folder = options.out / row.name
            lines += ["", *section(row, report, folder)]
            if options.into:
                lines += plots(folder, row.title, f"real-{row.name}", options.into)
    if options.into and lines:  # what a document has of rows that cannot be read now stays
        put_into(options.into, "search-cost", "\n".join(lines))
    print(json.dumps(reports, indent=1) if options.json else "\n".join(lines))


if __name__ == "__main__":
    start(main)
