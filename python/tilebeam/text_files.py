"""Prompts as commands take them: a text, a file, standard input, or a .jsonl file of many."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilebeam.errors import TilebeamError

if TYPE_CHECKING:
    from tilebeam.model.lm import LM


def one_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt of -p (with - for stdin) or -f.

    Raises:
        TilebeamError: none, both, an empty one, or a file that is not UTF-8 text.
    """
    if prompt is not None and file is None:
        text = sys.stdin.read() if prompt == "-" else prompt
    elif file is not None and prompt is None:
        text = read_text(file)
    else:
        raise TilebeamError("Give a prompt, either with -p or with -f.")
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
    for number, item in json_lines(file):
        text = item.get("prompt") if isinstance(item, dict) else item
        if not isinstance(text, str) or not text:
            raise TilebeamError(f'{file} line {number} has no text under "prompt".')
        found.append(text)
    if not found:
        raise TilebeamError(f"{file} holds no prompts.")
    return found


def read_text(file: Path) -> str:
    """A file's text.

    Raises:
        TilebeamError: it is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise TilebeamError(f"{file} is not UTF-8 text.") from None


def json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """The values of a .jsonl file and the numbers of their lines, from 1; empty lines are left out.

    Raises:
        TilebeamError: the file is not UTF-8, or a line is not JSON.
    """
    for number, line in enumerate(read_text(file).split("\n"), 1):  # not splitlines: JSON may hold U+2028
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TilebeamError(f"{file} line {number} is not JSON: {error}.") from None


def wrap(lm: LM, prompt: str, chat: bool) -> str:
    """The prompt as it is, or in the model's chat template."""
    return lm.apply_chat_template([{"role": "user", "content": prompt}]) if chat else prompt


def unescaped(text: str) -> str:
    """A text with its ``\\n`` and ``\\t`` made line breaks and tabs."""
    return text.replace("\\n", "\n").replace("\\t", "\t")
