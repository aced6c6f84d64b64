"""`tilebeam reward-head`: takes the head out of a published reward model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tilebeam.cli import console
from tilebeam.cli.options import Json, check_gguf
from tilebeam.scoring.reward_formats import preset_of
from tilebeam.scoring.scoring_defaults import HeadOutput


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
    check_gguf(target, "head")
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
