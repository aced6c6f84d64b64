"""From the messages of a chat to the tokens of a prompt, without letting a message pass itself off as control tokens.

A template is text, and so are the control tokens in it: `<|im_end|>` typed by a user looks like the template's own.
llama-server tokenizes the whole text with control tokens on. Here that is done only if no message holds any: otherwise
the template's own pieces are tokenized with control tokens and every message as plain text, and the pieces are joined.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilebeam.errors import TilebeamError
from tilebeam.model.chat_template import ChatTemplates, MessagesRefused
from tilebeam.native.llama import Vocab


class ControlTokensInMessage(TilebeamError):
    """A message holds a control token, and cannot be told from the template's own text."""


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as a model reads it.

    Attributes:
        text: with the template's control tokens spelled out.
        token_ids: in which no message passes itself off as control tokens.
    """

    text: str
    token_ids: list[int]


def prompt_of(
    vocab: Vocab,
    templates: ChatTemplates,
    messages: Sequence[Mapping[str, Any]],
    template: str | None = None,
    *,
    continued: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> ChatPrompt:
    """Make the prompt of a chat, up to where the assistant speaks.

    Args:
        vocab, templates: the model's.
        messages: the turns, each with "role" and "content", which is a text.
        template: a Jinja template, or the name of one of llama.cpp's; None: the model's own.
        continued: the last message is the beginning of what the assistant says.
        tools: functions that the template tells the model of.
        variables: of the template, like {"enable_thinking": False}.

    Raises:
        MessagesRefused: a message is none, or the template does not take them.
        ControlTokensInMessage, VariablesRefused: see there.
        TilebeamError: there is no template, or it cannot be run.
    """
    _check(messages)
    if continued:
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise MessagesRefused("continue_final_message: the last of several messages must be the assistant's.")
        before = prompt_of(vocab, templates, messages[:-1], template, tools=tools, variables=variables)
        return _continued(vocab, before, messages[-1]["content"])

    def render(contents: Sequence[str]) -> str:
        turns = [{**m, "content": content} for m, content in zip(messages, contents, strict=True)]
        return templates.apply(turns, True, template, tools, variables)

    others = [{key: value for key, value in m.items() if key != "content"} for m in messages]
    _check_others(vocab, [*tools, *others, variables or {}])
    contents = [m["content"] for m in messages]
    text = render(contents)
    if not any(_has_control(vocab, content) for content in contents):
        ids = vocab.tokenize(text, True, True)
        marked, pieces = _pieces(render, contents)
        if pieces is None or _controls(vocab, ids) == _controls(vocab, vocab.tokenize(marked, True, True)):
            return ChatPrompt(text, ids)
    else:
        _, pieces = _pieces(render, contents)
    if pieces is None:
        raise ControlTokensInMessage(
            "A message contains a control token of this model, and the chat template changes messages, so that their "
            "text cannot be separated from the template's own."
        )
    ids = []
    for i, (piece, content) in enumerate(zip(pieces, [*filter(None, contents), ""], strict=True)):
        if piece:
            ids += vocab.tokenize(piece, i == 0, True)
        if content:
            ids += vocab.tokenize(content, i == 0 and not piece, False)
    return ChatPrompt(text, ids)


def _check_others(vocab: Vocab, given: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ControlTokensInMessage` for one in a function, in a variable, or in what a message has besides its content
    (a call, a name ..): templates write these in ways of their own."""
    text = "\n".join(dict.fromkeys(_strings(given)))
    if text and _has_control(vocab, text):
        raise ControlTokensInMessage(
            "A function, a variable of the template, a call in a message, or another field of a message than its "
            "content contains a control token of this model."
        )


def _strings(value: Any) -> Iterator[str]:
    """All texts within JSON, names of members too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _strings(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _strings(inner)


def _check(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise MessagesRefused("A conversation needs at least one message.")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise MessagesRefused(f'messages[{i}] must be a dict with "role" and "content".')
        if not isinstance(message["content"], str):
            raise MessagesRefused(f"messages[{i}].content must be a text, not {type(message['content']).__name__}.")


def _continued(vocab: Vocab, prompt: ChatPrompt, said: str) -> ChatPrompt:
    """Append to a prompt what was said behind it already. They are tokenized as one text where the prompt's tokens are
    those of its text and nothing said looks like a control token; else one by one."""
    text = prompt.text + said
    if not _has_control(vocab, said) and vocab.tokenize(prompt.text, True, True) == prompt.token_ids:
        return ChatPrompt(text, vocab.tokenize(text, True, True))
    return ChatPrompt(text, prompt.token_ids + vocab.tokenize(said, False, False))


def _has_control(vocab: Vocab, text: str) -> bool:
    return vocab.tokenize(text, False, True) != vocab.tokenize(text, False, False)


def _controls(vocab: Vocab, ids: Sequence[int]) -> list[int]:
    control = {token for token in set(ids) if vocab.is_control(token)}
    return [token for token in ids if token in control]


def _pieces(render: Callable[[Sequence[str]], str], contents: Sequence[str]) -> tuple[str, list[str] | None]:
    """Split the template into marks for messages that say something, and its own text before, between and behind them;
    None: the template does more with a message than to copy it."""
    secret = secrets.token_hex(12)
    text = render([f"m{secret}n{i}m" if content else "" for i, content in enumerate(contents)])
    found = [int(number) for number in re.findall(rf"m{secret}n(\d+)m", text)]
    in_order = found == [i for i, content in enumerate(contents) if content]
    return text, re.split(rf"m{secret}n\d+m", text) if in_order else None
