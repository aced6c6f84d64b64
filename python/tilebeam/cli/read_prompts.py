"""Prompts as commands take them: a text, a file, standard input, or a .jsonl file of many."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tilebeam.errors import TilebeamError
from tilebeam.prompt import Prompt
from tilebeam.text_files import json_lines, read_text, unescaped

if TYPE_CHECKING:
    from tilebeam.model.lm import LM


def prompts(prompt: str | None, file: Path | None, escape: bool) -> list[str]:
    """Read the prompt of -p (with - for stdin), the text of a file, or the prompts of a .jsonl file, whose lines are
    {"prompt": ..} or strings.

    Args:
        escape: expand escapes in what was typed after -p. Files and stdin are taken as they are, without a byte
            order mark.

    Raises:
        TilebeamError: none, both, an empty one, or a file that is not UTF-8 text; for a bad line, with its number.
    """
    if (prompt is None) == (file is None):
        raise TilebeamError("Give a prompt, either with -p or with -f.")
    if file is not None and file.suffix == ".jsonl":
        return _lines(file)
    if file is not None:
        text = read_text(file)
    elif prompt == "-":
        text = sys.stdin.read().removeprefix("\ufeff")
    else:
        assert prompt is not None
        text = unescaped(prompt) if escape else prompt
    if not text:
        raise TilebeamError("The prompt is empty.")
    return [text]


def _lines(file: Path) -> list[str]:
    found = []
    for number, item in json_lines(file):
        text = item.get("prompt") if isinstance(item, dict) else item
        if not isinstance(text, str) or not text:
            raise TilebeamError(f'{file} line {number} has no text under "prompt".')
        found.append(text)
    if not found:
        raise TilebeamError(f"{file} holds no prompts.")
    return found


def wrap(lm: LM, prompt: str, chat: bool) -> Prompt:
    """Make a prompt of a text as it is, or in the model's chat template."""
    return lm.chat_prompt([{"role": "user", "content": prompt}]) if chat else Prompt(prompt)
