"""`tilebeam reward adapter`: a LoRA adapter with which a model rates its own texts."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from tilebeam.cli import console
from tilebeam.cli.options import Json, ModelOptions, check_gguf, grouped, option
from tilebeam.cli.reward_samples import SampleOptions, collected
from tilebeam.errors import TilebeamError
from tilebeam.extras import pytorch
from tilebeam.model.load_options import default_threads

if TYPE_CHECKING:
    from tilebeam.evaluation.log import Record
    from tilebeam.evaluation.tasks.task import Task
    from tilebeam.model.lm import LM
    from tilebeam.training.adapter_fit import AdapterFit, Problem
    from tilebeam.training.fitting import Samples

_fit_option = partial(option, rich_help_panel="Fit")


@grouped
def train(
    *,
    model: ModelOptions,
    problems: SampleOptions,
    out: Annotated[Path, typer.Option("-o", "--out", help="The adapter's GGUF file.")],
    epochs: int = _fit_option(3, min=1, help="How often it learns from each problem."),
    json_: Json = False,
) -> None:
    """Train a reward adapter: LoRA in a model's upper layers, with which it tells its right samples from wrong ones.

    The model reads each sample once again with it, from the same weights in memory. Train a reward head first, which
    costs nothing to use: an adapter wants many problems to be better. Samples are collected as by `reward train`, and
    shared with it (--data). Then PyTorch (pip install torch) fits the adapter on the CPU, which nothing else should
    use: a quarter of an hour per 100 problems with a model of 0.5 B on two cores with AMX. If a run is killed or
    interrupted, the same command resumes it. A fifth of the problems is held out, and the report tells how well their
    samples are rated.

    Give the adapter to best-of-n, vote, beam, dvts, adaptive, eval or serve with --reward-head.

    Example: tilebeam reward adapter -m model.gguf --task gsm8k:train.jsonl --items 240 -o adapter.gguf
    """
    from tilebeam.scoring.own_reward import maker_of

    torch = pytorch("Reward adapters")
    from tilebeam.training.adapter_fit import AdapterFit, ModelBody

    check_gguf(out, "adapter")
    if model.lora.adapters():
        raise TilebeamError("A reward adapter is trained for a model without other LoRA adapters.")
    torch.set_num_threads(model.run.threads or default_threads())
    torch.set_flush_denormal(True)  # of attention most shares are that small, and slow; threads made later take it over
    body = ModelBody(model.model)
    with collected(model, problems, out.with_suffix(""), None) as (lm, task, _, records, about):
        texts, maker = _texts(lm, task, records), maker_of(lm)
    from tilebeam.training.fitting import samples_of

    samples = samples_of(records, problems.seed)
    held = [samples.fold[samples.problem == i][0] == 0 for i in range(len(records))]
    fit = AdapterFit(body, texts, held, out.with_suffix(""), problems.seed)
    try:
        facts, stretch, move = _fit(fit, samples, held, epochs, problems.seed)
    except KeyboardInterrupt:
        console.err().print("Interrupted. What is done is kept; run the command again.")
        raise typer.Exit(130) from None
    fit.write(out, maker, stretch, move)
    fit.clean()
    if json_:
        print(json.dumps(about | facts, indent=2))
        return
    from tilebeam.evaluation import ranking

    lines = [f"Rated: {facts['samples']} samples of {facts['problems']} problems that it did not learn from.", ""]
    console.print_markdown([*lines, *ranking.table(facts["auroc"])])
    console.err().print(str(out), style="dim", soft_wrap=True)


def _texts(lm: LM, task: Task, records: list[Record]) -> list[Problem]:
    """Return problems as the model reads them."""
    from tilebeam.training.adapter_fit import Problem

    prompts = {item.id: task.prompt(item, lm).tokens(lm) for item in task.items}
    return [
        Problem(
            prompts[record["unit"]],
            [lm.tokenize(s["text"], add_special=False, parse_special=False) for s in record["samples"]],
            [float(s["correct"]) for s in record["samples"]],
        )
        for record in records
    ]


def _fit(
    fit: AdapterFit, samples: Samples, held: list[bool], epochs: int, seed: int
) -> tuple[dict[str, Any], float, float]:
    """Train; return the facts of the report, and what makes probabilities of logits; `seed`: of the intervals."""
    from tilebeam.evaluation import ranking
    from tilebeam.scoring.reward_heads import sigmoid
    from tilebeam.training.fitting import platt

    with console.bar("fit") as bar:
        read = bar.add_task("lower layers", total=None, note="")
        fit.read(lambda done, total: bar.update(read, completed=done, total=total))
        task = bar.add_task("epochs", total=None, note="")
        fit.run(epochs, lambda n, total, loss: bar.update(task, completed=n, total=total, note=f"loss {loss:.2f}"))
        asked = [i for i, out in enumerate(held) if out]
        task = bar.add_task("report", total=len(asked), note="")
        logits = list[float]()
        for i in asked:
            logits += fit.judge(i)
            bar.advance(task)
    chosen = np.isin(samples.problem, asked)
    stretch, move = platt(np.array(logits), samples.correct[chosen])
    those = [r for r, c in zip(samples.records, chosen, strict=True) if c]
    rivals = {
        "the adapter": sigmoid(stretch * np.array(logits) + move),
        "log-probability": np.array([r["logprob"] for r in those]),
        "shortness": -np.array([r["tokens"] for r in those], np.float64),
    }
    right, problem = samples.correct[chosen] >= 0.5, samples.problem[chosen]
    whole = np.array([r["finish"] == "stop" for r in those])
    auroc = {name: ranking.figures(s, right, problem, whole, seed) for name, s in rivals.items()}
    return {"problems": len(asked), "samples": len(those), "auroc": auroc}, stretch, move
