"""From the messages of a chat, or the values of a template, to the tokens of a prompt, without letting them pass
themselves off as control tokens.

A template is text, and so are the control tokens in it: `<|im_end|>` typed by a user looks like the template's own.
llama-server tokenizes the whole text with control tokens on. Here that is done only if no message holds any: otherwise
the template's own pieces are tokenized with control tokens and every message as plain text, and the pieces are joined.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any

from tilebeam.chat.chat_template import ChatTemplates, MessagesRefused
from tilebeam.chat.chat_turns import turns_of
from tilebeam.chat.refused import FieldRefused
from tilebeam.chat.tools import Tool
from tilebeam.native.llama import Vocab
from tilebeam.prompt import Prompt


class ControlTokensInMessage(FieldRefused):
    """A message holds a control token, and cannot be told from the template's own text."""

    param = "messages"
    code = "control_tokens_in_message"


def prompt_of(
    vocab: Vocab,
    templates: ChatTemplates,
    messages: Sequence[Mapping[str, Any]],
    template: str | None = None,
    *,
    continued: bool = False,
    tools: Sequence[Tool] = (),
    variables: Mapping[str, Any] | None = None,
) -> Prompt:
    """Make the prompt of a chat, up to where the assistant speaks; its question is what the user said last.

    Args:
        vocab, templates: the model's.
        messages: the turns, as OpenAI's API has them; contents are texts.
        template: a Jinja template, or the name of one of llama.cpp's; None: the model's own.
        continued: the last message is the beginning of what the assistant says.
        tools: functions that the model is told of: by the template, or in words if it knows none.
        variables: of the template, like {"enable_thinking": False}.

    Raises:
        MessagesRefused: a message is none, or the template does not take them.
        ControlTokensInMessage, VariablesRefused: see there.
        TilebeamError: there is no template, or it cannot be run.
    """
    turns, told = turns_of(messages, tools, template or templates.own or "")
    asked = next((m["content"] for m in reversed(messages) if m["role"] == "user"), None)
    if continued and (len(turns) < 2 or turns[-1]["role"] != "assistant"):
        raise MessagesRefused("continue_final_message: the last of several messages must be the assistant's.")
    said: str | None = turns.pop()["content"] if continued else None

    def render(contents: Sequence[str]) -> str:
        filled = [{**turn, "content": content} for turn, content in zip(turns, contents, strict=True)]
        return templates.apply(filled, template, told, variables)

    others = [{key: value for key, value in turn.items() if key != "content"} for turn in turns]
    _check_others(vocab, [*told, *others, variables or {}])
    contents = [turn["content"] for turn in turns]
    text, own = render(contents), _pieces(render, contents)
    if own is not None:
        ids = _joined(vocab, text, own, [c for c in contents if c])
    elif any(_has_control(vocab, content) for content in contents):
        raise ControlTokensInMessage(
            "A message contains a control token of this model, and the chat template changes messages, so that their "
            "text cannot be separated from the template's own."
        )
    else:
        ids = vocab.tokenize(text, True, True)
    prompt = Prompt(text, ids, asked)
    return prompt if said is None else _continued(vocab, prompt, said)


def filled_prompt(vocab: Vocab, template: str, values: Mapping[str, str]) -> Prompt:
    """Make the prompt of a template with places like {name}; see `LM.filled_prompt`."""
    own, others = _filled(template, values)
    text = _woven(own, others)
    return Prompt(text, _joined(vocab, text, own, others))


def filled_text(template: str, values: Mapping[str, str]) -> str:
    """Return the text of a template with places like {name}, for where it becomes a message."""
    return _woven(*_filled(template, values))


def _filled(template: str, values: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return a template's own pieces, and the values that stand between them."""
    names = "|".join(map(re.escape, values))
    parts = re.split(rf"\{{({names})\}}", template) if values else [template]
    return parts[::2], [values[name] for name in parts[1::2]]


def _woven(own: Sequence[str], others: Sequence[str]) -> str:
    return "".join(chain.from_iterable(zip_longest(own, others, fillvalue="")))


def _joined(vocab: Vocab, text: str, own: Sequence[str], others: Sequence[str]) -> list[int]:
    """Return the tokens of a text in which control tokens count in one's own pieces, but not in the texts of others
    between them."""
    if not any(_has_control(vocab, other) for other in others):
        ids = vocab.tokenize(text, True, True)
        separate = vocab.tokenize(f"m{secrets.token_hex(12)}m".join(own), True, True)
        if _controls(vocab, ids) == _controls(vocab, separate):  # else pieces together spell out another one
            return ids
    ids = []
    for i, (piece, other) in enumerate(zip(own, [*others, ""], strict=True)):
        if piece:
            ids += vocab.tokenize(piece, i == 0, True)
        if other:
            ids += vocab.tokenize(other, i == 0 and not piece, False)
    return ids


def _check_others(vocab: Vocab, given: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ControlTokensInMessage` for one in a function, in a variable, or in what a message has besides its content
    (a call, a name ..): templates write these in ways of their own."""
    try:
        text = "\n".join(dict.fromkeys(_strings(given)))
    except RecursionError:
        raise MessagesRefused("Messages, functions and variables of a chat are nested too deeply.") from None
    if text and _has_control(vocab, text):
        raise ControlTokensInMessage(
            "A function, a variable of the template, a call in a message, or another field of a message than its "
            "content contains a control token of this model."
        )


def _strings(value: Any) -> Iterator[str]:
    """Return all texts within JSON, names of members too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            yield from _strings(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _strings(inner)


def _continued(vocab: Vocab, prompt: Prompt, said: str) -> Prompt:
    """Join a prompt and what was said behind it already. They are tokenized as one text where the prompt's tokens are
    those of its text and nothing said looks like a control token; else apart."""
    text = prompt.text + said
    if not _has_control(vocab, said) and vocab.tokenize(prompt.text, True, True) == prompt.ids:
        return Prompt(text, vocab.tokenize(text, True, True), prompt.question)
    return Prompt(text, prompt.ids + vocab.tokenize(said, False, False), prompt.question)


def _has_control(vocab: Vocab, text: str) -> bool:
    return vocab.tokenize(text, False, True) != vocab.tokenize(text, False, False)


def _controls(vocab: Vocab, ids: Sequence[int]) -> list[int]:
    control = {token for token in set(ids) if vocab.is_control(token)}
    return [token for token in ids if token in control]


def _pieces(render: Callable[[Sequence[str]], str], contents: Sequence[str]) -> list[str] | None:
    """Return the template's own text before, between and behind messages that say something; None: it does more with a
    message than to copy it."""
    secret = secrets.token_hex(12)
    text = render([f"m{secret}n{i}m" if content else "" for i, content in enumerate(contents)])
    found = [int(number) for number in re.findall(rf"m{secret}n(\d+)m", text)]
    in_order = found == [i for i, content in enumerate(contents) if content]
    return re.split(rf"m{secret}n\d+m", text) if in_order else None
