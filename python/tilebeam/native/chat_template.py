"""Chat templates: the file's own, run as Jinja in a sandbox, or one of llama.cpp's by its name.

As llama.cpp's server does, a BOS token that the template writes is taken off where the tokenizer adds one.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from tilebeam.errors import TilebeamError
from tilebeam.native.llama import Vocab, apply_builtin_template, builtin_template_names

# What templates find set by the chat.
_OWN = {"messages", "tools", "functions", "function_call", "tool_choice", "bos_token", "eos_token"}
_OWN |= {"add_generation_prompt", "raise_exception", "strftime_now"}


class MessagesRefused(TilebeamError):
    """A template that says itself that it does not take these messages."""


class VariablesRefused(TilebeamError):
    """Variables that this template cannot be given."""


def check_template(template: str, variables: Mapping[str, Any]) -> None:
    """Raise `TilebeamError` unless this is a template, or the name of one, that takes these variables."""
    _check_variables(template, variables)
    if template not in builtin_template_names():
        _compiled(template, "", "", True)


def takes_tools(template: str) -> bool:
    """Whether a template, which may be the name of one, tells the model of functions."""
    return ("{{" in template or "{%" in template) and re.search(r"\btools\b", template) is not None


class ChatTemplates:
    """Runs templates for one model. Any thread may ask.

    Args:
        vocab: the model's.
        own: the template in the model's file, None if there is none.

    Attributes:
        own: the same.
    """

    def __init__(self, vocab: Vocab, own: str | None) -> None:
        self.own = own
        self._bos, self._eos = vocab.spelling(vocab.bos), vocab.spelling(vocab.eos)
        self._adds_bos = vocab.adds_bos
        self._known: dict[tuple[str, bool], Any] = {}
        self._lock = threading.Lock()

    def apply(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_assistant: bool,
        template: str | None,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
            messages: with "role" and "content".
            add_assistant: end where the assistant speaks.
            template: Jinja, or the name of one of llama.cpp's; None: the model's own.
            tools: functions that the template tells the model of.
            variables: of the template, beside those of every chat.

        Raises:
            MessagesRefused: the template does not take these messages.
            VariablesRefused: nor these variables.
            TilebeamError: there is no template, or it cannot be run.
        """
        template = template or self.own
        if template is None:
            raise TilebeamError("This model has no chat template: it is a base model; write the prompt as plain text.")
        _check_variables(template, variables or {})
        if template in builtin_template_names():
            if tools:
                raise TilebeamError(f"llama.cpp's template {template!r} knows no tools: give a Jinja template.")
            return apply_builtin_template(template, [(m["role"], m["content"]) for m in messages], add_assistant)
        text = _rendered(self._formatter(template, add_assistant), messages, tools, _defaults() | dict(variables or {}))
        return text.removeprefix(self._bos) if self._adds_bos and self._bos else text

    def _formatter(self, template: str, add_assistant: bool) -> Any:
        with self._lock:
            key = template, add_assistant
            if key not in self._known:
                self._known[key] = _compiled(template, self._bos, self._eos, add_assistant)
            return self._known[key]


def _defaults() -> dict[str, Any]:
    """Variables that llama.cpp sets where nothing else is asked for (common/chat.cpp): some templates close a model's
    thoughts before it has begun with them without the first, and some say a day of 2024 without the date."""
    today = datetime.now()
    return {"enable_thinking": True, "date_string": today.strftime("%d %b %Y"), "datetime": today.strftime("%b %d %Y")}


def _check_variables(template: str, variables: Mapping[str, Any]) -> None:
    if variables and template in builtin_template_names():
        raise VariablesRefused(f"llama.cpp's template {template!r} has no variables: give a Jinja template.")
    if taken := _OWN & set(variables):
        raise VariablesRefused(f"chat_template_kwargs cannot set {', '.join(sorted(taken))}: the chat sets it.")


def _compiled(template: str, bos: str, eos: str, add_assistant: bool) -> Any:
    if "{{" not in template and "{%" not in template:
        raise TilebeamError(
            f"{template[:80]!r} is not a chat template: it is neither Jinja nor the name of one that llama.cpp knows "
            f"({', '.join(builtin_template_names())})."
        )
    from jinja2 import TemplateSyntaxError
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    try:
        return Jinja2ChatFormatter(template, eos_token=eos, bos_token=bos, add_generation_prompt=add_assistant)
    except TemplateSyntaxError as error:
        raise TilebeamError(
            f"The chat template is not valid Jinja (line {error.lineno}: {error.message}). Give the name of one that "
            f"llama.cpp knows instead: {', '.join(builtin_template_names())}."
        ) from None


def _rendered(
    formatter: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
) -> str:
    try:
        return str(formatter(messages=[dict(m) for m in messages], tools=[*tools] or None, **variables).prompt)
    except ValueError as error:  # what raise_exception raises
        raise MessagesRefused(f"The chat template does not take these messages: {error}") from None
    except Exception as error:  # whatever an expression of a template runs into, the sandbox among it
        raise TilebeamError(
            f"The chat template cannot be run: {type(error).__name__}: {error}. Give the name of one that llama.cpp "
            f"knows instead: {', '.join(builtin_template_names())}."
        ) from None
