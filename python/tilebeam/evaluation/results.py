"""From an evaluation's records to its figures: accuracy of every method at every budget, comparisons, latency, front.

Methods by series: "pass" (one right of k), "best-of-n[SCORER]", "self-consistency", "self-consistency[SCORER]" (votes
weighted), and the searches that were run, "beam[prm]". Figures of the first kinds are means over all draws of k out of
the N samples; `tilebeam.evaluation.estimators` has the formulas.
"""

from __future__ import annotations

import math
import statistics as py_statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np

from tilebeam.checks import without_infinities
from tilebeam.evaluation import estimators as stats
from tilebeam.evaluation import named_scorers as scoring
from tilebeam.evaluation import ranking
from tilebeam.evaluation.config import GREEDY, Setting, Unit
from tilebeam.evaluation.log import Record
from tilebeam.search.limits import standing

PASS = "pass"
PLACE = ("model", "device", "series", "budget")  # what a figure is of

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of one series at one budget.

    Attributes:
        model, device: which model, where.
        series: what chose; budget: out of how many candidates.
        figure: the estimator: "pass@k", "best@k", "maj@k", "weighted@k", or "run" for what ran once, a search or the
            greedy answer.
        oracle: the choice was made by who knows the answer.
        share: the figure and its interval.
        tokens: sampled per item, in the mean; scored_tokens: read by a reward model.
        values: [seeds, items]; not a number where there was no verdict.
    """

    model: str
    device: str
    series: str
    budget: int
    figure: str
    oracle: bool
    share: stats.Share
    tokens: float
    scored_tokens: float
    values: stats.F64 = field(repr=False, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        names = (*PLACE, "figure", "oracle", "tokens", "scored_tokens")
        plain: dict[str, Any] = without_infinities(asdict(self.share))
        return {name: getattr(self, name) for name in names} | plain


@dataclass(frozen=True)
class Latency:
    """What one series at one budget takes, one prompt at a time.

    Attributes:
        seconds: mean over the prompts, with its 95 % interval; median: of them.
        cpu_seconds: the same of CPU time.
        prompts: measured.
        tokens: sampled per prompt, in the mean.
    """

    model: str
    device: str
    series: str
    budget: int
    seconds: stats.Mean
    median: float
    cpu_seconds: stats.Mean
    prompts: int
    tokens: float


@dataclass(frozen=True)
class Ranking:
    """How well scores tell a model's right samples from its wrong ones.

    Attributes:
        samples: how many; right: the share that is right; cut: the share that was cut off.
        rows: by scorer, what `ranking.figures` gives; "shortness" is there for comparison.
    """

    model: str
    device: str
    samples: int
    right: float
    cut: float
    rows: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Comparison:
    """Two rows on the same items."""

    first: Accuracy
    second: Accuracy
    difference: stats.Difference

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        sides = {
            name: {k: getattr(row, k) for k in (*PLACE, "figure")}
            for name, row in (("first", self.first), ("second", self.second))
        }
        return sides | asdict(self.difference)


@dataclass(frozen=True)
class Point:
    """A row and what it costs."""

    row: Accuracy
    latency: Latency
    on_front: bool

    @property
    def seconds(self) -> float:
        """Per prompt, in the mean."""
        return self.latency.seconds.value

    def as_dict(self) -> dict[str, Any]:
        """Return a dictionary for JSON."""
        return {name: getattr(self.row, name) for name in PLACE} | {
            "accuracy": self.row.share.value,
            "seconds": self.seconds,
            "cpu_seconds": self.latency.cpu_seconds.value,
            "front": self.on_front,
        }


# --- accuracy ---------------------------------------------------------------------------------------------------------


def accuracy(
    setting: Setting, units: Sequence[Unit], records: Mapping[str, Record]
) -> tuple[list[Accuracy], list[str]]:
    """Compute all rows, and notes about what there is no figure for.

    Args:
        units: all of the evaluation.
        records: one per unit, by key.
    """
    rows: list[Accuracy] = []
    notes: list[str] = []
    for (model, device), group in grouped(units, lambda u: (u.model, u.device)).items():
        for (series, budget), part in grouped(group, lambda u: (u.series, u.budget)).items():
            table = [
                [item for unit in seeded for item in records[unit.key]["items"]]
                for seeded in grouped(part, lambda u: u.seed).values()
            ]
            if part[0].method:
                values = np.array([[item["correct"] for item in items] for items in table], np.float64)
                usages = [item["usage"] for items in table for item in items]
                tokens = py_statistics.fmean(u["completion_tokens"] for u in usages)
                scored = py_statistics.fmean(u["scored_tokens"] for u in usages)
                rows.append(
                    Accuracy(model, device, series, budget, "run", False, stats.share(values), tokens, scored, values)
                )
            else:
                rows += _sampled(setting, model, device, table, notes)
    return rows, list(dict.fromkeys(notes))


Estimator = Callable[[Sequence[Record], int], float]


def _sampled(
    setting: Setting, model: str, device: str, table: list[list[Record]], notes: list[str]
) -> Iterator[Accuracy]:
    """Compute the rows of everything that comes out of samples; `table` is [seeds][items]."""
    n = setting.n_samples
    tokens = py_statistics.fmean(s["tokens"] for items in table for item in items for s in item["samples"])
    scored = py_statistics.fmean(item["usage"]["scored_tokens"] for items in table for item in items) / n
    for series, figure, oracle, reads, estimate in _estimators(setting, table, notes):
        for k in setting.budgets:
            values = np.full((len(table), len(table[0])), np.nan)
            if table[0][0]["samples"][0]["correct"] is not None:
                values = np.array([[estimate(item["samples"], k) for item in items] for items in table])
            bound = oracle and k > 1  # a single sample is nobody's choice
            found = stats.share(values), tokens * k, scored * k if reads else 0.0, values
            yield Accuracy(model, device, series, k, figure, bound, *found)


def _estimators(
    setting: Setting, table: list[list[Record]], notes: list[str]
) -> Iterator[tuple[str, str, bool, bool, Estimator]]:
    """Yield series, figure, whether it knows the answer or takes a reward model, and how an item's value is got."""
    found = {m.name: m for m in setting.parsed_methods() if m.sampled}
    yield PASS, "pass@k", True, False, _pass
    if (method := found.get("best-of-n")) is not None:
        for scorer in setting.scorers:
            series, knows = setting.series(method, scorer), scorer == scoring.VERIFIER
            yield series, "best@k", knows, scorer in scoring.REWARDS, partial(_best, scorer)
    if (method := found.get("self-consistency")) is not None:
        yield setting.series(method), "maj@k", False, False, partial(_voted, _majority)
        for scorer in filter(scoring.is_weight, setting.scorers):
            series = setting.series(method, scorer)
            if any(s["weights"][scorer] < 0 for items in table for item in items for s in item["samples"]):
                notes.append(f"{series}: {scorer} gives scores below 0, which cannot weigh votes.")
                continue
            yield series, "weighted@k", False, scorer in scoring.REWARDS, partial(_voted, partial(_heaviest, scorer))


def _correct(samples: Sequence[Record]) -> list[float]:
    return [s["correct"] for s in samples]


def _pass(samples: Sequence[Record], k: int) -> float:
    correct = _correct(samples)
    if all(c in (0.0, 1.0) for c in correct):
        return stats.pass_at_k(len(correct), sum(correct), k)
    return stats.best_at_k(correct, correct, k)  # the same where there is only right and wrong


_known_standing = lru_cache(maxsize=1 << 16)(standing)  # asked for again at every budget


def _standing(sample: Record) -> int:
    return _known_standing(sample["finish"], sample["text"])


def _voted(
    estimate: Callable[[list[str | None], Sequence[Record], int], float], samples: Sequence[Record], k: int
) -> float:
    """Estimate a vote in which those of a draw vote that stand highest, see `tilebeam.search.limits.voters`: a draw
    without any of a level is a draw of the others, where the next level votes."""
    total, rest = 0.0, list(samples)
    for level in sorted({_standing(s) for s in samples if s["answer"] is not None}, reverse=True):
        answers = [s["answer"] if _standing(s) == level else None for s in rest]
        total += math.comb(len(rest), k) / math.comb(len(samples), k) * estimate(answers, rest, k)
        rest = [s for s, answer in zip(rest, answers, strict=True) if answer is None]
        if len(rest) < k:
            break
    return total


def _best(scorer: str, samples: Sequence[Record], k: int) -> float:
    """Estimate what is chosen as `BestOfN` does: samples have the places of their ranks as scores."""
    sign = 1 if scoring.knows(scorer) else -1
    ranks = [(s["scores"][scorer], _standing(s))[::sign] for s in samples]
    order = {rank: float(place) for place, rank in enumerate(sorted(set(ranks)))}
    return stats.best_at_k([order[rank] for rank in ranks], _correct(samples), k)


def _majority(answers: list[str | None], samples: Sequence[Record], k: int) -> float:
    worth = [s.get("worth", 1.0) for s in samples]  # see `tilebeam.answers.extract.weight_of`
    if max(worth) == 1:
        return stats.majority_at_k(answers, _correct(samples), k)
    return stats.weighted_at_k(answers, worth, _correct(samples), k)


def _heaviest(scorer: str, answers: list[str | None], samples: Sequence[Record], k: int) -> float:
    return stats.weighted_at_k(answers, [s["weights"][scorer] for s in samples], _correct(samples), k)


def grouped(values: Iterable[V], key: Callable[[V], K]) -> dict[K, list[V]]:
    """Return lists of the values with the same key, keys and values in their order."""
    groups: dict[K, list[V]] = defaultdict(list)
    for value in values:
        groups[key(value)].append(value)
    return dict(groups)


# --- scorers ----------------------------------------------------------------------------------------------------------


def rankings(setting: Setting, units: Sequence[Unit], records: Mapping[str, Record]) -> list[Ranking]:
    """Measure how well each scorer, and shortness, tells the right ones of all samples of an item under all seeds."""
    found: list[Ranking] = []
    for (model, device), group in grouped((u for u in units if not u.method), lambda u: (u.model, u.device)).items():
        items = [(item["id"], s) for unit in group for item in records[unit.key]["items"] for s in item["samples"]]
        problem, samples = [i for i, _ in items], [s for _, s in items]
        right = [s["correct"] >= 1 for s in samples]
        whole = [s["finish"] == "stop" for s in samples]
        scores = {n: [s["scores"][n] for s in samples] for n in setting.scorers if n != scoring.VERIFIER}
        scores["shortness"] = [-s["tokens"] for s in samples]
        rows = {name: ranking.figures(values, right, problem, whole) for name, values in scores.items()}
        found.append(Ranking(model, device, len(samples), float(np.mean(right)), 1 - float(np.mean(whole)), rows))
    return found


# --- comparisons ------------------------------------------------------------------------------------------------------


def comparisons(rows: Sequence[Accuracy]) -> list[Comparison]:
    """Compare methods of the same model at the same budget; one sample, and every method at every budget,
    against the model's greedy answer, at its greatest budget against that of every model on the same device. Where
    nothing is greedy, one sample is in its place. Who knows the answer is left out."""
    main = [r for r in rows if not r.oracle]
    yardsticks = [r for r in main if r.series == GREEDY] or [r for r in main if r.series == PASS]
    found = []
    for i, a in enumerate(main):
        for b in main[i + 1 :]:
            if (a.model, a.device, a.budget) == (b.model, b.device, b.budget) and a.budget > 1:
                found.append((b, a))
        greatest = max(r.budget for r in main if (r.model, r.device, r.series) == (a.model, a.device, a.series))
        if a.budget > 1 or a.series == PASS:
            rivals = [y for y in yardsticks if y.device == a.device and y.series != a.series]
            found += [(a, y) for y in rivals if y.model == a.model or a.budget == greatest]
    return [Comparison(a, b, stats.paired_bootstrap(a.values, b.values)) for a, b in found]


# --- latency ----------------------------------------------------------------------------------------------------------


def latencies(records: Iterable[Record], alike: Mapping[str, Sequence[str]]) -> list[Latency]:
    """Summarize the timed passes.

    Args:
        records: of the log.
        alike: by a series that was timed, all for which that holds.
    """
    named = [
        record | {"series": name} for record in records for name in alike.get(record["series"]) or [record["series"]]
    ]
    runs = grouped(named, lambda r: (r["model"], r["device"], r["series"], r["budget"]))
    found = []
    for names, group in sorted(runs.items()):
        seconds = [run["seconds"] for run in group]
        wall = stats.mean(seconds), py_statistics.median(seconds)
        cpu = stats.mean([run["cpu_seconds"] for run in group])
        tokens = py_statistics.fmean(run["tokens"] for run in group)
        found.append(Latency(*names, *wall, cpu, len(group), tokens))
    return found


def points(rows: Sequence[Accuracy], measured: Sequence[Latency]) -> list[Point]:
    """Join rows with their measured latency, and mark those that nothing beats. Who knows the answer is not on the
    front. One sample is one point, whatever would choose from it. On a device where a model was only timed it is as
    right as on the first that it was evaluated on."""
    own = {(r.model, r.device, r.series, r.budget): r for r in reversed(rows)}
    first = {(r.model, r.series, r.budget): r for r in own.values()}
    timed, costs = [], []
    for m in measured:
        row = own.get((m.model, m.device, m.series, m.budget)) or first.get((m.model, m.series, m.budget))
        if row is not None:
            timed.append(replace(row, device=m.device))
            costs.append(m)
    rivals = [i for i, r in enumerate(timed) if not r.oracle]
    front = {rivals[i] for i in stats.pareto_front([(costs[i].seconds.value, timed[i].share.value) for i in rivals])}
    return [Point(row, cost, i in front) for i, (row, cost) in enumerate(zip(timed, costs, strict=True))]
