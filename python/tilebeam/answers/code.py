"""Programs out of texts: what a model wrote to a question that is the beginning of a program.

A chat answers with blocks between fences, a base model goes on where the question ends; both become one program. The
question's docstring often holds examples, which anybody can check.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

_FENCE = re.compile(r"^[ \t]*(?:```|~~~)[ \t]*([\w+#.-]*)[^\n]*$", re.MULTILINE)
_PYTHON = re.compile(r"```(?:python|py)[ \t]*\n(.*?)```(\s*\Z)?", re.DOTALL)
_STATEMENT = re.compile(r"^(?:from\s+[\w.]+\s+import\b|import\s|def\s|async\s+def\s|class\s|@\w)", re.MULTILINE)


@dataclass(frozen=True)
class Question:
    """A program's beginning, up to the docstring of the function that is asked for.

    Attributes:
        source: all of it.
        function: the name of the function.
    """

    source: str
    function: str

    @property
    def before(self) -> str:
        """The text before the function: imports and helpers."""
        found = list(_defines(self.function).finditer(self.source))
        return self.source[: found[-1].start()] if found else ""


def question_of(prompt: str) -> Question | None:
    """Find the question in a prompt, which may be a chat or begin with other text: the last function of the last block,
    or of the text itself. None if it holds no function."""
    for source in [*reversed(blocks(prompt)), prompt]:
        begin = _STATEMENT.search(source)
        names = re.findall(r"^(?:async\s+)?def\s+(\w+)", source, re.MULTILINE)
        if begin and names:
            return Question(_parsable(source[begin.start() :], names[-1]) or source[begin.start() :], names[-1])
    return None


def blocks(text: str) -> list[str]:
    """Find the blocks between fences; the last one may be without its end."""
    found: list[str] = []
    opened: int | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence.end() + 1
        elif not fence[1]:
            found.append(text[opened : fence.start()])
            opened = None
    return found if opened is None else [*found, text[opened:]]


def python_blocks(text: str) -> list[str]:
    """Find the closed blocks that say that they are Python."""
    return [block for block, _ in _PYTHON.findall(text)]


def ends_in_python(text: str) -> bool:
    """Tell whether a text ends with such a block."""
    return any(found[2] is not None for found in _PYTHON.finditer(text))


def program_of(question: Question, text: str) -> str:
    """Join a question and an answer to a program.

    Of several blocks the first that defines the function counts. Text without blocks goes on where the question ends,
    unless it defines the function anew. What follows a program and is none is cut off.
    """
    function, found = question.function, blocks(text)
    whole = next((block for block in [*found, text] if _defines(function).search(block)), None)
    if whole is not None:
        begin = _STATEMENT.search(whole)
        at_once = _parsable(question.before + whole, function)
        source = at_once or question.before + whole[begin.start() if begin else 0 :]
    elif found:
        body = found[0].strip("\n")
        indented = body.startswith((" ", "\t"))
        source = question.source + (body if indented else "".join(f"    {line}\n" for line in body.splitlines()))
    else:
        source = question.source + text
    return _parsable(source, function) or source


def code(text: str) -> str | None:
    """Extract an answer's code without its comments and layout, so that equal programs are equal texts: the first
    block, or the text itself."""
    found = next(iter(blocks(text)), text)
    try:
        return ast.unparse(ast.parse(found)).strip() or None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "\n".join(line.rstrip() for line in found.strip("\n").splitlines() if line.strip()) or None


def _defines(function: str) -> re.Pattern[str]:
    return re.compile(rf"^(?:async\s+)?def\s+{re.escape(function)}\b", re.MULTILINE)


def _parsable(source: str, function: str) -> str | None:
    """Find the longest beginning, by lines, that is a program and defines the function; None if none does."""
    lines = source.splitlines(keepends=True)
    for end in range(len(lines), 0, -1):
        beginning = "".join(lines[:end])
        try:
            ast.parse(beginning)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        return beginning if _defines(function).search(beginning) else None
    return None
