"""What an evaluation says: report.md to read, report.json to compute with, plots beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tilebeam.checks import without_infinities
from tilebeam.evaluation import ranking
from tilebeam.evaluation.config import GREEDY, Setting
from tilebeam.evaluation.estimators import Mean
from tilebeam.evaluation.results import PASS, Accuracy, Comparison, Latency, Point, Ranking, grouped
from tilebeam.evaluation.tasks import title_of
from tilebeam.evaluation.tasks.task import Item, Task

_FIGURES = {
    "pass@k": "at least one of k samples is right, mean over all draws of k (Chen et al. 2021)",
    "best@k": "the best-scored of k samples is right, mean over all draws of k",
    "maj@k": "the most frequent answer of k samples is right, mean over all draws of k",
    "weighted@k": "the answer of k samples that weighs most is right, mean over draws of k",
    "run": "the greedy answer, or what the search chose, is right; it ran at this budget",
}


@dataclass(frozen=True)
class EvalReport:
    """All figures of an evaluation, of those of its items that are done."""

    setting: Setting
    task: Task
    rows: list[Accuracy]
    rankings: list[Ranking]
    comparisons: list[Comparison]
    latencies: list[Latency]
    points: list[Point]
    notes: list[str]
    items: Sequence[Item]

    @property
    def title(self) -> str:
        """Return what people call the task."""
        return title_of(self.setting.task.spec)

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return {
            "task": self.task.name,
            "items": len(self.items),
            "digest": self.setting.digest,
            "setting": self.setting.as_dict(),
            "accuracy": [r.as_dict() for r in self.rows],
            "rankings": [without_infinities(asdict(r)) for r in self.rankings],
            "comparisons": [c.as_dict() for c in self.comparisons],
            "latency": [asdict(m) for m in self.latencies],
            "points": [p.as_dict() for p in self.points],
            "notes": self.notes,
        }

    @property
    def front(self) -> list[Point]:
        """The Pareto front, by rising cost."""
        return sorted((p for p in self.points if p.on_front), key=lambda p: p.seconds)


def markdown(report: EvalReport, plots: Sequence[Path] = ()) -> Iterator[str]:
    """Yield the lines of report.md."""
    s = report.setting
    yield f"# {report.title}"
    yield ""
    yield (
        f"{len(report.items)} items, {_counted(len(s.seeds), 'seed')}, {_counted(s.n_samples, 'sample')} per item "
        f"and seed, setting {s.digest[:12]}. Accuracy in percent with Wilson's 95 % interval over items."
    )
    budgets = sorted({r.budget for r in report.rows})
    for (model, device), rows in grouped(report.rows, lambda r: (r.model, r.device)).items():
        yield from ("", f"## {model} on {device}", "")
        yield from accuracy_table(rows, budgets)
    yield from (
        "",
        "Figures: " + "; ".join(f"{n}: {_FIGURES[n]}" for n in dict.fromkeys(r.figure for r in report.rows)),
    )
    yield "Series in *italics* know the answer: bounds, not methods."
    for r in report.rankings:
        yield from ("", f"## How {r.model} on {r.device} is scored", "")
        yield (
            f"{r.samples} samples, {100 * r.right:.1f} % right, {100 * r.cut:.1f} % cut off. AUROC: the chance that a "
            "right sample has a higher score than a wrong one, of all problems or of the same one."
        )
        yield from ("", *ranking.table(r.rows))
    if report.latencies:
        budgets = sorted({m.budget for m in report.latencies})
        yield from ("", "## Seconds per prompt", "")
        yield "One prompt at a time from an empty cache: mean over the prompts (95 % interval)."
        yield ""
        yield from cost_table(report.latencies, budgets, lambda m: _with_interval(m.seconds))
        yield from ("", "CPU-seconds per prompt, of all CPUs together:", "")
        yield from cost_table(report.latencies, budgets, lambda m: _with_interval(m.cpu_seconds))
        yield from ("", "CPU-milliseconds per sampled token:", "")
        yield from cost_table(report.latencies, budgets, cpu_cell)
    if report.front:
        yield from ("", "## Pareto front", "", "| seconds | accuracy | model | device | method | budget |")
        yield "| ---: | ---: | --- | --- | --- | ---: |"
        for p in report.front:
            row = p.row
            yield f"| {p.seconds:.3g} | {cell(row)} | {row.model} | {row.device} | {row.series} | {row.budget} |"
    chosen = [c for c in report.comparisons if c.first.budget == s.n_samples]
    if chosen:
        yield from ("", "## Differences at the greatest budget", "")
        yield "Paired bootstrap over items; points of accuracy, 95 % interval, two-sided p."
        yield from ("", "| first | second | difference | p |", "| --- | --- | ---: | ---: |")
    for c in chosen:
        d = c.difference
        yield (
            f"| {_named(c.first, c.second)} | {_named(c.second, c.first)} | {_points(d.value)} "
            f"({_points(d.low)} to {_points(d.high)}) | {d.p:.2g} |"
        )
    for path in plots:
        if path.suffix == ".png":
            yield from ("", f"![{path.stem}]({path.name})")
    for note in report.notes:
        yield from ("", f"Note: {note}")


def accuracy_table(rows: Sequence[Accuracy], budgets: Sequence[int]) -> Iterator[str]:
    """Lay out series by budget."""
    found: dict[tuple[str, ...], dict[int, str]] = {}
    for (series, figure), group in grouped(rows, lambda r: (r.series, r.figure)).items():
        name = f"*{series}*" if any(r.oracle for r in group) else series
        found[name, figure] = {r.budget: cell(r) for r in group}
    return budget_table(("series", "figure"), found, budgets)


def budget_table(
    heads: Sequence[str], rows: Mapping[tuple[str, ...], Mapping[Any, str]], budgets: Sequence[Any]
) -> Iterator[str]:
    """Lay out cells by budget, as Markdown.

    Args:
        heads: of the columns before the budgets.
        rows: cells by budget, by what stands in those columns.
    """
    yield "| " + " | ".join([*heads, *map(str, budgets)]) + " |"
    yield "|" + " --- |" * len(heads) + " ---: |" * len(budgets)
    for names, cells in rows.items():
        yield "| " + " | ".join([*names, *(cells.get(k, "") for k in budgets)]) + " |"


def cost_table(measured: Sequence[Latency], budgets: Sequence[int], cost: Callable[[Latency], str]) -> Iterator[str]:
    """Lay out a cost by budget."""
    cells: dict[tuple[str, ...], dict[int, str]] = {
        names: {m.budget: cost(m) for m in group}
        for names, group in grouped(measured, lambda m: (m.model, m.device, m.series)).items()
    }
    return budget_table(("model", "device", "series"), cells, budgets)


def _with_interval(mean: Mean) -> str:
    return f"{mean.value:.3g} ({mean.low:.3g}-{mean.high:.3g})"


def cpu_cell(m: Latency) -> str:
    """Spell CPU-milliseconds per sampled token."""
    return f"{1e3 * m.cpu_seconds.value / m.tokens:.3g}" if m.tokens else ""


def cell(row: Accuracy) -> str:
    """Spell a figure with its interval, "" if nobody judged."""
    s = row.share
    if s.value != s.value:
        return ""
    return f"{100 * s.value:.1f} ({100 * s.low:.1f}-{100 * s.high:.1f})"


def _points(value: float) -> str:
    return f"{round(100 * value, 1) + 0.0:+.1f}"  # adding 0 makes -0 a 0


def _named(row: Accuracy, other: Accuracy) -> str:
    place = "" if (row.model, row.device) == (other.model, other.device) else f" of {row.model} on {row.device}"
    one = "one sample" if row.series == PASS and row.budget == 1 else f"{row.series}@{row.budget}"
    return f"{GREEDY if row.series == GREEDY else one}{place}"


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
