"""How well a reward head tells right from wrong samples, over the number of problems that it learnt from.

    python -m bench.real.head_data --collection 1.5B=head [--into docs/reward-models.md]

`tilebeam reward train -o head.gguf` left the samples in head.jsonl and head.states; no model runs. A third of the
problems is set aside, heads learn from so many of the others, and both are drawn anew several times. AUROC over all
samples and within a problem, with the standard error over the draws. Beside the usual head (the last hidden state,
length and confidence) stand heads without hidden states, and with all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.progress import track
from tilebeam import TilebeamError
from tilebeam.cli import console
from tilebeam.evaluation.log import Record
from tilebeam.evaluation.ranking import auroc, auroc_within
from tilebeam.text_state import Feature
from tilebeam.training import fitting

from bench.lib.document import put_into
from bench.lib.options import Parser
from bench.lib.report import start

States = npt.NDArray[np.float16]
FIRST = 20  # problems of the smallest part; each further one has twice as many
SET_ASIDE = 3  # a third of the problems
LAST: tuple[Feature, ...] = ("last", "length", "confidence")
HEADS: dict[str, tuple[Feature, ...]] = {
    "no hidden state": ("length", "confidence"),
    "last hidden state": LAST,
    "mean, recent and last": ("mean", "recent", *LAST),
}


def opened(stem: Path) -> tuple[list[Record], States]:
    """Return the problems of a collection, and its states [rows, 3 n_embd + 6].

    Raises:
        TilebeamError: the files do not fit each other.
    """
    with open(f"{stem}.jsonl", encoding="utf-8") as file:
        records = [record for record in map(json.loads, file) if "samples" in record]
    rows = sum(s["states"] for r in records for s in r["samples"])
    values = np.memmap(f"{stem}.states", np.float16, "r")
    if not rows or len(values) % rows:
        raise TilebeamError(f"{stem}.states does not have the rows that {stem}.jsonl lists.")
    return records, values.reshape(rows, -1)


def parts(problems: int) -> list[int]:
    most = problems - problems // SET_ASIDE
    return [FIRST << i for i in range(32) if FIRST << i <= most]


def curve(records: Sequence[Record], states: States, draws: int) -> Iterator[dict[str, Any]]:
    """Make a row for each head and number of problems.

    Raises:
        TilebeamError: there are too few problems.
    """
    if not parts(len(records)):
        raise TilebeamError(f"{len(records)} problems are too few: beside a third of them {FIRST} are needed.")
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for draw in track(range(draws), "Fitting", console=console.err(), transient=True):
        order = np.random.default_rng(draw).permutation(len(records))
        aside, rest = np.split(order, [len(records) // SET_ASIDE])
        held = fitting.gathered([records[i] for i in aside], [0] * len(aside))
        for count in parts(len(records)):
            learnt = fitting.samples_of([records[i] for i in rest[:count]], seed=draw)
            for name, features in HEADS.items():
                head = fitting.fit(states, learnt, features, {}).head
                scores = head(fitting.inputs(states, held.ends, features))
                pair = auroc(scores, held.correct >= 0.5), auroc_within(scores, held.correct >= 0.5, held.problem)
                found.setdefault((name, count), []).append(pair)
    for (name, count), pairs in sorted(found.items(), key=lambda item: list(HEADS).index(item[0][0])):
        mean, error = np.mean(pairs, 0), np.std(pairs, 0, ddof=1) / len(pairs) ** 0.5
        yield {"head": name, "problems": count, "all": mean[0], "within": mean[1], "errors": error.tolist()}


def table(rows: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Markdown: a line per model and head, a column per number of problems."""
    counts = sorted({row["problems"] for found in rows.values() for row in found})
    yield f"| model | head | {' | '.join(f'{n} problems' for n in counts)} |"
    yield "| --- | --- |" + " ---: |" * len(counts)
    for model, found in rows.items():
        for head in HEADS:
            cells = {row["problems"]: _cell(row) for row in found if row["head"] == head}
            yield f"| {model} | {head} | {' | '.join(cells.get(n, '') for n in counts)} |"


def _cell(row: dict[str, Any]) -> str:
    a, b = row["errors"]
    return f"{row['all']:.3f} ± {a:.3f}, {row['within']:.3f} ± {b:.3f}"


def main() -> None:
    p = Parser(__doc__, "two draws")
    p.add_argument("--collection", action="append", required=True, metavar="NAME=STEM", help="repeat for more models")
    p.add_argument("--draws", type=int, default=6, help="of the problems (default: 6)")
    p.add_argument("--into", type=Path, help="a document that holds the marks of head-data")
    options = p.parse()
    rows = {}
    for text in options.collection:
        name, _, stem = text.partition("=")
        if not stem:
            p.error(f"--collection {text}: expected NAME=STEM")
        rows[name] = list(curve(*opened(Path(stem)), 2 if options.quick else max(2, options.draws)))
    if options.into:
        put_into(options.into, "head-data", "\n".join(table(rows)))
    print(json.dumps(rows, indent=1) if options.json else "\n".join(table(rows)))


if __name__ == "__main__":
    start(main)
