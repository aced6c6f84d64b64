"""`tilebeam draft train`: a draft head, which guesses a model's next tokens from its hidden states."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilebeam.cli import console
from tilebeam.cli.commands import Command, prepared
from tilebeam.cli.options import CtxSize, Json, Model, RunOptions, Sequences, check_gguf, grouped, option
from tilebeam.errors import TilebeamError
from tilebeam.evaluation.task_options import TaskOptions
from tilebeam.extras import pytorch
from tilebeam.folder_lock import alone_in
from tilebeam.gguf.help_text import App
from tilebeam.model.load_options import LoadOptions, default_threads

if TYPE_CHECKING:
    from tilebeam.model.lm import LM
    from tilebeam.training.draft_fit import Fit, ModelWeights

_fit_option = partial(option, rich_help_panel="Fit")

app = App(Command, name="draft", help="Train a draft head, which makes one sequence faster.", no_args_is_help=True)


@dataclass(frozen=True, kw_only=True)
class DraftTextOptions:
    """What the model writes for the head to learn from."""

    text: list[Path] | None = option(
        None,
        "--text",
        metavar="FILE",
        help="Prompts: a text file with one a line, or .jsonl with a prompt, question, problem or messages a line; "
        "repeatable. They go through the model's chat template if it has one.",
    )
    task: list[str] | None = option(
        None, "--task", help="Problems, as in tilebeam eval: gsm8k:FILE, jsonl:FILE ..; repeatable."
    )
    items: int | None = option(None, min=1, help="The first N prompts of each file; default: all.")
    n_predict: int = option(256, "-n", "--n-predict", min=16, help="Most tokens of a text.")
    temp: float = option(0.7, "--temp", min=0.0, help="Temperature of every second text; the others are greedy.")
    seed: int = option(1, "-s", "--seed", min=0, help="Of the texts and of the fit.")

    def prompts(self, lm: LM) -> list[list[int]]:
        """Read and make the prompts, those of all files in turn, so that held-out ones are of each; return the tokens
        of those that fit into the context."""
        from itertools import chain, zip_longest

        from tilebeam.evaluation.question_files import question_of
        from tilebeam.evaluation.tasks import open_task
        from tilebeam.prompt import Prompt
        from tilebeam.text_files import json_lines, read_text

        chats, files = lm.chat_template is not None, list[list[Prompt]]()
        for path in self.text or []:
            jsonl = path.name.removesuffix(".gz").endswith(".jsonl")
            lines = json_lines(path) if jsonl else enumerate(read_text(path).split("\n"), 1)
            asked = [question_of(line, f"{path} line {n}", n) for n, line in lines if jsonl or line]
            files.append([lm.chat_prompt(q.messages) if chats else Prompt(q.alone) for q in asked[: self.items]])
        for spec in self.task or []:
            task = open_task(TaskOptions(spec, items=self.items))
            files.append([task.prompt(item, lm) for item in task.items])
        all_ = [prompt.tokens(lm) for prompt in chain.from_iterable(zip_longest(*files)) if prompt is not None]
        if not all_:
            raise TilebeamError("Give prompts, with --text FILE or --task KIND:FILE.")
        found = [tokens for tokens in all_ if len(tokens) + self.n_predict <= lm.n_ctx]
        if left := len(all_) - len(found):
            why = f"with the {self.n_predict} tokens of -n they need more than the {lm.n_ctx} of -c"
            console.err().print(f"{left} of {len(all_)} prompts are left out: {why}.")
        return found


@grouped
def train(
    *,
    model: Model,
    run: RunOptions,
    ctx_size: CtxSize = LoadOptions.n_ctx,
    parallel: Sequences = LoadOptions.n_seq_max,
    texts: DraftTextOptions,
    out: Annotated[Path, typer.Option("-o", "--out", help="The head's GGUF file.")],
    work: Path | None = option(
        None, help="Folder of texts and checkpoint, for a run to go on from; default: OUT.work."
    ),
    minutes: float = _fit_option(60.0, min=0.01, help="How long the head is trained, over all runs."),
    vocab: int = _fit_option(8192, min=32, help="Tokens that it guesses: those that the texts have most often."),
    n_ff: int = _fit_option(2048, "--ff", min=32, help="Width of its feed-forward part; a multiple of 32."),
    json_: Json = False,
) -> None:
    """Train a draft head: one layer that reads a model's hidden states and guesses its next tokens, several ahead.

    The model first writes texts for the prompts, half of them greedily; its hidden states are kept, 6 to 25 KB a token
    in the work folder. Then the head is fitted with PyTorch (pip install torch), on the CPU, which nothing else should
    use. Give prompts like those that will be asked: a thousand are a beginning, ten thousand are better; -np 32 -c
    16384 writes 32 texts at a time. If a run is killed or interrupted, the same command goes on; with more --minutes
    it trains a finished head further. Every 25th text is held out, and the report says how many guessed tokens of
    those are right.

    The head is for this model, whatever the types of its file: load it with -md head.gguf, or
    tilebeam.load("model.gguf", draft="head.gguf").

    Example: tilebeam draft train -m model.gguf --task gsm8k:train.jsonl --text questions.txt --minutes 120 -o head.gguf
    """
    torch = pytorch("Draft heads")
    from tilebeam.training.draft_fit import ModelWeights, keep_memory

    check_gguf(out, "head")
    if n_ff % 32:
        raise TilebeamError(f"--ff {n_ff} is no multiple of 32.")
    folder = work or out.with_suffix(".work")
    weights = ModelWeights(model, n_ff)
    folder.mkdir(parents=True, exist_ok=True)
    taken = TilebeamError(f"Another tilebeam draft train works in {folder}: wait for it, or use another --work.")
    try:
        with alone_in(folder, taken):
            loading = {"n_ctx": ctx_size, "n_seq_max": parallel, **run.arguments()}
            _collect(model, loading, texts, weights, folder)
            torch.set_num_threads(run.threads or default_threads())
            keep_memory()
            fit = _fit(weights, folder, vocab, minutes, texts.seed)
    except KeyboardInterrupt:
        console.err().print(f"Interrupted. What is done is in {folder}; run the command again.")
        raise typer.Exit(130) from None
    fit.write(out)
    _report(fit, out, json_)


app.command("train")(prepared(train))


def _collect(
    model: Path, loading: dict[str, Any], texts: DraftTextOptions, weights: ModelWeights, folder: Path
) -> None:
    """Have the model write the texts. It is loaded with a head that nobody trained: so it has a tap of the layers, and
    what cannot have a head is refused before the work."""
    from tilebeam.gguf.fingerprint import fingerprint
    from tilebeam.model.loader import load
    from tilebeam.training.draft_fit import write_untrained
    from tilebeam.training.draft_texts import TextSetting, collect

    untrained = folder / "untrained.gguf"
    write_untrained(untrained, weights)
    with load(model, draft=untrained, **loading) as lm:
        console.err().print(console.about(lm), style="dim")
        prompts = texts.prompts(lm)
        named = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
        setting = TextSetting(fingerprint(model), named, weights.layers, texts.n_predict, texts.temp, texts.seed)
        with console.bar("texts") as bar:
            task = bar.add_task("", total=len(prompts), note="")
            collect(lm, prompts, folder, setting, lambda n: bar.advance(task, n))


def _fit(weights: ModelWeights, folder: Path, vocab: int, minutes: float, seed: int) -> Fit:
    from tilebeam.training.draft_fit import Fit
    from tilebeam.training.draft_texts import texts_of

    fit = Fit(weights, texts_of(folder), vocab, folder / "checkpoint.pt", seed)
    told = [time.monotonic()] * 2

    def progress(loss: float, hits: list[float]) -> None:
        now = time.monotonic()
        if now - told[0] >= 10:
            told[0] = now
            right = " ".join(f"{hit:.2f}" for hit in hits)
            line = (
                f"{fit.seconds / 60:.1f} of {minutes:g} min, step {fit.steps}: loss {loss:.2f}, right by depth {right}"
            )
            console.err().print(line, style="dim")
        if now - told[1] >= max(60, 3 * minutes):  # a twentieth of the time
            told[1] = now
            console.err().print(_held_out(*fit.judge()))

    fit.run(60 * minutes, progress)
    return fit


def _held_out(right: list[float], accepted: float) -> str:
    shares = ", ".join(f"{share:.0%}" for share in right)
    return (
        f"held-out texts: {accepted:.2f} of {len(right)} guesses accepted a step (right, behind right ones: {shares})"
    )


def _report(fit: Fit, out: Path, as_json: bool) -> None:
    """Say what the head does on held-out texts."""
    right, accepted = fit.judge()
    facts: dict[str, Any] = {
        "head": str(out),
        "minutes": round(fit.seconds / 60, 2),
        "steps": fit.steps,
        "held_out_tokens": fit.held,
        "vocabulary": len(fit.tokens),
        "coverage": round(fit.coverage, 4),
        "right_by_depth": [round(share, 4) for share in right],
        "accepted": round(accepted, 3),
    }
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    print(
        f"{out}: {out.stat().st_size / 1e6:.1f} MB, {fit.seconds / 60:.1f} minutes, {fit.steps} steps\n"
        f"{_held_out(right, accepted)}\n"
        f"{fit.held} tokens held out, of which {fit.coverage:.1%} are among the {len(fit.tokens)} that it guesses"
    )
