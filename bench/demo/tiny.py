"""The demo's part on search with a process reward model: the tiny world of bench/tiny.

Its models lie in the repository, and an exact checker says how well the searches choose; gemma has no reward model.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table
from rich.text import Text
from tilebeam import BeamSearch, BestOfN, SamplingParams, SearchResult, TokenReward, load
from tilebeam.evaluation.estimators import wilson

from bench.tiny import arithmetic, references

REASONER = references.REASONERS[len(references.REASONERS) // 2]
PROBLEMS = 40
N = 16
METHODS = {
    "greedy": "one answer at temperature 0",
    "pass@1": "one sample; mean over all samples",
    f"majority@{N}": "the most frequent answer",
    f"best-of-{N}": "the process reward model picks one of the samples",
    f"beam@{N}": "it picks after every line which beginnings go on",
    f"pass@{N}": "any sample is right: a bound, no method knows which",
}


@dataclass(frozen=True)
class Found:
    """What the searches found: of each a result per problem, the scores of the lines that best-of-n chose, seconds; and
    the greedy texts."""

    problems: list[str]
    greedy: list[str]
    best_of_n: list[SearchResult]
    beam: list[SearchResult]
    lines: list[list[float]]
    seconds: float

    def verdicts(self, i: int) -> list[bool]:
        """Of every sample of problem i, whether its answer is right."""
        return [arithmetic.is_right(self.problems[i], c.text) for c in self.best_of_n[i].candidates]

    def shares(self) -> dict[str, float]:
        """Share of the problems that each method solves."""
        solved = dict.fromkeys(METHODS, 0.0)
        for i, (problem, result, beam) in enumerate(zip(self.problems, self.best_of_n, self.beam, strict=True)):
            verdicts = self.verdicts(i)
            solved["greedy"] += arithmetic.is_right(problem, self.greedy[i])
            votes = Counter(filter(None, (arithmetic.answer(c.text) for c in result.candidates)))
            solved["pass@1"] += sum(verdicts) / len(verdicts)
            solved[f"majority@{N}"] += any(int(a) == arithmetic.value(problem) for a, _ in votes.most_common(1))
            solved[f"best-of-{N}"] += verdicts[result.best_index]
            solved[f"beam@{N}"] += arithmetic.is_right(problem, beam.the_one.text)
            solved[f"pass@{N}"] += any(verdicts)
        return {name: count / len(self.problems) for name, count in solved.items()}


def search(seed: int, device: str, threads: int | None, problems: int = PROBLEMS) -> Found:
    """Best-of-16 and beam search with the reward model on fresh test expressions, both models on `device`."""
    drawn = arithmetic.draw_many(seed, "test", problems)
    prompts = [problem + "\n" for problem in drawn]
    sampling = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, max_tokens=96, seed=seed)
    with ExitStack() as stack:
        reasoner, judge = (
            stack.enter_context(
                load(references.file_of(name, "q8_0"), device, n_ctx=8192, n_seq_max=64, threads=threads)
            )
            for name in (REASONER, references.PRM)
        )
        reward = TokenReward(judge, tag=references.TAG, good=references.GOOD, bad=references.BAD)
        greedy = [r.outputs[0].text for r in reasoner.generate(prompts, replace(sampling, temperature=0.0))]
        started = time.perf_counter()
        best = BestOfN(reward).run(reasoner, prompts, N, sampling=sampling)
        beam = BeamSearch(reward, beam_width=4).run(reasoner, prompts, N, sampling=sampling)
        seconds = time.perf_counter() - started
        lines = reward.score_steps(prompts, [r.the_one.text.splitlines(keepends=True) for r in best])
    return Found(drawn, greedy, best, beam, lines, seconds)


def show(screen: Console, found: Found) -> None:
    """One problem with the scores of its lines, and how many problems each method solved."""
    count = len(found.problems)
    screen.print(
        f"[bold]search with a process reward model[/bold]  a reasoner of {REASONER[:-1]} million parameters and its "
        f"judge (bench/tiny), {count} fresh expressions, {N} samples each, {found.seconds:.1f} s"
    )
    verdicts = [found.verdicts(i) for i in range(count)]
    solved = [i for i, result in enumerate(found.best_of_n) if verdicts[i][result.best_index]]
    if solved:
        at = min(solved, key=lambda i: sum(verdicts[i]))  # where it was hardest to choose
        text = Text(f"  {found.problems[at]}   ({sum(verdicts[at])} of {N} samples are right; the one chosen:)\n")
        for line, score in zip(found.best_of_n[at].the_one.text.splitlines(), found.lines[at], strict=True):
            text.append(f"  {line:<20}", style="green").append(f"{score:.3f}\n", style="dim")
        screen.print(text, end="")
    table = Table(title="accuracy, tiny world", title_justify="left", expand=True)
    table.add_column("method", no_wrap=True)
    table.add_column("solved", justify="right", no_wrap=True)
    table.add_column("95 % interval", justify="right", no_wrap=True)
    table.add_column("what it is", ratio=1)
    for name, share in found.shares().items():
        low, high = wilson(share, count)
        table.add_row(name, f"{share:.0%}", f"{low:.0%} - {high:.0%}", METHODS[name])
    screen.print(table)
