"""Prompts as commands take them: a text, a file, standard input, or a .jsonl file of many."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tilebeam.errors import TilebeamError
from tilebeam.text_files import json_lines, read_text

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


def wrap(lm: LM, prompt: str, chat: bool) -> str:
    """The prompt as it is, or in the model's chat template."""
    return lm.apply_chat_template([{"role": "user", "content": prompt}]) if chat else prompt
