"""What `tilebeam generate`, `best-of-n` and `vote` do with their prompts, and how results look."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from tilebeam import console
from tilebeam.algorithm import SearchResult
from tilebeam.errors import TilebeamError
from tilebeam.extract import Extractor
from tilebeam.scorers import Scorer
from tilebeam.search import BestOfN, SelfConsistency

if TYPE_CHECKING:
    from tilebeam.lm import LM
    from tilebeam.outputs import CompletionOutput, Usage
    from tilebeam.sampling import SamplingParams

# --- prompts and options ----------------------------------------------------------------------------------------------


def one_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt of -p (with - for stdin) or -f.

    Raises:
        TilebeamError: none, both, an empty one, or a file that is not UTF-8 text.
    """
    if (prompt is None) == (file is None):
        raise TilebeamError("Give a prompt, either with -p or with -f.")
    text = prompt if prompt is not None else _read(file)
    if prompt == "-":
        text = sys.stdin.read()
    if not text:
        raise TilebeamError("The prompt is empty.")
    return text


def prompts(prompt: str | None, file: Path | None) -> list[str]:
    """One prompt, or those of a .jsonl file whose lines are {"prompt": ..} or strings.

    Raises:
        TilebeamError: as `one_prompt`; for a bad line, with its number.
    """
    if prompt is not None or file is None or file.suffix != ".jsonl":
        return [one_prompt(prompt, file)]
    found = []
    for number, line in enumerate(_read(file).splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except ValueError as error:
            raise TilebeamError(f"{file} line {number} is not JSON: {error}") from None
        text = item.get("prompt") if isinstance(item, dict) else item
        if not isinstance(text, str) or not text:
            raise TilebeamError(f'{file} line {number} has no text under "prompt".')
        found.append(text)
    if not found:
        raise TilebeamError(f"{file} holds no prompts.")
    return found


def _read(file: Path | None) -> str:
    assert file is not None
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise TilebeamError(f"{file} is not UTF-8 text.") from None


def wrap(lm: LM, prompt: str, chat: bool) -> str:
    """The prompt as it is, or in the model's chat template."""
    return lm.apply_chat_template([{"role": "user", "content": prompt}]) if chat else prompt


# --- the commands -----------------------------------------------------------------------------------------------------


def generate(lm: LM, prompt: str, params: SamplingParams, as_json: bool) -> None:
    """Draw samples and print them; a single one streams to a terminal or pipe as it grows."""
    if params.n == 1 and not as_json:
        print(prompt, end="", flush=True)
        with lm.stream(prompt, params) as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)
        print(flush=True)
        output = stream.output
    else:
        with console.generating("generate", params.n) as hook:
            [output] = lm.generate(prompt, params, progress=hook)
        if as_json:
            print(json.dumps(asdict(output) | {"device": lm.device}, indent=2))
        else:
            screen = console.out()
            for sample in output.outputs:
                screen.print(Rule(f"sample {sample.index}, seed {sample.seed}, {sample.finish_reason}", align="left"))
                screen.print(Text(sample.text))
    _account(output.usage, output.seed)


def best_of_n(
    lm: LM, prompts: Sequence[str], scorer: Scorer, budget: int, params: SamplingParams, as_json: bool
) -> None:
    """Search and print candidates, scores and the chosen one for every prompt."""
    with console.generating("best-of-n", budget * len(prompts)) as hook:
        results = BestOfN(scorer).infer(lm, prompts, budget, sampling=params, progress=hook)
    if as_json:
        _print_json([r.as_dict() for r in results])
    else:
        screen = console.out()
        for result in results:
            _show(screen, result, None)
    _account(_total(results), params.seed)


def vote(
    lm: LM, prompts: Sequence[str], extract: Extractor, budget: int, params: SamplingParams, as_json: bool
) -> None:
    """Vote and print candidates, their answers, the tally and the winner for every prompt."""
    with console.generating("vote", budget * len(prompts)) as hook:
        results = SelfConsistency(extract).infer(lm, prompts, budget, sampling=params, progress=hook)
    if as_json:
        _print_json([r.as_dict() for r in results])
    else:
        screen = console.out()
        for result in results:
            _show(screen, result, result.answers)
            tally = ", ".join(f"{answer} x{votes:g}" for answer, votes in result.votes.items())
            screen.print(Text.assemble(("answer: ", "bold"), (result.answer or "none", "bold green"), f"  ({tally})"))
    _account(_total(results), params.seed)


# --- output -----------------------------------------------------------------------------------------------------------


def _print_json(results: list[dict[str, Any]]) -> None:
    """One object for one prompt, a line of JSON each for several."""
    if len(results) == 1:
        print(json.dumps(results[0], indent=2))
    else:
        for result in results:
            print(json.dumps(result))


def _show(screen: Console, result: SearchResult, answers: Sequence[str | None] | None) -> None:
    table = Table(title=Text(_one_line(result.prompt, 90)), title_justify="left", title_style="bold", expand=True)
    table.add_column("#", justify="right", no_wrap=True)
    table.add_column("score" if answers is None else "answer", justify="right", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("end", no_wrap=True)
    table.add_column("text", ratio=1, overflow="fold")
    for i, candidate in enumerate(result.candidates):
        best = i == result.best_index
        value = f"{result.scores[i]:.3f}" if answers is None else (answers[i] or "-")
        table.add_row(
            f"{'>' if best else ' '}{i}",
            Text(_one_line(value, 20)),
            str(len(candidate.token_ids)),
            candidate.finish_reason,
            _visible(candidate),
            style="bold green" if best else None,
        )
    screen.print(table)


def _visible(candidate: CompletionOutput) -> Text:
    return Text(_one_line(candidate.text, 400))


def _one_line(text: str, limit: int) -> str:
    """The text's end matters in a prompt and its start in a sample; both are cut in the middle."""
    flat = " ".join(text.split())
    if len(flat) <= limit:
        return flat
    half = (limit - 3) // 2
    return f"{flat[:half]} … {flat[-half:]}"


def _total(results: Sequence[SearchResult]) -> Usage:
    from tilebeam.outputs import Usage

    return sum((r.usage for r in results), Usage())


def _account(usage: Usage, seed: int | None) -> None:
    tokens = f"{usage.prompt_tokens} prompt + {usage.completion_tokens} sampled tokens"
    speed = f", {usage.completion_tokens / usage.decode_seconds:.1f} t/s decode" if usage.decode_seconds > 0 else ""
    console.err().print(f"{tokens} in {usage.seconds:.2f} s{speed}, seed {seed}", style="dim")
