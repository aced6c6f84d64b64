"""`tilebeam generate`: samples for prompts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from tilebeam.cli import console
from tilebeam.cli.options import Json, ModelOptions, PromptOptions, SamplingOptions, grouped
from tilebeam.cli.read_prompts import wrap

if TYPE_CHECKING:
    from tilebeam.model.lm import LM
    from tilebeam.outputs import RequestOutput
    from tilebeam.prompt import Prompt
    from tilebeam.sampling_params import SamplingParams


@grouped
def generate(
    model: ModelOptions,
    drawing: SamplingOptions,
    what: PromptOptions,
    n_samples: Annotated[int, typer.Option("-N", "--n-samples", min=1, help="Samples per prompt.")] = 1,
    json_: Json = False,
) -> None:
    """Generate text: one sample streams as it is written, several come as they are complete.

    Example: tilebeam generate -m model.gguf -p "Once upon a time" -N 4 -n 64
    """
    texts = what.read()
    params = drawing.params(n_samples, what.escape)
    total = n_samples * len(texts)
    with model.load(total) as lm:
        prompts = [wrap(lm, text, what.chat) for text in texts]
        if total == 1 and not json_:
            outputs = [_streamed(lm, prompts[0], params)]
        else:
            with console.generating("generate", total) as hook:
                outputs = lm.generate(prompts, params, progress=hook)
            for output in outputs:
                if json_:
                    print(json.dumps(output.as_dict() | {"device": lm.device}, indent=2 if len(outputs) == 1 else None))
                else:
                    _samples(output, titled=len(outputs) > 1)
    from tilebeam.cli import search_view

    search_view.account([output.usage for output in outputs], params.seed)


def _streamed(lm: LM, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    """Print a prompt and its one sample while that grows."""
    print(prompt.text, end="", flush=True)
    with lm.stream(prompt, params) as stream:
        for delta in stream:
            print(delta.text, end="", flush=True)
    print(flush=True)
    return stream.output


def _samples(output: RequestOutput, titled: bool) -> None:
    """Print complete samples, under their prompt where there are several."""
    from rich.rule import Rule
    from rich.text import Text

    from tilebeam.cli.search_view import one_line

    screen = console.out()
    if titled:
        screen.print(Text(one_line(output.prompt, 90), style="bold"))
    for sample in output.outputs:
        screen.print(Rule(f"sample {sample.index}, seed {sample.seed}, {sample.finish_reason}", align="left"))
        screen.print(Text(sample.text))
