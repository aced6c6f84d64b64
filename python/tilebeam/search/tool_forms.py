"""How families of models write programs that are to be run, and read what these print, as data.

Models that were trained on tool-integrated reasoning write a block of Python and behind it the mark of an output. Those
that were trained to call functions call one named python, or write Python behind a mark of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilebeam.chat.answer_parts import calls_in, reasoning_in, text_in
from tilebeam.chat.answer_reader import AnswerReader
from tilebeam.chat.thoughts import CHANNELS, Marks, Thinking, texts_of
from tilebeam.chat.tool_families import FAMILIES
from tilebeam.chat.tools import Tool, ToolUse

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
# Without an example fewer than half of the samples write a program.
_EXAMPLE = (
    "A ticket costs 12 dollars for adults and half of that for children. How much do 3 adults and 4 children pay?",
    "A child pays half of 12 dollars. I add up both groups with a program.\n"
    "```python\nadult = 12\nchild = adult / 2\ntotal = 3 * adult + 4 * child\nprint(total)\n```\n"
    "```output\n60.0\n```\n"
    "Together they pay \\boxed{60} dollars.",
)
_CODE = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
PYTHON = Tool("python", "Runs a Python program, whose variables are kept, and returns what it prints.", _CODE)


@dataclass(frozen=True)
class ToolForm:
    """One way of having programs run.

    Attributes:
        name: of the way.
        told_by: a chat template that holds all of these is of this form.
        system: what asks for programs; "": the words before the first question do, which every template takes.
        calls: the family of `tilebeam.chat.tool_families` whose call of python is a program; "": blocks with `MARK`.
        thinking: marks around thoughts, where calls stand beside them.
        opens: behind this all is a program, where it is no call.
        before, after: the family's own text around an output that a call is answered with.
        quoted: such an output is JSON.
    """

    name: str
    told_by: tuple[str, ...] = ()
    system: str = SYSTEM
    calls: str = ""
    thinking: Marks | None = None
    opens: str = ""
    before: str = ""
    after: str = ""
    quoted: bool = False

    @property
    def told(self) -> dict[str, Any]:
        """Arguments of `LM.chat_prompt` besides the messages: functions that the template is to tell of."""
        return {"tools": [PYTHON]} if self.calls and not self.opens else {}

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts whose control tokens have to be seen."""
        return (*FAMILIES[self.calls].marks, *texts_of(self.thinking)) if self.calls else ()

    def program(self, text: str) -> tuple[str, str] | None:
        """Find the call in a complete text: the text without it, and its program. None: it calls nothing."""
        if not self.calls:
            return None
        thinking = None if self.thinking is None else Thinking(self.thinking, opened=False)
        parts, _ = AnswerReader(ToolUse(FAMILIES[self.calls], [PYTHON], False, False), thinking).take(text, "stop")
        if calls := calls_in(parts):
            said = (reasoning_in(parts) + text_in(parts)).strip()
            try:
                return said, str(json.loads(calls[0].arguments)["code"])
            except (ValueError, KeyError, TypeError, RecursionError):
                return said, "raise ValueError('The call has no argument \"code\".')"
        words, opened, code = text.partition(self.opens) if self.opens else (text, "", "")
        return (words.strip(), code) if opened else None


OUTPUT = ToolForm("output", ("<|im_start|>", "<tool_call>"))
# In the order in which a template is compared with them.
FORMS = (
    ToolForm(
        "gpt-oss",
        ("<|channel|>", "functions."),
        calls="gpt-oss",
        thinking=CHANNELS,
        before="<|start|>functions.python to=assistant<|channel|>commentary<|message|>",
        after="<|end|><|start|>assistant",
        quoted=True,
    ),
    ToolForm(
        "llama",
        ("<|start_header_id|>", "Environment: ipython"),
        system=f"Environment: ipython\n\n{SYSTEM}",
        calls="llama",
        opens="<|python_tag|>",
        before="<|start_header_id|>ipython<|end_header_id|>\n\n",
        after="<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        quoted=True,
    ),
    ToolForm(
        "mistral-json",
        ("[TOOL_CALLS]", '[TOOL_RESULTS]{"content": '),
        calls="mistral",
        before='[TOOL_RESULTS]{"content": ',
        after=', "call_id": "python000"}[/TOOL_RESULTS]',
    ),
    ToolForm("mistral", ("[TOOL_CALLS]",), calls="mistral", before="[TOOL_RESULTS]", after="[/TOOL_RESULTS]"),
    OUTPUT,
    ToolForm("output", ("Please reason step by step, and put your final answer within",)),  # Qwen2.5-Math
    ToolForm("few-shot", system=""),
)


def form_of(template: str | None) -> ToolForm:
    """Return the form that a chat template tells of; where it tells of none, the last: an example shows it in words."""
    return next(form for form in FORMS if all(mark in (template or "") for mark in form.told_by))


def conversation(
    question: str, *, example: bool | Sequence[Mapping[str, Any]] = True, form: ToolForm = OUTPUT
) -> list[dict[str, Any]]:
    """Return the messages that ask a question so that a model writes programs.

    Args:
        question: of the user.
        example: show one worked example in front, or these turns.
        form: of the model, see `form_of`. Where it has functions (`ToolForm.told`), the prompt must tell of them, and
            they stand in place of an example.
    """
    shots = [] if isinstance(example, bool) else [dict(turn) for turn in example]
    if example is True and not form.calls:
        shots = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), _EXAMPLE, strict=True)]
    asked = {"role": "user", "content": question}
    if form.system:
        return [{"role": "system", "content": form.system}, *shots, asked]
    first, *others = [*shots, asked]
    return [first | {"content": f"{_IN_WORDS}\n\n{first['content']}"}, *others]


def beginning(template: str | None) -> list[dict[str, Any]]:
    """Return the messages before a conversation under which a model with this template writes programs; none of them
    needs functions that the prompt tells of."""
    form = form_of(template)
    return conversation("", form=FORMS[-1] if form.told else form)[:-1]
