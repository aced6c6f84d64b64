"""`tilebeam reward train`: a reward head on a model's own hidden states."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilebeam.cli import console
from tilebeam.cli.commands import Command, prepared
from tilebeam.cli.eval_options import ProblemOptions
from tilebeam.cli.options import Json, ModelOptions, TaskTextOptions, grouped, option
from tilebeam.cli.reward_options import STEP_STOP_TEXT, StepStop
from tilebeam.errors import TilebeamError
from tilebeam.evaluation.task_options import TaskOptions
from tilebeam.gguf.help_text import App
from tilebeam.model.load_options import LoadOptions
from tilebeam.text_files import unescaped
from tilebeam.training.fit_options import AUTO, SAMPLES, STEPS, FitOptions, features_of

if TYPE_CHECKING:
    from tilebeam.evaluation.log import Record
    from tilebeam.evaluation.tasks.task import Task
    from tilebeam.model.lm import LM
    from tilebeam.scoring.reward_heads import Head
    from tilebeam.training.collection import Collection, CollectionSetting

_fit_option = partial(option, rich_help_panel="Fit")

app = App(Command, name="reward", help="Train a reward head on a model's own hidden states.", no_args_is_help=True)


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Problems, and how samples of them are drawn and kept."""

    task: Annotated[str, typer.Option("--task", help="Problems, as in tilebeam eval: gsm8k:FILE, jsonl:FILE ..")]
    samples: int = option(SAMPLES, min=1, help="Samples of each problem.")
    data: Path | None = option(
        None, help="Where samples are kept (.jsonl and .states are added); default: beside --out."
    )
    seed: int = option(
        FitOptions.seed, "-s", "--seed", min=0, help="Of the samples, the folds, the fit and the intervals."
    )
    asked: ProblemOptions
    text: TaskTextOptions
    steps: int = _fit_option(
        STEPS, min=0, help="Beginnings of each sample that count besides its end, for searches by steps."
    )
    step_stop: StepStop = STEP_STOP_TEXT

    def setting(self, model: ModelOptions, described: TaskOptions, task: Task, layer: int | None) -> CollectionSetting:
        """Describe all that the samples and their states depend on."""
        from tilebeam.evaluation.config import versions
        from tilebeam.gguf.fingerprint import fingerprint
        from tilebeam.training.collection import CollectionSetting

        return CollectionSetting(
            fingerprint(model.model),
            described,
            self.text.sampling(task),
            self.samples,
            lora=tuple((fingerprint(path), scale) for path, scale in model.lora.adapters()),
            steps=self.steps,
            step_stop=unescaped(self.step_stop),
            seed=self.seed,
            versions=versions(),
            layer=layer,
        )


@grouped
def train(
    *,
    model: ModelOptions,
    problems: SampleOptions,
    out: Annotated[Path, typer.Option("-o", "--out", help="The head's GGUF file.")],
    features: str = _fit_option(
        AUTO,
        help="What the head reads of a text: mean, recent, last (hidden states), length, confidence, comma "
        "separated; auto: what does best on problems that heads did not learn from.",
    ),
    layer: int | None = _fit_option(
        LoadOptions.hidden_layer,
        min=0,
        help="Read hidden states behind this layer, from 0; default: behind the final norm. A layer at two thirds "
        "of a model's depth may tell more.",
    ),
    json_: Json = False,
) -> None:
    """Train a reward head on a model's own hidden states, from samples of a task that the task's checker judges.

    Give the head to best-of-n, vote, beam, dvts, adaptive, eval or serve with --reward-head: its ratings decode no
    token. If a run is killed or interrupted, the same command resumes it; with more --items or other fit options it
    uses the samples that exist. The report rates each problem by heads that did not learn from it.

    Example: tilebeam reward train -m model.gguf --task gsm8k:train.jsonl --items 1000 --samples 8 -o head.gguf
    """
    from tilebeam.gguf.whole_file import check_target

    if out.suffix != ".gguf":
        raise TilebeamError(f"The head is written as a GGUF file: {out} should end in .gguf.")
    check_target(out)
    options = FitOptions(features_of(features), problems.seed)
    with _collected(model, problems, out.with_suffix(""), layer) as (lm, collection, records, about):
        facts, head = _fit(lm, collection, records, options, about)
    from tilebeam.scoring.reward_heads import save_head

    save_head(out, head)
    _finish(facts, out, json_)


app.command("train")(prepared(train))


@contextmanager
def _collected(
    model: ModelOptions, problems: SampleOptions, beside: Path, layer: int | None
) -> Iterator[tuple[LM, Collection, list[Record], dict[str, Any]]]:
    """Collect samples; yields the model, all samples, the records of the problems that were asked for, and facts for
    the report.

    Args:
        beside: where samples are kept, unless the options say.
        layer: behind which hidden states are taken.
    """
    from tilebeam.cli.evaluate_view import Bars
    from tilebeam.evaluation.tasks import open_task
    from tilebeam.training.collection import Collection, collect

    described = problems.asked.of(problems.task)
    task = open_task(described)
    setting, stem = problems.setting(model, described, task, layer), problems.data or beside
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
        yield lm, collection, records, about


def _fit(
    lm: LM, collection: Collection, records: list[Record], options: FitOptions, about: dict[str, Any]
) -> tuple[dict[str, Any], Head]:
    """Fit a head; return the facts of the report and the head."""
    from tilebeam.scoring.own_reward import OwnReward, maker_of
    from tilebeam.training.fitting import fit, samples_of
    from tilebeam.training.head_report import report

    samples = samples_of(records, options.seed)
    with console.bar("fit") as bar:
        task = bar.add_task("", total=None, note="")
        fitted = fit(
            collection.states(),
            samples,
            options,
            maker_of(lm),
            lambda done, total: bar.update(task, completed=done, total=total),
        )
    fitted = replace(fitted, head=replace(fitted.head, layer=lm.info.hidden_layer))
    OwnReward(lm, fitted.head)  # it fits
    return report(fitted, samples, options.seed, about), fitted.head


def _finish(facts: dict[str, Any], head: Path, as_json: bool) -> None:
    """Write the report beside the head, and show it."""
    from tilebeam.training.head_report import markdown, write

    files = [head, *write(facts, head.with_suffix(""))]
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        console.print_markdown(markdown(facts))
    console.err().print(", ".join(map(str, files)), style="dim", soft_wrap=True)
