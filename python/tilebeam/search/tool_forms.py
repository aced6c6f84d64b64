"""How a model is asked for programs that are to be run: a block of Python, and behind it the mark of an output.

Models with Qwen's templates, which were trained on it, are asked by the system prompt; to all others the first message
explains it in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MARK = "```output"
# The words that Qwen2.5-Math was trained with, and its kin understand.
SYSTEM = (
    "Please integrate natural language reasoning with programs to solve the problem above, and put your final answer "
    "within \\boxed{}."
)
_IN_WORDS = (
    "Solve problems by reasoning in words, and compute with Python: write a block between ```python and ``` that "
    "prints what you need, then ```output, behind which you will see what it prints. Put your final answer within "
    "\\boxed{}."
)
# With it Qwen's models write programs in twice as many samples, and no more right answers (docs/search.md).
_EXAMPLE = (
    "A ticket costs 12 dollars for adults and half of that for children. How much do 3 adults and 4 children pay?",
    "A child pays half of 12 dollars. I add up both groups with a program.\n"
    "```python\nadult = 12\nchild = adult / 2\ntotal = 3 * adult + 4 * child\nprint(total)\n```\n"
    "```output\n60.0\n```\n"
    "Together they pay \\boxed{60} dollars.",
)
# A chat template that holds all texts of one of these is of a model that the system prompt suffices for.
_KNOWS = (
    ("<|im_start|>", "<tool_call>"),
    ("Please reason step by step, and put your final answer within",),  # Qwen2.5-Math
)


def needs_words(template: str | None) -> bool:
    """Tell whether a model with this chat template has to be told in words how programs are written."""
    return not any(all(mark in (template or "") for mark in marks) for marks in _KNOWS)


def conversation(
    question: str, *, example: bool | Sequence[Mapping[str, Any]] | None = None, words: bool = False
) -> list[dict[str, Any]]:
    """Return the messages that ask a question so that a model writes programs.

    Args:
        question: of the user.
        example: show one worked example in front, or these turns. None: one where `words` explain.
        words: explain in the first message instead of the system prompt; see `needs_words`.
    """
    shots = [dict(turn) for turn in example] if isinstance(example, Sequence) else []
    if example is True or (example is None and words):
        shots = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), _EXAMPLE, strict=True)]
    first, *others = [*shots, {"role": "user", "content": question}]
    if not words:
        return [{"role": "system", "content": SYSTEM}, first, *others]
    return [first | {"content": f"{_IN_WORDS}\n\n{first['content']}"}, *others]


def beginning(template: str | None) -> list[dict[str, Any]]:
    """Return the messages before a conversation under which a model with this template writes programs."""
    return conversation("", words=needs_words(template))[:-1]
