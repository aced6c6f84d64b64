"""The worth of a head on problems that it did not learn from: figures and Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tilebeam.checks import without_infinities
from tilebeam.evaluation import ranking
from tilebeam.gguf.whole_file import whole_file
from tilebeam.training.fitting import FOLDS, Fitted, Samples

_BINS = 10  # of scores, in the table of how many are right


def markdown(facts: dict[str, Any]) -> Iterator[str]:
    """Write the lines of the report on these facts."""
    f = facts
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


def report(fitted: Fitted, held: Samples, seed: int, about: dict[str, Any]) -> dict[str, Any]:
    """Return figures of a new head, by what the heads of the folds made of problems that they did not learn from, as
    JSON has them: null where one cannot be had.

    Args:
        seed: of the bootstraps.
        about: further facts: "model", and what was collected.
    """
    head, rated = fitted.head, fitted.scores
    right, ends = held.correct, held.at_end
    scores = rated[ends]
    whole = np.array([r["finish"] == "stop" for r in held.records])
    rivals = {
        "the head": scores,
        "log-probability": np.array([r["logprob"] for r in held.records]),
        "shortness": -np.array([r["tokens"] for r in held.records], np.float64),
    }
    early, owner = rated[~ends], held.owner[~ends]
    table = reliability(scores, right)
    facts: dict[str, Any] = without_infinities(
        about
        | {
            "rated": f"Each problem is rated by heads that learnt from {FOLDS - 1} of {FOLDS} folds of the problems, "
            f"not from its own; decay {fitted.decay:g}.",
            "decay": fitted.decay,
            "tried": fitted.tried,
            "features": list(head.features),
            "layers": head.shape,
            "seed": seed,
            "problems": len(np.unique(held.problem)),
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
            "calibration_error": calibration_error(table),
        }
    )
    return facts


def reliability(scores: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> list[dict[str, float]]:
    """Sort samples by their score into bins of equal width: how many, their mean score, and the share that is right."""
    place = np.minimum((scores * _BINS).astype(int), _BINS - 1)
    return [
        {"count": int(n), "score": float(scores[place == b].mean()), "right": float(right[place == b].mean())}
        for b in range(_BINS)
        if (n := (place == b).sum())
    ]


def calibration_error(table: Sequence[dict[str, float]]) -> float:
    """Compute the expected calibration error: the mean distance of score and share right, over all samples."""
    total = sum(row["count"] for row in table)
    return sum(row["count"] * abs(row["score"] - row["right"]) for row in table) / total if total else float("nan")


def write(facts: dict[str, Any], stem: Path) -> list[Path]:
    """Write STEM.report.md and .json; the files written."""
    texts = {
        "md": "\n".join(markdown(facts)) + "\n",
        "json": json.dumps(facts, indent=2, allow_nan=False) + "\n",
    }
    written = []
    for kind, text in texts.items():
        written.append(stem.with_name(f"{stem.name}.report.{kind}"))
        with whole_file(written[-1]) as partial:
            partial.write_text(text, encoding="utf-8")
    return written
