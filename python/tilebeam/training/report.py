"""What a new head is worth, on problems that nothing was learnt from or chosen by: figures, Markdown, a plot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilebeam.gguf.whole_file import whole_file
from tilebeam.training import quality
from tilebeam.training.fitting import Fitted, Samples, inputs


@dataclass(frozen=True)
class Report:
    """Figures of a head.

    Attributes:
        facts: for JSON.
    """

    facts: dict[str, Any]

    def plain(self) -> dict[str, Any]:
        """For JSON: null where a figure cannot be had."""
        found: dict[str, Any] = _plain(self.facts)
        return found

    def markdown(self) -> Iterator[str]:
        """The lines of the report."""
        f = self.facts
        yield f"# Reward head of {f['model']}"
        yield ""
        counts = f["problems"]
        yield (
            f"Fitted on {counts['train']} problems, chosen and calibrated on {counts['choose']}, reported on "
            f"{counts['report']} others: {f['samples']} samples, {100 * f['right']:.1f} % right, "
            f"{100 * f['cut']:.1f} % cut off. Features {', '.join(f['features'])}; layers {f['layers']}; "
            f"decay {f['decay']:g}."
        )
        yield from ("", "| AUROC of | all samples | within a problem | without cut-off ones | within a problem |")
        yield "| --- | ---: | ---: | ---: | ---: |"
        for name, row in f["auroc"].items():
            yield f"| {name} | " + " | ".join(_figure(row.get(k), row.get(f"{k}_interval")) for k in _COLUMNS) + " |"
        if f["beginnings"]["samples"]:
            yield ""
            yield (
                f"Of {f['beginnings']['samples']} beginnings of samples: {_figure(f['beginnings']['all'])} overall, "
                f"{_figure(f['beginnings']['within'])} within a problem."
            )
        yield from ("", f"Expected calibration error {100 * f['calibration_error']:.1f} %.", "")
        yield "| score | samples | right |"
        yield "| ---: | ---: | ---: |"
        for row in f["reliability"]:
            yield f"| {row['score']:.2f} | {row['count']} | {100 * row['right']:.0f} % |"
        if f["budgets"]:
            yield from ("", "Problems solved, in percent, in the mean over draws of so many samples:", "")
            yield "| | " + " | ".join(str(row["budget"]) for row in f["budgets"]) + " |"
            yield "| --- |" + " ---: |" * len(f["budgets"])
            for name in quality.METHODS:
                yield f"| {name} | " + " | ".join(f"{100 * row[name]:.1f}" for row in f["budgets"]) + " |"


_COLUMNS = ("all", "within", "whole", "whole_within")


def _figure(value: float | None, interval: tuple[float, float] | None = None) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:.3f}" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")


def report(
    fitted: Fitted, states: npt.NDArray[np.float16], parts: dict[str, Samples], seed: int, about: dict[str, Any]
) -> Report:
    """Figures on the part that is there to report on.

    Args:
        about: further facts: "model", and what was collected.
    """
    held, head = parts["report"], fitted.head
    scores = head(inputs(states, held.ends, head.features))
    right = held.correct
    whole = np.array([r["finish"] == "stop" for r in held.records])
    rated = {
        "the head": scores,
        "log-probability": np.array([r["logprob"] for r in held.records]),
        "shortness": -np.array([r["tokens"] for r in held.records], np.float64),
    }
    begun = ~np.isin(held.rows, held.ends)
    early = head(inputs(states, held.rows[begun], head.features)) if begun.any() else np.zeros(0)
    owner = held.owner[begun]
    table = quality.reliability(scores, right)
    problems = [
        [held.records[i] | {"score": float(scores[i])} for i in group] for group in held.grouped() if len(group) > 1
    ]
    return Report(
        about
        | {
            "features": list(head.features),
            "layers": head.shape,
            "decay": fitted.decay,
            "seed": seed,
            "problems": {name: len(part.grouped()) for name, part in parts.items()},
            "samples": len(right),
            "right": float(right.mean()),
            "cut": float(1 - whole.mean()),
            "auroc": {name: _rows(s, right >= 0.5, held.problem, whole, seed) for name, s in rated.items()},
            "beginnings": {
                "samples": len(early),
                "all": quality.auroc(early, right[owner] >= 0.5),
                "within": quality.auroc_within(early, right[owner] >= 0.5, held.problem[owner]),
            },
            "reliability": table,
            "calibration_error": quality.calibration_error(table),
            "budgets": quality.budgets(problems),
            "tried": fitted.tried,
        }
    )


def _rows(
    scores: npt.NDArray[np.float64],
    right: npt.NDArray[np.bool_],
    problem: npt.NDArray[np.int64],
    whole: npt.NDArray[np.bool_],
    seed: int,
) -> dict[str, Any]:
    overall, within = quality.intervals(scores, right, problem, seed)
    return {
        "all": quality.auroc(scores, right),
        "all_interval": overall,
        "within": quality.auroc_within(scores, right, problem),
        "within_interval": within,
        "whole": quality.auroc(scores[whole], right[whole]),
        "whole_within": quality.auroc_within(scores[whole], right[whole], problem[whole]),
    }


def write(found: Report, stem: Path) -> list[Path]:
    """Write STEM.report.md and .json, and with matplotlib .png and .svg; the files written."""
    texts = {
        "md": "\n".join(found.markdown()) + "\n",
        "json": json.dumps(found.plain(), indent=2, allow_nan=False) + "\n",
    }
    written = []
    for kind, text in texts.items():
        written.append(stem.with_name(f"{stem.name}.report.{kind}"))
        with whole_file(written[-1]) as partial:
            Path(partial).write_text(text)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return written
    return written + _draw(found, stem)


def _name_lines(axes: Any, ends: list[float]) -> None:
    """The methods' names right of where their lines end, apart from each other."""
    low, high = axes.get_ylim()
    above = low - (high - low)
    for i in sorted(range(len(ends)), key=lambda i: ends[i]):
        above = max(ends[i], above + 0.06 * (high - low))
        share = (above - low) / (high - low)
        axes.annotate(
            list(quality.METHODS)[i],
            (1.02, share),
            xycoords="axes fraction",
            va="center",
            color=f"C{i}",
            annotation_clip=False,
        )


def _plain(value: Any) -> Any:
    """Without NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and value != value else value


def _draw(found: Report, stem: Path) -> list[Path]:
    """How well scores are probabilities, and what each budget brings."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    f = found.facts
    written = [stem.with_name(f"{stem.name}.report.{kind}") for kind in ("png", "svg")]
    with matplotlib.rc_context({"svg.hashsalt": "tilebeam", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(10, 4.4), layout="constrained")
        FigureCanvasAgg(figure)
        left, middle = figure.subplots(1, 2)
        left.plot([0, 1], [0, 1], color="0.7", lw=1)
        rows = f["reliability"]
        sizes = [20 + 200 * r["count"] / max(1, f["samples"]) for r in rows]
        left.scatter([r["score"] for r in rows], [r["right"] for r in rows], s=sizes, color="C0")
        left.set(xlabel="score", ylabel="share of samples that is right", xlim=(0, 1), ylim=(0, 1))
        left.set_title(f"{f['samples']} samples, calibration error {100 * f['calibration_error']:.1f} %")
        for i, name in enumerate(quality.METHODS if f["budgets"] else ()):
            x = [row["budget"] for row in f["budgets"]]
            y = [100 * row[name] for row in f["budgets"]]
            middle.plot(x, y, marker="o", ms=3, ls=":" if name == "any right" else "-", color=f"C{i}")
        _name_lines(middle, [100 * f["budgets"][-1][name] for name in quality.METHODS] if f["budgets"] else [])
        middle.set(xlabel="samples", ylabel="problems solved, %", xscale="log")
        ticks = [row["budget"] for row in f["budgets"]]
        middle.set_xticks(ticks, [str(t) for t in ticks], minor=False)
        middle.minorticks_off()
        for axes in (left, middle):
            axes.grid(alpha=0.3)
        for path in written:
            with whole_file(path) as partial:
                kind = path.suffix.removeprefix(".")
                figure.savefig(partial, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return written
