"""Prompts as commands take them: a text, a file, standard input, or a .jsonl file of many."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tilebeam.errors import TilebeamError
from tilebeam.evaluation.question_files import UserQuestion, question_of
from tilebeam.prompt import Prompt
from tilebeam.text_files import json_lines, read_text, unescaped

if TYPE_CHECKING:
    from tilebeam.model.lm import LM


def prompts(prompt: str | None, file: Path | None, escape: bool, field: str | None = None) -> list[UserQuestion]:
    """Read the prompt of -p (with - for stdin), the text of a file, or the questions of a .jsonl file.

    Args:
        escape: expand escapes in what was typed after -p. Files and stdin are taken as they are, without a byte
            order mark.
        field: see `tilebeam.evaluation.question_files.question_of`.

    Raises:
        TilebeamError: none, both, an empty one, or a file that is not UTF-8 text; for a bad line, with its number.
    """
    if (prompt is None) == (file is None):
        raise TilebeamError("Give a prompt, either with -p or with -f.")
    if file is not None and file.name.removesuffix(".gz").endswith(".jsonl"):
        found = [question_of(line, f"{file} line {number}", number, field) for number, line in json_lines(file)]
        if not found:
            raise TilebeamError(f"{file} holds no prompts.")
        return found
    if field is not None:
        raise TilebeamError("--field matters only for a .jsonl file.")
    if file is not None:
        text = read_text(file)
    elif prompt == "-":
        text = sys.stdin.read().removeprefix("\ufeff")
    else:
        assert prompt is not None
        text = unescaped(prompt) if escape else prompt
    if not text:
        raise TilebeamError("The prompt is empty.")
    return [UserQuestion(text)]


def wrap(lm: LM, question: UserQuestion, chat: bool) -> Prompt:
    """Make a prompt of a question as it is, or in the model's chat template."""
    return lm.chat_prompt(question.messages) if chat else Prompt(question.alone)
