"""`tilebeam score` rates texts with a reward model; `tilebeam reward-head` takes the head out of a published one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from tilebeam.cli import console
from tilebeam.cli.options import Json, RunOptions, grouped
from tilebeam.cli.reward_options import STEP_STOP_TEXT, RewardModelOptions, StepStop, open_scorer
from tilebeam.errors import TilebeamError
from tilebeam.model.load_options import LoadOptions
from tilebeam.prompt import Prompt
from tilebeam.scoring.reward_formats import preset_of
from tilebeam.scoring.scoring_defaults import HeadOutput
from tilebeam.text_files import json_lines, unescaped

if TYPE_CHECKING:
    from tilebeam.scoring.reward_model import RatedText


@grouped
def score(
    *,
    file: Annotated[
        Path, typer.Option("-f", "--file", help='A .jsonl file of {"prompt": .., "text": ..}.', show_default=False)
    ],
    reward_model: RewardModelOptions,
    step_stop: StepStop = STEP_STOP_TEXT,
    run: RunOptions,
    ctx_size: Annotated[
        int, typer.Option("-c", "--ctx-size", min=1, help="Tokens of the longest text.")
    ] = LoadOptions.n_ctx,
    json_: Json = False,
) -> None:
    """Rate texts with a reward model: the score of every step, and of the whole.

    Example: tilebeam score --prm Qwen2.5-Math-PRM-7B-Q8_0.gguf -f solutions.jsonl
    """
    from tilebeam.outputs import Usage

    spec = reward_model.read()
    if spec is None:
        raise TilebeamError("A reward model is required: give one, either with --prm or with --orm.")
    if spec.own:
        raise TilebeamError("A head on the generator's own hidden states rates what it writes, not texts of a file.")
    items = _texts(file)
    with (
        open_scorer(spec, step_stop=unescaped(step_stop), n_ctx=ctx_size, **run.arguments()) as scorer,
        scorer.session(),
    ):
        spent = Usage()
        with console.bar("score") as bar:
            task = bar.add_task("texts", total=len(items), note="")
            for item in items:
                rated = scorer.rate_text(Prompt(item["prompt"], question=item["prompt"]), item["text"])
                spent += rated.usage
                _show(item, rated, json_)
                bar.advance(task)
    console.err().print(
        f"{spent.scored_tokens} tokens decoded of {spent.full_scoring_tokens} in the texts, {spent.seconds:.2f} s",
        style="dim",
    )


def _texts(file: Path) -> list[dict[str, str]]:
    items = []
    for number, item in json_lines(file):
        if not isinstance(item, dict) or not all(isinstance(item.get(k), str) for k in ("prompt", "text")):
            raise TilebeamError(f'{file} line {number} must be an object with texts under "prompt" and "text".')
        items.append(item)
    if not items:
        raise TilebeamError(f"{file} holds no texts.")
    return items


def _show(item: dict[str, str], rated: RatedText, as_json: bool) -> None:
    if as_json:
        print(json.dumps(item | {"steps": rated.steps, "scores": rated.scores, "score": rated.score}), flush=True)
        return
    screen = console.out()
    screen.print(Text(item["prompt"], style="bold"), soft_wrap=True)
    for step, value in zip(rated.steps, rated.scores, strict=True):
        screen.print(Text(f"{value:9.4f}  {step.rstrip()}"), soft_wrap=True)
    screen.print(Text(f"{rated.score:9.4f}  (the whole)", style="bold"), soft_wrap=True)


def reward_head(
    source: Annotated[Path, typer.Argument(help="A Hugging Face folder, or one .safetensors file of it.")],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="The head's GGUF file; default: NAME.head.gguf.")
    ] = None,
    body: Annotated[
        Path | None, typer.Option("--body", help="Write the model without its head, too, to this new folder.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help='The head\'s name, such as "v_head.summary".')] = None,
    output: Annotated[
        HeadOutput | None,
        typer.Option("--output", help="What is made of its last layer; default: as its shape or preset suggests."),
    ] = None,
    preset: Annotated[
        str | None, typer.Option("--reward-preset", help="Format of the model's input; default: by its name.")
    ] = None,
    json_: Json = False,
) -> None:
    """Take the head out of a published reward model, for --reward-head.

    llama.cpp's converter knows neither the head nor the architecture's name. --body writes a copy of the folder that
    it can convert; the head goes beside the GGUF file that comes out, as MODEL.head.gguf.

    Example: tilebeam reward-head Skywork-o1-Open-PRM-Qwen-2.5-1.5B -o prm.head.gguf --body prm-body
    """
    from tilebeam.scoring.hf_reward_model import extract_head, write_body
    from tilebeam.scoring.reward_heads import save_head

    target = out or Path(f"{source.resolve().name.removesuffix('.safetensors')}.head.gguf")
    if target.suffix != ".gguf":
        raise TilebeamError(f"The head is written as a GGUF file: {target} should end in .gguf.")
    preset = preset or preset_of(source.resolve().name)
    head = extract_head(source, name=name, output=output, preset=preset)
    save_head(target, head)
    if body is not None:
        with console.bar("body") as bar:
            task = bar.add_task("", total=None, note="")
            write_body(source, body, lambda done, total: bar.update(task, completed=done, total=total))
    if json_:
        about = {"head": str(target), "layers": head.shape, "output": head.output, "preset": head.preset}
        print(json.dumps(about | {"body": str(body) if body else None}, indent=2))
        return
    screen = console.out()
    named = f", preset {head.preset}" if head.preset else ""
    screen.print(f"{target}: {head.shape}, {head.output}{named}", soft_wrap=True)
    if body is not None:
        screen.print(f"{body}: convert it with llama.cpp's convert_hf_to_gguf.py", soft_wrap=True)
