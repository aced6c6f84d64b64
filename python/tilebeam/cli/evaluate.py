"""`tilebeam eval`: evaluates models on a task, and shows the report."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Annotated

import typer

from tilebeam.cli import console
from tilebeam.cli.eval_options import (
    ChoiceOptions,
    ItemOptions,
    RunningOptions,
    described_reward,
    model_files,
    numbers,
    split_methods,
)
from tilebeam.cli.options import NamedModels, TaskTextOptions, grouped, option
from tilebeam.cli.reward_options import STEP_STOP_TEXT, RewardModelOptions, StepStop
from tilebeam.evaluation.task_options import SEEDS
from tilebeam.evaluation.tasks import KINDS, open_task
from tilebeam.text_files import unescaped


@grouped
def evaluate(
    *,
    model: NamedModels,
    task: Annotated[
        str, typer.Option("--task", help=f"One of {', '.join(f'{k}:FILE' for k in KINDS)}.", show_default=False)
    ],
    out: Path | None = option(
        None,
        "-o",
        "--out",
        help="Folder for log, report and plots; an existing run is resumed. Default: eval/TASK-DATE.",
    ),
    method: list[str] = option(
        ["greedy", "best-of-n", "self-consistency"],
        help="Comma separated: greedy (one answer at temperature 0), best-of-n, self-consistency, beam, dvts, "
        "adaptive; options behind a colon: beam:beam_width=4,max_steps=8.",
    ),
    choosing: ChoiceOptions,
    asked: ItemOptions,
    seeds: str = option(
        ",".join(map(str, SEEDS)),
        help="Seeds, comma separated; every item runs once with each.",
        rich_help_panel="Sampling",
    ),
    text: TaskTextOptions,
    reward_model: RewardModelOptions,
    step_stop: StepStop = STEP_STOP_TEXT,
    running: RunningOptions,
    json_: bool = option(False, "--json", help="Print report.json instead of tables."),
) -> None:
    """Evaluate models on a task: accuracy of search methods over budgets, latency, and the Pareto front of all.

    Items without answers are answered without a verdict: texts and votes are in results.jsonl.

    The greedy answer is what methods are compared with. One run of N samples per item gives every budget of best-of-n
    and self-consistency; beam, dvts and the others run at each budget. If a run is killed or interrupted, the same
    command resumes it.

    Example: tilebeam eval -m model.gguf --task jsonl:items.jsonl -n 64 --stop "\\n" --out eval/items --latency-items 10

    A benchmark: tilebeam eval -m model.gguf --task gsm8k:gsm8k_test.jsonl --items 200 --budget 1,4,16 -np 16 -c 16384
    --out eval/gsm8k   (docs/evaluation.md says where its files come from)
    """
    from tilebeam.cli.evaluate_view import Bars
    from tilebeam.evaluation import named_scorers, runner
    from tilebeam.evaluation.config import Setting, versions
    from tilebeam.evaluation.eval_report import markdown
    from tilebeam.evaluation.worker import EvalJob

    reward, step_ends = reward_model.read(), unescaped(step_stop)
    options = asked.of(task)
    out = out or Path("eval", f"{Path(task.partition(':')[2]).stem}-{date.today()}")
    opened = open_task(options)
    scorers = choosing.scorers(opened, reward)
    setting = Setting(
        models=model_files(model),
        task=options,
        task_digest=opened.digest,
        methods=split_methods(method),
        budgets=numbers(choosing.budget, "--budget"),
        scorers=scorers,
        reward=described_reward(reward, step_ends),
        sources=named_scorers.sources(scorers),
        seeds=numbers(seeds, "--seeds"),
        sampling=text.sampling(opened),
        versions=versions(),
        **running.fields(),
    )
    try:
        job = EvalJob(setting, reward, step_ends)
        report = runner.evaluate(job, out, task=opened, watcher=Bars(), **running.arguments())
    except KeyboardInterrupt:
        console.err().print(f"Interrupted. What is finished is in {out}; run the same command again to resume.")
        raise typer.Exit(130) from None
    if json_:
        print(json.dumps(report.as_dict(), indent=2))
        return
    console.print_markdown(markdown(report))
    console.err().print(f"{out}/report.md, report.json, results.jsonl, plots", style="dim")
