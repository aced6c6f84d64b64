"""The worth of a head on problems that it did not learn from: figures and Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilebeam.evaluation import ranking
from tilebeam.gguf.whole_file import whole_file
from tilebeam.scoring.reward_heads import Head
from tilebeam.training import quality
from tilebeam.training.fitting import FOLDS, Fitted, Samples


@dataclass(frozen=True)
class HeadReport:
    """Figures of a head.

    Attributes:
        facts: for JSON.
    """

    facts: dict[str, Any]

    def plain(self) -> dict[str, Any]:
        """Return it as JSON has it: null where a figure cannot be had."""
        found: dict[str, Any] = ranking.without_nan(self.facts)
        return found

    def markdown(self) -> Iterator[str]:
        """Write the lines of the report."""
        f = self.facts
        yield f"# Reward head of {f['model']}"
        yield ""
        yield (
            f"{f['problems']} problems, {f['samples']} samples, {100 * f['right']:.1f} % right, "
            f"{100 * f['cut']:.1f} % cut off. Features {', '.join(f['features'])}; layers {f['layers']}. {f['rated']}"
        )
        yield from ("", *ranking.table(f["auroc"]))
        if f["beginnings"]["samples"]:
            early = f["beginnings"]
            yield ""
            yield (
                f"Of {early['samples']} beginnings of samples: {ranking.figure(early['all'])} overall, "
                f"{ranking.figure(early['within'])} within a problem."
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
        for gain in f["gains"]:
            low, high = 100 * gain["low"], 100 * gain["high"]
            yield ""
            yield (
                f"Of {gain['budget']} samples {gain['first']} solves {100 * gain['value']:+.1f} points more than "
                f"{gain['second']} ({low:+.1f} to {high:+.1f}, paired bootstrap over problems)."
            )


def report_of_fit(fitted: Fitted, held: Samples, seed: int, about: dict[str, Any]) -> HeadReport:
    """Return figures of a new head, by what the heads of the folds made of problems that they did not learn from.

    Args:
        about: further facts: "model", and what was collected.
    """
    rated = (
        f"Each problem is rated by heads that learnt from {FOLDS - 1} of {FOLDS} folds of the problems, not from its "
    )
    chosen = {"rated": f"{rated}own; decay {fitted.decay:g}.", "decay": fitted.decay, "tried": fitted.tried}
    return report(fitted.head, fitted.scores, held, seed, about | chosen)


def report(head: Head, rated: npt.NDArray[np.float64], held: Samples, seed: int, about: dict[str, Any]) -> HeadReport:
    """Return figures of scores.

    Args:
        head: that gave them.
        rated: the score of each of `held.rows`.
        seed: of the bootstraps.
        about: further facts: "model", "rated", who rated the problems, and what was collected.
    """
    right, ends = held.correct, held.at_end
    scores = rated[ends]
    whole = np.array([r["finish"] == "stop" for r in held.records])
    rivals = {
        "the head": scores,
        "log-probability": np.array([r["logprob"] for r in held.records]),
        "shortness": -np.array([r["tokens"] for r in held.records], np.float64),
    }
    early, owner = rated[~ends], held.owner[~ends]
    table = quality.reliability(scores, right)
    problems = [
        [held.records[i] | {"score": float(scores[i])} for i in group] for group in held.grouped() if len(group) > 1
    ]
    return HeadReport(
        about
        | {
            "features": list(head.features),
            "layers": head.shape,
            "seed": seed,
            "problems": len(held.grouped()),
            "samples": len(right),
            "right": float(right.mean()),
            "cut": float(1 - whole.mean()),
            "auroc": {name: ranking.figures(s, right >= 0.5, held.problem, whole, seed) for name, s in rivals.items()},
            "beginnings": {
                "samples": len(early),
                "all": ranking.auroc(early, right[owner] >= 0.5),
                "within": ranking.auroc_within(early, right[owner] >= 0.5, held.problem[owner]),
            },
            "reliability": table,
            "calibration_error": quality.calibration_error(table),
            "budgets": quality.budgets(problems),
            "gains": quality.gains(problems, seed),
        }
    )


def write(found: HeadReport, stem: Path) -> list[Path]:
    """Write STEM.report.md and .json; the files written."""
    texts = {
        "md": "\n".join(found.markdown()) + "\n",
        "json": json.dumps(found.plain(), indent=2, allow_nan=False) + "\n",
    }
    written = []
    for kind, text in texts.items():
        written.append(stem.with_name(f"{stem.name}.report.{kind}"))
        with whole_file(written[-1]) as partial:
            Path(partial).write_text(text)
    return written
