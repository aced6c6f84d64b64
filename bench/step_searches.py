"""Which search for which scorer: searches by steps against choosing among whole samples, as a scorer gets better.

    python -m bench.step_searches [--items 200] [--model 0.5m] [--into docs/search.md] [--json] [--quick]

A reasoner of the tiny world solves test expressions with 16 candidates. The scorer is the exact checker behind noise:
it sees whether all lines so far are right, but only as a number from one of two normal distributions, which overlap
until it tells right beginnings from wrong ones with a given AUROC, and returns the probability that the beginning is
right. Half of the noise of a line is that of the line before, as a scorer that likes a text goes on liking it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import tilebeam
from tilebeam import DVTS, BeamSearch, SamplingParams, SearchResult, SelfConsistency, StepScorer, VoteResult
from tilebeam.search.limits import best_index, standings

from bench.lib import plots as pictures
from bench.lib import report
from bench.lib.document import put_into
from bench.lib.options import Parser
from bench.tiny import arithmetic, references
from bench.tiny_world import SEED, add_solved, fresh_expressions

AUROCS = (0.6, 0.7, 0.8, 0.9, 0.99)
BUDGET = 16
AT_ONCE = 4  # expressions whose texts grow together
_KEPT = math.sqrt(0.5)  # of a line's noise for the next line
_NORMAL = NormalDist()
BEST, VOTE = "the best", "a weighted vote"


class DoubtfulScorer(StepScorer):
    """Rates a beginning by the probability that it is right, as far as it can tell.

    Args:
        auroc: how often it rates a right beginning above a wrong one, 0.5 to 1, both excluded.
        seed: of its noise.
    """

    def __init__(self, auroc: float, seed: int = SEED) -> None:
        super().__init__(step_stop="\n")
        self._apart = math.sqrt(2) * _NORMAL.inv_cdf(auroc)  # means of the two distributions, of variance 1
        self._seed = seed

    def score_steps(
        self, prompts: Sequence[str | tilebeam.Prompt], solutions: Sequence[Sequence[str]]
    ) -> list[list[float]]:
        """See `StepScorer`."""
        texts = [p.text if isinstance(p, tilebeam.Prompt) else p for p in prompts]
        return [self._scores(p.strip(), tuple(steps)) for p, steps in zip(texts, solutions, strict=True)]

    def _scores(self, problem: str, steps: tuple[str, ...]) -> list[float]:
        scores, noise = [], self._noise(problem)
        for i in range(1, len(steps) + 1):
            text = "".join(steps[:i])
            noise = _KEPT * noise + math.sqrt(1 - _KEPT**2) * self._noise(problem + "\n" + text)
            seen = noise + (self._apart / 2 if _all_right(problem, text) else -self._apart / 2)
            scores.append(1 / (1 + math.exp(-self._apart * seen)))
        return scores

    def _noise(self, text: str) -> float:
        """Draw from the normal distribution, the same for the same text."""
        digest = hashlib.sha256(f"{self._seed} {text}".encode()).digest()
        return _NORMAL.inv_cdf((int.from_bytes(digest[:6], "big") + 0.5) / 2**48)


@lru_cache(1 << 18)
def _all_right(problem: str, text: str) -> bool:
    return all(arithmetic.check_lines(problem, text.split()))


def ways(auroc: float) -> dict[str, SelfConsistency | BeamSearch | DVTS]:
    """Return the searches by name; each one's candidates are chosen from in both ways."""
    answer, scorer = arithmetic.answer, DoubtfulScorer(auroc)
    steps: dict[str, Any] = {"step_stop": "\n", "max_steps": 12, "extract": answer}
    return {
        "whole samples": SelfConsistency(answer, weighting="reward", scorer=scorer),
        "beam search, width 4": BeamSearch(scorer, 4, **steps),
        "DVTS, width 4": DVTS(scorer, 4, **steps),
        "DVTS, width 2": DVTS(scorer, 2, **steps),
    }


def chosen(result: SearchResult) -> dict[str, str]:
    """Return the texts that the candidate of the best score and a weighted vote choose."""
    best = best_index(standings(result.candidates), result.scores)
    assert isinstance(result, VoteResult)
    return {BEST: result.candidates[best].text, VOTE: result.best.text}


def measure(model: str, count: int, threads: int, aurocs: Sequence[float] = AUROCS) -> list[dict[str, Any]]:
    """Search with scorers of each AUROC.

    Returns:
        rows of `auroc`, `search`, and the shares of expressions that each way to choose solves, `BEST` and `VOTE`.
    """
    problems = fresh_expressions(count)
    sampling = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, max_tokens=96)
    rows = []
    slots = AT_ONCE * BUDGET
    with tilebeam.load(references.file_of(model, "q8_0"), n_ctx=128 * slots, n_seq_max=slots, threads=threads) as lm:
        for auroc in aurocs:
            for name, search in ways(auroc).items():
                right = dict.fromkeys((BEST, VOTE), 0.0)
                for first in range(0, count, AT_ONCE):
                    group = problems[first : first + AT_ONCE]
                    results = search.run(lm, [p + "\n" for p in group], BUDGET, sampling=sampling, seed=SEED + first)
                    for problem, result in zip(group, results, strict=True):
                        for way, text in chosen(result).items():
                            right[way] += arithmetic.is_right(problem, text) / count
                rows.append({"auroc": auroc, "search": name, **right})
    return rows


def into(rows: Sequence[Mapping[str, Any]], model: str, count: int, document: Path) -> None:
    """Put the table and the picture of `measure` into a document."""
    aurocs = list(dict.fromkeys(r["auroc"] for r in rows))
    found = {(r["search"], way, r["auroc"]): 100 * r[way] for r in rows for way in (BEST, VOTE)}
    series = list(dict.fromkeys((search, way) for search, way, _ in found))
    error = 100 * math.sqrt(0.25 / count)
    lines = [
        f"{count} test expressions, {model}, {BUDGET} candidates, temperature 1, seed {SEED}: percent solved by AUROC "
        f"of the scorer, with a standard error of at most {error:.1f}.",
        "",
        "| search | chosen by | " + " | ".join(map(str, aurocs)) + " |",
        "| --- | --- " + "| ---: " * len(aurocs) + "|",
    ]
    for search, way in series:
        lines.append(f"| {search} | {way} | " + " | ".join(f"{found[search, way, a]:.1f}" for a in aurocs) + " |")
    figure, (axes,) = pictures.panels(1, (6.4, 4.2))
    for i, (search, way) in enumerate(series):
        shares = [found[search, way, a] for a in aurocs]
        axes.plot(aurocs, shares, "o-" if way == VOTE else "s:", color=f"C{i // 2}", ms=4, label=f"{search}: {way}")
    axes.set_xlabel("AUROC of the scorer")
    axes.set_ylabel("solved, %")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    picture = document.with_name("step-searches.png")
    pictures.save(figure, "Searches by steps over the quality of their scorer", picture)
    put_into(document, "step-searches", "\n".join([*lines, "", f"![Solved over AUROC]({picture.name})"]))


def main() -> None:
    p = Parser(__doc__, "4 expressions, one scorer")
    p.add_count("--items", usual=200, quick=4, what="test expressions")
    p.add_argument("--model", default="0.5m", choices=references.REASONERS)
    p.add_argument("-t", "--threads", type=int, default=2)
    p.add_argument("--into", type=Path, help="also put the table into this Markdown file, a plot beside it")
    options = p.parse()
    rows = measure(options.model, options.items, options.threads, AUROCS[2:3] if options.quick else AUROCS)
    shown = report.Rows("step_searches", options.json)
    for r in rows:
        add_solved(shown, f"AUROC {r['auroc']}, {r['search']}: {VOTE}, against {BEST}", r[BEST], r[VOTE])
    shown.finish()
    if options.into is not None:
        into(rows, options.model, options.items, options.into)


if __name__ == "__main__":
    report.start(main)
