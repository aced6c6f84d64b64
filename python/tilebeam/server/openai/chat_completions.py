"""/v1/chat/completions: from messages to what the library is asked, with errors that name the field; and how answers
are written, with thoughts as reasoning_content, as DeepSeek and llama-server have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tilebeam.chat.answer_parts import Part, Reasoning, Text, calls_in, reasoning_in, text_in
from tilebeam.chat.prepared import PreparedChat
from tilebeam.native.llama import builtin_template_names
from tilebeam.prompt import Prompt
from tilebeam.sampling_params import SamplingParams
from tilebeam.search.tool_forms import beginning
from tilebeam.server.answer_events import Grown, Json, Shown, token_text
from tilebeam.server.errors import errors_for_client
from tilebeam.server.openai.choice_answer import ChoicesAnswer
from tilebeam.server.requests import ChatRequest, NamedTool
from tilebeam.server.searches import reasons_with_tools
from tilebeam.server.settings import Settings

if TYPE_CHECKING:
    from tilebeam.model.lm import LM


def prompt_of(lm: LM, body: ChatRequest, settings: Settings) -> Prompt:
    """Return the prompt of a chat, up to where the assistant speaks; see `LM.chat_prompt`.

    Raises:
        ApiError: a message holds what cannot be part of one, or there is no template that fits.
    """
    tools = body.functions if body.calls else ()
    with errors_for_client(lm):
        return lm.chat_prompt(_messages(lm, body), tools=tools, **_template_options(body, settings))


def prepared(lm: LM, body: ChatRequest, settings: Settings, params: SamplingParams) -> PreparedChat:
    """Make a chat ready to be answered; see `LM.prepare_chat`.

    Args:
        params: how to sample, with the grammar of the form that the request asks for.

    Raises:
        TilebeamError: as `LM.prepare_chat`.
    """
    choice = body.tool_choice.model_dump() if isinstance(body.tool_choice, NamedTool) else body.tool_choice
    return lm.prepare_chat(
        _messages(lm, body),
        params,
        tools=body.functions,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning="text" if (body.reasoning_format or settings.reasoning_format) == "none" else "apart",
        **_template_options(body, settings),
    )


def _messages(lm: LM, body: ChatRequest) -> list[dict[str, Any]]:
    """Return the messages as the library takes them."""
    messages = [message.as_dict() for message in body.messages]
    if reasons_with_tools(body.search) and not any(m["role"] in ("system", "developer") for m in messages):
        return [*beginning(lm.chat_template), *messages]
    return messages


def _template_options(body: ChatRequest, settings: Settings) -> dict[str, Any]:
    """Return what the prompt depends on besides its messages; the request's variables come first."""
    template = settings.chat_template
    # llama.cpp's own templates have no variables, nor use for an effort.
    own = (body.chat_template_kwargs or {}) if template in builtin_template_names() else body.template_variables
    continued = bool(body.continue_final_message)
    chosen = {**settings.chat_template_kwargs, **own}
    return {"template": template, "continue_final_message": continued, "chat_template_kwargs": chosen}


class ChatAnswer(ChoicesAnswer):
    """Writes messages of the assistant."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    @property
    def _calls(self) -> bool:
        """Return whether the model may call functions."""
        return isinstance(self._plan.body, ChatRequest) and self._plan.body.calls

    def choice(self, grown: Grown) -> Json:
        """Write the message, with its thoughts and calls."""
        content, thoughts, calls = text_in(grown.parts), reasoning_in(grown.parts), calls_in(grown.parts)
        message: Json = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
        if thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = [call.as_dict() for call in calls]
        logprobs = None if grown.tokens is None else self._told(grown.tokens)
        return {"index": grown.index, "message": message, "logprobs": logprobs, "finish_reason": grown.finish}

    def opening(self, index: int) -> Json:
        """Write who speaks."""
        return _piece(index, {"role": "assistant", "content": None if self._calls else ""})

    def pieces(self, grown: Grown) -> list[Json]:
        """Write a piece for each part; the last one has the finish_reason, by itself where there may be calls."""
        found = [_piece(grown.index, _delta(part)) for part in grown.parts]
        if not found or (grown.finish is not None and self._calls):
            found.append(_piece(grown.index, {}))
        found[-1]["finish_reason"] = grown.finish
        if grown.tokens is not None:
            found[0]["logprobs"] = self._told(grown.tokens)
        return found

    def _told(self, tokens: Sequence[Shown]) -> Json:
        """Write an entry per token, each with its bytes; OpenAI counts no offsets in chats."""
        content = []
        for shown in tokens:
            entry = _entry(self._spelling(shown.token), shown.logprob)
            entry["top_logprobs"] = [_entry(*pair) for pair in self._entries(shown)]
            content.append(entry)
        return {"content": content, "refusal": None}


def _piece(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta(part: Part) -> Json:
    """Write what a message grew by."""
    if isinstance(part, Text):
        return {"content": part.text}
    if isinstance(part, Reasoning):
        return {"reasoning_content": part.text}
    if part.name is None:
        return {"tool_calls": [{"index": part.call, "function": {"arguments": part.arguments}}]}
    function = {"name": part.name, "arguments": part.arguments}
    return {"tool_calls": [{"index": part.call, "id": part.id, "type": "function", "function": function}]}


def _entry(piece: bytes, logprob: float) -> Json:
    return {"token": token_text(piece), "logprob": logprob, "bytes": list(piece)}
