"""The options with which what rates a model's texts is trained on judged samples of a task, and their collection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilebeam.cli import console
from tilebeam.cli.eval_options import ProblemOptions
from tilebeam.cli.options import ModelOptions, TaskTextOptions, option
from tilebeam.cli.reward_options import STEP_STOP_TEXT, StepStop
from tilebeam.text_files import unescaped
from tilebeam.training.fit_options import SAMPLES, SEED, STEPS

if TYPE_CHECKING:
    from tilebeam.evaluation.log import Record
    from tilebeam.evaluation.tasks.task import Task
    from tilebeam.model.lm import LM
    from tilebeam.training.collection import Collection

_fit_option = partial(option, rich_help_panel="Fit")


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Problems, and how samples of them are drawn and kept."""

    task: Annotated[str, typer.Option("--task", help="Problems, as in tilebeam eval: gsm8k:FILE, jsonl:FILE ..")]
    samples: int = option(SAMPLES, min=1, help="Samples of each problem.")
    data: Path | None = option(
        None, help="Where samples are kept (.jsonl and .states are added); default: beside --out."
    )
    seed: int = option(SEED, "-s", "--seed", min=0, help="Of the samples, the folds, the fit and the intervals.")
    asked: ProblemOptions
    text: TaskTextOptions
    steps: int = _fit_option(
        STEPS, min=0, help="Beginnings of each sample that count besides its end, for searches by steps."
    )
    step_stop: StepStop = STEP_STOP_TEXT


@contextmanager
def collected(
    model: ModelOptions, problems: SampleOptions, beside: Path, layer: int | None
) -> Iterator[tuple[LM, Task, Collection, list[Record], dict[str, Any]]]:
    """Collect samples; yields the model, the task, all samples, the records of the problems that were asked for, and
    facts for the report.

    Args:
        beside: where samples are kept, unless the options say.
        layer: behind which hidden states are taken.
    """
    from tilebeam.cli.evaluate_view import Bars
    from tilebeam.evaluation.config import versions
    from tilebeam.evaluation.tasks import open_task
    from tilebeam.gguf.fingerprint import fingerprint
    from tilebeam.training.collection import Collection, CollectionSetting, collect

    described, stem = problems.asked.of(problems.task), problems.data or beside
    task = open_task(described)
    setting = CollectionSetting(
        fingerprint(model.model),
        described,
        problems.text.sampling(task),
        problems.samples,
        lora=tuple((fingerprint(path), scale) for path, scale in model.lora.adapters()),
        steps=problems.steps,
        step_stop=unescaped(problems.step_stop),
        seed=problems.seed,
        versions=versions(),
        layer=layer,
    )
    with model.load(model.parallel, hidden_layer=layer) as lm, Collection(stem, setting, lm.n_embd) as collection:
        there, bars = {record["unit"] for record in collection.records}, Bars()
        done = sum(item.id in there for item in task.items)
        try:
            with bars.phase("collect", len(task.items), done):
                collect(lm, task, collection, finished=bars.finished)
        except KeyboardInterrupt:
            console.err().print(f"Interrupted. What is collected is in {stem}.jsonl; run the command again.")
            raise typer.Exit(130) from None
        known = {item.id for item in task.items}
        records = [r for r in collection.records if r["unit"] in known]
        about = {"model": model.model.stem, "collection": setting.as_dict(), "digest": setting.digest}
        yield lm, task, collection, records, about
