"""`tilebeam reward train`: a reward head on a model's own hidden states."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markdown import Markdown

from tilebeam.cli import console
from tilebeam.cli.options import Json, ModelOptions, NPredict, Stop, TokenOptions, grouped
from tilebeam.cli.reward_options import STEP_STOP_TEXT, StepStop
from tilebeam.errors import TilebeamError
from tilebeam.evaluation.options import TaskOptions
from tilebeam.gguf.help_text import App
from tilebeam.text_files import unescaped
from tilebeam.training.options import AUTO, SAMPLES, STEPS, FitOptions, features_of

if TYPE_CHECKING:
    from tilebeam.evaluation.tasks.base import Task
    from tilebeam.model.lm import LM
    from tilebeam.training.collection import Collection
    from tilebeam.training.report import Report

_TASK = "Task"
_FIT = "Fit"

app = App(name="reward", help="Train a reward head on a model's own hidden states.", no_args_is_help=True)


@grouped
def train(
    *,
    model: ModelOptions,
    task: Annotated[
        str,
        typer.Option(
            "--task", help="Problems to learn from, as in tilebeam eval (no choices): gsm8k:FILE, jsonl:FILE .."
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The head's GGUF file.")],
    samples: Annotated[int, typer.Option("--samples", min=1, help="Samples of each problem.")] = SAMPLES,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="Where samples are kept (.jsonl and .states are added); default: beside --out."),
    ] = None,
    seed: Annotated[
        int, typer.Option("-s", "--seed", min=0, help="Of the samples, the split and the fit.")
    ] = FitOptions.seed,
    items: Annotated[
        int | None,
        typer.Option("--items", min=1, help="The first N problems of a file; default: all.", rich_help_panel=_TASK),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            "--template", help="Template of a question (\\n allowed); default: the task's own.", rich_help_panel=_TASK
        ),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Put prompts into the model's chat template; default: as the task usually does.",
            rich_help_panel=_TASK,
        ),
    ] = None,
    extract: Annotated[
        str | None,
        typer.Option("--extract", help="A text's answer; default: the task's own.", rich_help_panel=_TASK),
    ] = None,
    checker: Annotated[
        str | None,
        typer.Option("--checker", help="FILE.py:function of item and text; True if right.", rich_help_panel=_TASK),
    ] = None,
    tokens: TokenOptions,
    n_predict: NPredict = None,
    stop: Stop = None,
    steps: Annotated[
        int,
        typer.Option(
            "--steps",
            min=0,
            help="Beginnings of each sample to learn from besides its end, for searches by steps.",
            rich_help_panel=_FIT,
        ),
    ] = STEPS,
    step_stop: StepStop = STEP_STOP_TEXT,
    features: Annotated[
        str,
        typer.Option(
            "--features",
            help="What the head reads of a text: mean, recent, last (hidden states), length, confidence, comma "
            "separated; auto: what does best on held-out problems.",
            rich_help_panel=_FIT,
        ),
    ] = AUTO,
    hidden: Annotated[
        int,
        typer.Option(
            "--hidden", min=0, help="Units of a hidden layer; 0: a logistic regression.", rich_help_panel=_FIT
        ),
    ] = FitOptions.hidden,
    json_: Json = False,
) -> None:
    """Train a reward head on a model's own hidden states, from samples of a task that the task's checker judges.

    Give the head to best-of-n, vote, beam, dvts, adaptive, eval or serve with --reward-head: its ratings decode no
    token. If a run is killed or interrupted, the same command resumes it; with more --items or other fit options it
    uses the samples that exist. The report is about problems that the head has not seen.

    Example: tilebeam reward train -m model.gguf --task gsm8k:train.jsonl --items 1000 --samples 8 -o head.gguf
    """
    from tilebeam.evaluation.tasks import open_task
    from tilebeam.evaluation.tasks.choice import ChoiceTask
    from tilebeam.gguf.whole_file import check_target
    from tilebeam.training.collection import Collection

    if out.suffix != ".gguf":
        raise TilebeamError(f"The head is written as a GGUF file: {out} should end in .gguf.")
    check_target(out)
    options = FitOptions(features_of(features), hidden, seed)
    described = TaskOptions(
        spec=task,
        items=items,
        template=None if template is None else unescaped(template),
        extract=extract,
        checker=checker,
        chat=chat,
    )
    opened = open_task(described)
    if isinstance(opened, ChoiceTask):
        raise TilebeamError(f"--task {task}: choices are scored by their likelihood; a head learns from texts.")
    sampling = tokens.fields() | {
        "max_tokens": opened.defaults.max_tokens if n_predict is None else n_predict,
        "stop": [unescaped(s) for s in stop] if stop else list(opened.defaults.stop),
    }
    setting = _setting(model, described, sampling, samples, steps, unescaped(step_stop), seed)
    stem = out.with_suffix("")
    with model.load(model.parallel) as lm, Collection(data or stem, setting, lm.n_embd) as collection:
        try:
            _collect(lm, opened, collection)
        except KeyboardInterrupt:
            console.err().print(f"Interrupted. What is collected is in {data or stem}.jsonl; run the command again.")
            raise typer.Exit(130) from None
        known = {item.id for item in opened.items}
        found, head = _fit(lm, collection, known, options, model.model.stem)
    from tilebeam.scoring.reward_heads import save_head
    from tilebeam.training.report import write

    save_head(out, head)
    written = write(found, stem)
    _show(found, json_)
    console.err().print(", ".join(str(path) for path in (out, *written)), style="dim", soft_wrap=True)


app.command("train")(console.sentences(train))


def _setting(
    model: ModelOptions,
    task: TaskOptions,
    sampling: dict[str, Any],
    samples: int,
    steps: int,
    step_stop: str,
    seed: int,
) -> Any:
    from tilebeam._version import __version__
    from tilebeam.fingerprint import fingerprint
    from tilebeam.training.collection import CollectionSetting

    versions = {"tilebeam": __version__, "llama-cpp-python": importlib.metadata.version("llama-cpp-python")}
    return CollectionSetting(
        fingerprint(model.model),
        task,
        sampling,
        samples,
        lora=tuple((fingerprint(path), scale) for path, scale in model.lora.adapters()),
        steps=steps,
        step_stop=step_stop,
        seed=seed,
        versions=versions,
    )


def _collect(lm: LM, task: Task, collection: Collection) -> None:
    from tilebeam.cli.evaluate_view import Bars
    from tilebeam.training.collection import collect

    bars = Bars()
    done = sum(collection.has(task, item, task.prompt(item, lm)) for item in task.items)
    with bars.phase("collect", len(task.items), done):
        collect(lm, task, collection, progress=lambda state: bars.batch(state), finished=bars.finished)


def _fit(lm: LM, collection: Collection, known: set[str], options: FitOptions, name: str) -> tuple[Report, Any]:
    """The report, and the head."""
    from tilebeam.scoring.own_reward import OwnReward, maker_of
    from tilebeam.training.fitting import fit, split
    from tilebeam.training.report import report

    records = [r for r in collection.records if r["unit"] in known]
    parts, states = split(records, options.seed), collection.states()
    with console.bar("fit") as bar:
        task = bar.add_task("", total=None, note="")
        fitted = fit(
            states, parts, options, maker_of(lm), lambda done, total: bar.update(task, completed=done, total=total)
        )
    OwnReward(lm, fitted.head)  # it fits
    about = {"model": name, "collection": collection.setting.as_dict(), "digest": collection.setting.digest}
    return report(fitted, states, parts, options.seed, about), fitted.head


def _show(found: Report, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found.plain(), indent=2))
        return
    screen, text = console.out(), "\n".join(found.markdown())
    if screen.is_terminal:
        screen.print(Markdown(text))
    else:
        print(text)
