"""`tilebeam generate`: samples for prompts."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from itertools import chain
from typing import TYPE_CHECKING

from tilebeam.cli import batch, console
from tilebeam.cli.options import Json, ModelOptions, PromptOptions, SamplingOptions, grouped, option, tell_thoughtless
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
    to_file: batch.BatchOptions,
    n_samples: int = option(1, "-N", "--n-samples", min=1, help="Samples per prompt."),
    display_prompt: bool | None = option(
        None,
        "--display-prompt/--no-display-prompt",
        help="Print the prompt before its text; default: on a terminal, without the chat template.",
        show_default=False,
    ),
    json_: Json = False,
) -> None:
    """Generate text: one sample streams as it is written, several come as they are complete.

    Example: tilebeam generate -m model.gguf -p "Why is the sky blue?" -N 4 -n 64
    """
    from tilebeam.cli import search_view

    texts = what.read()
    to_file.check()
    params = drawing.params(n_samples, what.escape)
    total = n_samples * len(texts)
    with model.load(total) as lm:
        chat = what.chats(lm)
        prompts = [wrap(lm, text, chat) for text in texts]
        tell_thoughtless(params, lm.chat_template)
        params = drawing.fitted(params, lm, prompts, n_samples)
        echo = sys.stdout.isatty() and not chat if display_prompt is None else display_prompt
        if to_file.out is not None:
            batch.write(to_file, lm, texts, prompts, params, lm.completed)
            return
        if total == 1 and not json_:
            outputs = [_streamed(lm, prompts[0], params, echo)]
        else:
            with console.generating("generate", total) as hook:
                outputs = lm.generate(prompts, params, progress=hook)
            for prompt, output in zip(prompts, outputs, strict=True):
                if json_:
                    print(json.dumps(output.as_dict() | {"device": lm.device}, indent=2 if len(outputs) == 1 else None))
                else:
                    _samples(output, prompt.asked if echo or len(outputs) > 1 else None)
        search_view.account([output.usage for output in outputs], params.seed)
        search_view.tell_cut("samples", [c for output in outputs for c in output.outputs], params, lm)


def _streamed(lm: LM, prompt: Prompt, params: SamplingParams, echo: bool) -> RequestOutput:
    """Print a prompt, if it is to be shown, and its one sample while that grows."""
    notes = console.err()
    with lm.stream(prompt, params) as stream:
        with notes.status("reading the prompt") if notes.is_terminal else nullcontext():
            first = next(stream, None)
        print(prompt.asked if echo else "", end="", flush=True)
        for delta in chain([first] if first else [], stream):
            print(delta.text, end="", flush=True)
    print(flush=True)
    return stream.output


def _samples(output: RequestOutput, title: str | None) -> None:
    """Print complete samples, under their question where there is a title."""
    from rich.rule import Rule
    from rich.text import Text

    from tilebeam.cli.search_view import one_line

    screen = console.out()
    if title is not None:
        screen.print(Text(one_line(title, 90), style="bold"))
    for sample in output.outputs:
        screen.print(Rule(f"sample {sample.index}, seed {sample.seed}, {sample.finish_reason}", align="left"))
        print(sample.text, flush=True)
