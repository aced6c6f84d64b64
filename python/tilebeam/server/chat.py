"""From the messages of a chat to the tokens of a prompt, without letting a message pass itself off as control tokens.

A template is text, and so are the control tokens in it: `<|im_end|>` typed by a user looks like the template's own.
llama-server tokenizes the whole text with control tokens on. Here that is done only if no message holds any: otherwise
the template's own pieces are tokenized with control tokens and every message as plain text, and the pieces are joined.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tilebeam.errors import TilebeamError
from tilebeam.native.chat_template import MessagesRefused
from tilebeam.server.errors import bad_request

if TYPE_CHECKING:
    from tilebeam.model.lm import LM
    from tilebeam.server.requests import Message


def prompt_of(
    lm: LM, messages: Sequence[Message], template: str | None = None, *, continued: bool = False
) -> tuple[str, list[int]]:
    """Text and tokens of a chat, up to where the assistant speaks.

    Args:
        lm: the model.
        messages: the turns.
        template: a Jinja template, or the name of one of llama.cpp's; None: the model's own.
        continued: the last message is the beginning of what the assistant says.

    Raises:
        ApiError: a message holds what cannot be part of one, or there is no template that fits.
    """
    if continued:
        text, ids = prompt_of(lm, messages[:-1], template)
        _check_content(messages[-1].text, len(messages) - 1)
        return _continued(lm, text, ids, messages[-1].text)
    turns = []
    for i, message in enumerate(messages):
        _check_content(message.text, i)
        turns.append((message.role.replace("developer", "system"), message.text))

    def render(contents: Sequence[str]) -> str:
        try:
            return lm.apply_chat_template(
                [{"role": role, "content": text} for (role, _), text in zip(turns, contents, strict=True)],
                template=template,
            )
        except MessagesRefused as error:
            raise bad_request(f"messages: {error}", param="messages", code="invalid_value") from None
        except TilebeamError as error:
            raise bad_request(f"{error} Or start the server with --chat-template.", code="no_chat_template") from None

    contents = [content for _, content in turns]
    text = render(contents)
    if not any(_has_control(lm, content) for content in contents):
        ids = lm.tokenize(text)
        marked, pieces = _pieces(render, len(contents))
        if pieces is None or _controls(lm, ids) == _controls(lm, lm.tokenize(marked)):
            return text, ids
    else:
        _, pieces = _pieces(render, len(contents))
    if pieces is None:
        raise bad_request(
            "A message contains a control token of this model, and the chat template changes messages, so that their "
            "text cannot be separated from the template's own.",
            param="messages",
            code="control_tokens_in_message",
        )
    ids = []
    for i, (piece, content) in enumerate(zip(pieces, [*contents, ""], strict=True)):
        if piece:
            ids += lm.tokenize(piece, add_special=i == 0)
        if content:
            ids += lm.tokenize(content, add_special=i == 0 and not piece, parse_special=False)
    return text, ids


def _check_content(text: str, i: int) -> None:
    """Raise `ApiError` for what no message may hold."""
    where = f"messages[{i}].content"
    if "\0" in text:
        raise bad_request(f"{where}: must not hold a NUL character.", param=where, code="invalid_value")


def _continued(lm: LM, text: str, ids: list[int], said: str) -> tuple[str, list[int]]:
    """A prompt and what was said behind it already. They are tokenized as one text where the prompt's tokens are those
    of its text and nothing said looks like a control token; else apart."""
    if not _has_control(lm, said) and lm.tokenize(text) == ids:
        return text + said, lm.tokenize(text + said)
    return text + said, ids + lm.tokenize(said, add_special=False, parse_special=False)


def _has_control(lm: LM, text: str) -> bool:
    return lm.tokenize(text, add_special=False) != lm.tokenize(text, add_special=False, parse_special=False)


def _controls(lm: LM, ids: Sequence[int]) -> list[int]:
    return [token for token in ids if lm.is_control(token)]


def _pieces(render: Callable[[Sequence[str]], str], count: int) -> tuple[str, list[str] | None]:
    """The template with marks for messages, and its own text before, between and behind them; None: the template
    does more with a message than to copy it."""
    marks = [f"m{secrets.token_hex(16)}m" for _ in range(count)]
    text = render(marks)
    pieces = re.split("|".join(marks), text)
    in_order = re.findall("|".join(marks), text) == marks
    return text, pieces if in_order else None
