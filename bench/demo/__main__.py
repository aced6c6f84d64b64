"""What `make demo` runs: a real model on fresh arithmetic problems, Best-of-N; tiny models with a process reward model,
best-of-n and beam search; and throughput beside the stock backend.

    python -m bench.demo [--problems 12] [-N 16] [--device npu] [--seed S] [--quick]

The task was chosen and frozen on a pilot (see TASK): one that the base model solves 10 to 60 % of the time.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import secrets
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from tilebeam import LogProb, NpuError, SamplingParams, SelfConsistency, TilebeamError, Verifier, VoteResult, load
from tilebeam.cli import console
from tilebeam.evaluation.estimators import wilson
from tilebeam.measure.benchmark import Row, measure
from tilebeam.measure.machine import OtherLoad, busy_note, cpu_info
from tilebeam.measure.throughput import Case

from bench.demo import model as demo_model
from bench.demo import tiny as demo_tiny
from bench.lib import ROOT

# reasoning-gym's "products": two or three one-digit factors. Frozen on a pilot of 30 problems with 16 samples each; on
# 30 others the Q4_K_M file has pass@1 28 %, majority@16 33 %, likeliest@16 37 %, best@16 60 %.
TASK = "products"
CONFIG: dict[str, Any] = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
N_SHOTS, SHOT_SEED = 24, 777
SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 1.0, "max_tokens": 12, "stop": ["\n"]}
# A busy machine makes the throughput part long; then fewer runs must do.
SECONDS_PER_CASE = 45
_EXPRESSION = re.compile(r"[-\d][-\d *]*\d|\d")
_INTEGER = re.compile(r"-?\d+")


@dataclass(frozen=True)
class Problem:
    """One problem: its expression ("3 * 4 * 2"), the right answer, and reasoning-gym's entry for its verifier."""

    expression: str
    answer: str
    entry: dict[str, Any]


class Task:
    """The problems, the few-shot prompt for them (a base model takes no instructions), and the task's own verifier."""

    def __init__(self, seed: int, count: int) -> None:
        try:
            import reasoning_gym
        except ImportError:
            raise TilebeamError("reasoning-gym is missing: pip install reasoning-gym, or run `make demo`.") from None
        shots = [self._problem(e) for e in reasoning_gym.create_dataset(TASK, size=N_SHOTS, seed=SHOT_SEED, **CONFIG)]
        # Item i of a dataset is drawn from seed + i: neighbouring seeds would share most of their problems.
        spread = random.Random(seed).randrange(2**31)
        self._dataset = reasoning_gym.create_dataset(TASK, size=count * 20, seed=spread, **CONFIG)
        self.head = "".join(f"{p.expression} = {p.answer}\n" for p in shots)
        # A problem that the prompt solves, or that comes twice, would tell nothing.
        seen = {p.expression for p in shots}
        self.problems: list[Problem] = []
        for entry in self._dataset:
            problem = self._problem(entry)
            if problem.expression not in seen and len(self.problems) < count:
                seen.add(problem.expression)
                self.problems.append(problem)
        if len(self.problems) < count:
            raise TilebeamError(f"{TASK} has no {count} different problems; ask for fewer.")

    @staticmethod
    def _problem(entry: dict[str, Any]) -> Problem:
        match = _EXPRESSION.search(entry["question"])
        assert match is not None
        return Problem(match.group().strip(), entry["answer"], entry)

    def prompt(self, problem: Problem) -> str:
        """The shots and the problem, up to the equals sign."""
        return f"{self.head}{problem.expression} ="

    def right(self, problem: Problem, answer: str | None) -> bool:
        """reasoning-gym's verdict."""
        return answer is not None and self._dataset.score_answer(answer, problem.entry) == 1.0


def first_integer(text: str) -> str | None:
    """A sample's answer: the first whole number it gives."""
    match = _INTEGER.search(text)
    return str(int(match.group())) if match else None


# --- steps ------------------------------------------------------------------------------------------------------------


class Demo:
    """The demo's steps, in order. Results go to stdout, progress to stderr."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.screen = console.out()
        self.bars = console.err()

    def run(self) -> None:
        """All of it."""
        o = self.options
        self.screen.print(Rule("Tilebeam demo", style="bold"))
        model = demo_model.obtain(o.cache, self.screen, self.bars, random=o.random_model)
        self.screen.print(f"[bold]model[/bold]  {model.name}: {model.made_of}")
        megabytes = model.path.stat().st_size / 1e6
        self.screen.print(f"[bold]file[/bold]   {os.path.relpath(model.path)} ({megabytes:.0f} MB)")
        task = Task(o.seed, o.problems)
        self.screen.print(
            f"[bold]task[/bold]   reasoning-gym {TASK}, {len(task.problems)} fresh problems, {N_SHOTS} examples in the "
            f"prompt, {o.n} samples each at temperature {SAMPLING['temperature']}; repeat with --seed {o.seed}"
        )
        greedy, results, seconds = self._search(model, task)
        self._show_problems(task, results)
        self._show_scores(task, greedy, results, seconds, model.trained)
        with console.loading("the tiny world's models"):
            found = demo_tiny.search(o.seed, o.device, o.threads)
        demo_tiny.show(self.screen, found)
        self._throughput(model)

    def _load(self, model: demo_model.DemoModel, device: str) -> Any:
        with console.loading(str(model.path)):
            slots, threads = max(16, self.options.n), self.options.threads
            lm = load(model.path, device=device, n_ctx=4096, n_seq_max=slots, threads=threads)
        self.screen.print(f"[bold]loaded[/bold] {console.about(lm)}")
        return lm

    def _search(self, model: demo_model.DemoModel, task: Task) -> tuple[list[str], list[VoteResult], float]:
        """The greedy texts, the votes, and the votes' seconds."""
        o = self.options
        params = SamplingParams(seed=o.seed, logprobs=True, **SAMPLING)
        with self._load(model, o.device) as lm, console.generating("sampling", o.n * len(task.problems)) as hook:
            prompts = [task.prompt(p) for p in task.problems]
            greedy = lm.generate(prompts, replace(params, temperature=0.0))
            started = time.perf_counter()
            results = SelfConsistency(first_integer).infer(lm, prompts, o.n, sampling=params, progress=hook)
            return [r.outputs[0].text for r in greedy], results, time.perf_counter() - started

    def _show_problems(self, task: Task, results: list[VoteResult]) -> None:
        table = Table(title="candidates' answers (green: right), and the chosen one", title_justify="left", expand=True)
        table.add_column("problem", no_wrap=True)
        table.add_column("right", justify="right", no_wrap=True)
        table.add_column(f"{self.options.n} candidates", ratio=1)
        table.add_column("vote", justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for problem, result in zip(task.problems, results, strict=True):
            answers = Text()
            for answer, _ in Counter(a or "-" for a in result.answers).most_common():
                for _ in range(sum((a or "-") == answer for a in result.answers)):
                    style = "green" if task.right(problem, answer) else "default"
                    answers.append(f"{answer[:8]} ", style=style)
            good = task.right(problem, result.answer)
            chosen = Text((result.answer or "-")[:8], style="bold green" if good else "bold red")
            table.add_row(problem.expression, problem.answer, answers, chosen, "[green]✓[/]" if good else "[red]✗[/]")
        self.screen.print(table)

    def _show_scores(
        self, task: Task, greedy: list[str], results: list[VoteResult], seconds: float, trained: bool
    ) -> None:
        n, count = self.options.n, len(results)
        verdicts = [[task.right(p, a) for a in r.answers] for p, r in zip(task.problems, results, strict=True)]
        alone = sum(task.right(p, first_integer(t)) for p, t in zip(task.problems, greedy, strict=True)) / count
        single = sum(map(sum, verdicts)) / (n * count)
        vote = sum(task.right(p, r.answer) for p, r in zip(task.problems, results, strict=True)) / count
        likeliest = sum(v[self._likeliest(r)] for v, r in zip(verdicts, results, strict=True)) / count
        oracle = sum(self._oracle(task, p, r) for p, r in zip(task.problems, results, strict=True)) / count
        table = Table(title="accuracy", title_justify="left", expand=True)
        table.add_column("method", no_wrap=True)
        table.add_column("solved", justify="right", no_wrap=True)
        table.add_column("95 % interval", justify="right", no_wrap=True)
        table.add_column("what it is", ratio=1)
        rows = [
            ("greedy", alone, "one answer at temperature 0: what every search has to beat"),
            ("pass@1", single, f"one sample; mean over all {n * count} samples"),
            (f"likeliest@{n}", likeliest, "Best-of-N, scored by the model's own log-probability per token"),
            (f"majority@{n}", vote, "the most frequent answer: needs no scorer at all"),
            (
                f"best@{n}",
                oracle,
                "the task's own verifier picks: an upper bound that knows the answer, no reward model",
            ),
        ]
        for name, share, what in rows:
            low, high = wilson(share, count)
            table.add_row(name, f"{share:.0%}", f"{low:.0%} - {high:.0%}", what)
        self.screen.print(table)
        if not trained:
            self.screen.print("[yellow]The model is random: these answers are noise.[/yellow]")
        usage = [r.usage for r in results]
        prompt, cached = sum(u.prompt_tokens for u in usage), sum(u.cached_tokens for u in usage)
        sampled = sum(u.completion_tokens for u in usage)
        self.screen.print(
            f"{sampled} tokens sampled in {seconds:.1f} s. Of {prompt} prompt tokens {prompt - cached} were decoded, "
            f"{cached} taken from the cells of an earlier prompt; {n} samples share each prompt.",
            style="dim",
        )

    def _likeliest(self, result: VoteResult) -> int:
        scores = LogProb().score(result.prompt, result.candidates)
        return max(range(len(scores)), key=lambda i: (scores[i], -i))

    def _oracle(self, task: Task, problem: Problem, result: VoteResult) -> bool:
        verifier = Verifier(lambda _, text: task.right(problem, first_integer(text)))
        return max(verifier.score(result.prompt, result.candidates)) == 1.0

    def _throughput(self, model: demo_model.DemoModel) -> None:
        o = self.options
        n_gen, repetitions = (16, 2) if o.quick else (32, 5)
        cases = [Case(0, n_gen, n) for n in sorted({1, o.n})]
        rows: list[Row] = []
        with ExitStack() as stack:
            models = {d: stack.enter_context(self._load(model, d)) for d in ("cpu", "npu")}
            with OtherLoad() as others, console.bar("decoding") as progress:
                task = progress.add_task("", total=len(cases) * 2 * (repetitions + 1), note="")
                for case in cases:
                    progress.update(task, description=f"{case.n_parallel} sequences")
                    rows += measure(
                        models,
                        case,
                        repetitions,
                        max_seconds=SECONDS_PER_CASE,
                        on_run=lambda name, _: progress.update(task, advance=1, note=name),
                    )
        self._show_throughput(rows, n_gen)
        if note := busy_note(others.share):
            self.screen.print(f"[yellow]{note}[/yellow]")

    def _show_throughput(self, rows: list[Row], n_gen: int) -> None:
        runs = [len(r.samples_ts) for r in rows]
        names = {"cpu": "llama.cpp, stock CPU backend", "npu": "Tilebeam"}
        alone = {r.device: r.avg_ts for r in rows if r.n_parallel == 1}
        table = Table(title="decode throughput, same weights, runs interleaved", title_justify="left", expand=True)
        for heading in ("sequences", "backend", "tokens/s", "vs 1 sequence", "vs CPU backend"):
            table.add_column(heading, justify="left" if heading == "backend" else "right", no_wrap=True)
        for row in rows:
            ratio = "1"
            if row.device != "cpu" and row.ratio_vs_cpu and row.ratio_vs_cpu_min and row.ratio_vs_cpu_max:
                ratio = f"[bold]{row.ratio_vs_cpu:.2f}x[/] ({row.ratio_vs_cpu_min:.2f} - {row.ratio_vs_cpu_max:.2f})"
            table.add_row(
                str(row.n_parallel),
                names[row.device],
                f"{row.avg_ts:.1f} ± {row.stddev_ts:.1f}",
                f"{row.avg_ts / alone[row.device]:.2f}x",
                ratio,
                end_section=row.device == "npu",
            )
        self.screen.print(table)
        self.screen.print(
            f"{min(runs)} to {max(runs)} runs of {n_gen} tokens per sequence, cpu npu cpu npu ..; ratio: median "
            f"(least - greatest) of adjacent runs. {cpu_info()}, {rows[0].n_threads} threads.",
            style="dim",
        )


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="demo.py", description="Best-of-N with a small real model, and its throughput.")
    p.add_argument("--problems", type=int, help="fresh problems (default 12; 10 with --quick)")
    p.add_argument("-N", "--n-samples", dest="n", type=int, default=16, help="candidates per problem (default 16)")
    p.add_argument("--device", choices=("npu", "cpu"), default="npu", help="where the search runs")
    p.add_argument("--threads", "-t", type=int, help="default: one per CPU")
    p.add_argument("--seed", type=int, help="repeat a run (default: new problems every time)")
    p.add_argument("--quick", action="store_true", help="fewer problems, shorter measurement")
    p.add_argument("--cache", type=Path, default=ROOT / "build" / "demo", help="where model files are kept")
    p.add_argument("--random-model", action="store_true", help="use the random model even if gemma-3-270m is there")
    o = p.parse_args(argv)
    o.problems = o.problems if o.problems is not None else 10 if o.quick else 12
    if not 1 <= o.problems <= 200:
        p.error("--problems must be between 1 and 200")
    if not 1 <= o.n <= 256:
        p.error("-N must be between 1 and 256")
    if o.seed is None:
        o.seed = secrets.randbelow(10**6)
    return o


def main(argv: list[str] | None = None) -> int:
    """Exit status; what goes wrong is one sentence on stderr."""
    options = _arguments(argv)
    try:
        Demo(options).run()
    except (TilebeamError, NpuError, OSError, ValueError) as error:
        if os.environ.get("TILEBEAM_DEBUG"):
            raise
        console.err().print(Text.assemble(("demo: ", "bold red"), str(error)), soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.err().print("interrupted")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
