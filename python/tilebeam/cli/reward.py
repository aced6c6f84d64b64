"""`tilebeam reward train`: a reward head on a model's own hidden states."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tilebeam.cli import console, reward_adapter
from tilebeam.cli.commands import Command, prepared
from tilebeam.cli.options import Json, ModelOptions, check_gguf, grouped, option
from tilebeam.cli.reward_samples import SampleOptions, collected
from tilebeam.gguf.help_text import App
from tilebeam.model.load_options import LoadOptions
from tilebeam.training.fit_options import AUTO, features_of

_fit_option = partial(option, rich_help_panel="Fit")

app = App(
    Command, name="reward", help="Train what rates a model's texts: a reward head, or an adapter.", no_args_is_help=True
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
    check_gguf(out, "head")
    names, seed = features_of(features), problems.seed
    with collected(model, problems, out.with_suffix(""), layer) as (lm, _, collection, records, about):
        from tilebeam.scoring.own_reward import OwnReward, maker_of
        from tilebeam.scoring.reward_heads import save_head
        from tilebeam.training.fitting import fit, samples_of
        from tilebeam.training.head_report import markdown, report, write

        samples = samples_of(records, seed)
        with console.bar("fit") as bar:
            task = bar.add_task("", total=None, note="")
            fitted = fit(
                collection.states(),
                samples,
                names,
                maker_of(lm),
                lambda done, total: bar.update(task, completed=done, total=total),
            )
        fitted = replace(fitted, head=replace(fitted.head, layer=lm.info.hidden_layer))
        OwnReward(lm, fitted.head)  # it fits
        facts = report(fitted, samples, seed, about)
    save_head(out, fitted.head)
    files = [out, *write(facts, out.with_suffix(""))]
    if json_:
        print(json.dumps(facts, indent=2))
    else:
        console.print_markdown(markdown(facts))
    console.err().print(", ".join(map(str, files)), style="dim", soft_wrap=True)


app.command("train")(prepared(train))
app.command("adapter")(prepared(reward_adapter.train))
