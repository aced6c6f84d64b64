"""Chat templates: the file's own, run as Jinja in a process of its own, or one of llama.cpp's by its name.

As llama.cpp's server does, a BOS token that the template writes is taken off where the tokenizer adds one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from tilebeam.chat.refused import FieldRefused
from tilebeam.chat.rendering import SECONDS, render
from tilebeam.errors import TilebeamError
from tilebeam.native.llama import Vocab, apply_builtin_template, builtin_template_names

# Characters of a template.
_LONGEST = 1 << 20
# What some templates ask for that were made for another API.
_UNUSED = dict.fromkeys(("functions", "function_call", "tool_choice"))

# What templates find set by the chat.
_OWN = {"messages", "tools", "functions", "function_call", "tool_choice", "bos_token", "eos_token"}
_OWN |= {"add_generation_prompt", "raise_exception", "strftime_now"}


class MessagesRefused(FieldRefused):
    """Messages that are none, or of which a template says itself that it does not take them."""

    param = "messages"
    code = "invalid_value"


class NoTemplate(TilebeamError):
    """There is no chat template, or it cannot be run."""


class VariablesRefused(FieldRefused):
    """Variables that this template cannot be given."""

    param = "chat_template_kwargs"
    code = "invalid_value"


def check_template(template: str, variables: Mapping[str, Any]) -> None:
    """Raise `TilebeamError` unless this is a template, or the name of one, that takes these variables."""
    _check_variables(template, variables)
    if template not in builtin_template_names():
        _run(_given(template), template, None)


def takes_tools(template: str) -> bool:
    """Tell whether a template, which may be the name of one, tells the model of functions."""
    return ("{{" in template or "{%" in template) and re.search(r"\btools\b", template) is not None


class ChatTemplates:
    """Runs templates for one model. Any thread may ask.

    Args:
        vocab: the model's.
        own: the template in the model's file, None if there is none.
        file: the name of that file, for errors.

    Attributes:
        own: the template in the model's file.
    """

    def __init__(self, vocab: Vocab, own: str | None, file: str) -> None:
        self.own = own
        self._file = file
        self._bos, self._eos = vocab.spelling(vocab.bos), vocab.spelling(vocab.eos)
        self._adds_bos = vocab.adds_bos

    def apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        template: str | None,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the text of a conversation, up to where the assistant speaks.

        Args:
            messages: with "role" and "content".
            template: Jinja, or the name of one of llama.cpp's; None: the model's own.
            tools: functions that the template tells the model of.
            variables: of the template, beside those of every chat.

        Raises:
            MessagesRefused: the template does not take these messages.
            VariablesRefused: nor these variables.
            NoTemplate: there is none, or it cannot be run.
        """
        template = template or self.own
        if template is None:
            raise NoTemplate("This model has no chat template: it is a base model; write the prompt as plain text.")
        _check_variables(template, variables or {})
        if template in builtin_template_names():
            if tools:
                raise NoTemplate(f"llama.cpp's template {template!r} knows no tools: give a Jinja template.")
            return apply_builtin_template(template, [(m["role"], m["content"]) for m in messages])
        name = _given(template) if template != self.own else f"The chat template of {self._file}"
        told = _defaults() | dict(variables or {})
        told |= {"messages": [*messages], "tools": [*tools] or None, "add_generation_prompt": True}
        told |= {"bos_token": self._bos, "eos_token": self._eos}
        text = _run(name, template, told | _UNUSED)
        return text.removeprefix(self._bos) if self._adds_bos and self._bos else text


def _defaults() -> dict[str, Any]:
    """Return variables that llama.cpp sets where nothing else is asked for (common/chat.cpp): some templates close a
    model's thoughts before it has begun with them without the first, and some say a day of 2024 without the date."""
    today = datetime.now()
    return {"enable_thinking": True, "date_string": today.strftime("%d %b %Y"), "datetime": today.strftime("%b %d %Y")}


def _check_variables(template: str, variables: Mapping[str, Any]) -> None:
    if variables and template in builtin_template_names():
        raise VariablesRefused(f"llama.cpp's template {template!r} has no variables: give a Jinja template.")
    if taken := _OWN & set(variables):
        raise VariablesRefused(f"chat_template_kwargs cannot set {', '.join(sorted(taken))}: the chat sets it.")


def _given(template: str) -> str:
    """Name a template that is not the model's own."""
    return f"The chat template {template if len(template) < 60 else template[:50] + ' ..'!r}"


def _run(name: str, template: str, variables: Mapping[str, Any] | None) -> str:
    """Render a template with variables; with None it is only looked at."""
    names = ", ".join(builtin_template_names())
    if "{{" not in template and "{%" not in template:
        raise NoTemplate(
            f"{template[:80]!r} is not a chat template: it is neither Jinja nor the name of one that llama.cpp knows "
            f"({names})."
        )
    known = f"Give the name of one that llama.cpp knows instead: {names}."
    if len(template) > _LONGEST:
        raise NoTemplate(f"{name} is longer than {_LONGEST} characters. {known}")
    try:
        reply = render(template, variables)
    except (TypeError, ValueError, RecursionError) as error:
        raise MessagesRefused(f"Messages, functions and variables of a chat must be JSON: {error}.") from None
    if reply is None:
        raise NoTemplate(f"{name} cannot be run: it does not come to an end within {SECONDS} seconds. {known}")
    if "refused" in reply:
        raise MessagesRefused(f"{name} does not take these messages: {reply['refused']}")
    if "invalid" in reply:
        raise NoTemplate(f"{name} is not valid Jinja (line {reply['line']}: {reply['invalid']}). {known}")
    if "failed" in reply:
        raise NoTemplate(f"{name} cannot be run: {reply['failed'].rstrip('.')}. {known}")
    return str(reply["text"])
