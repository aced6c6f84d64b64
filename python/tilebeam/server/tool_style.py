"""How answers with calls of functions and with thoughts are written: OpenAI's tool_calls, and reasoning_content as
DeepSeek and llama-server have it; whole and streamed."""

from __future__ import annotations

from typing import Any

from tilebeam.chat.answer_reader import AnswerReader, new_id
from tilebeam.chat.thoughts import Thinking
from tilebeam.chat.tool_calls import Event, joined
from tilebeam.chat.tools import ToolUse
from tilebeam.outputs import Delta
from tilebeam.server.responses import ChatStyle, Json, Shown, TokenLedger, finish_of


class ToolStyle(ChatStyle):
    """/v1/chat/completions where the model may call functions, or think.

    Args:
        use: the functions, None: there are none.
        options: of `Style`.
        thinking: how it thinks, None: it does not.
    """

    def __init__(self, use: ToolUse | None, *options: Any, thinking: Thinking | None = None) -> None:
        super().__init__(*options)
        self._use = use
        self._thinking = thinking
        self._readers: dict[int, AnswerReader] = {}
        self._untold: dict[int, list[Shown]] = {}  # tokens of text that is held back

    def _reader(self) -> AnswerReader:
        return AnswerReader(self._use, self._thinking)

    def opening(self, index: int, echo: object) -> Json | None:
        """Who speaks."""
        if self._use is None:
            return super().opening(index, echo)
        delta = {"role": "assistant", "content": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def whole(self, index: int, text: str, logprobs: Json | None, finish: str | None) -> Json:
        """The assistant's message, with its thoughts and calls."""
        reader = self._reader()
        content, thoughts, calls = "", "", list[Json]()
        for event in reader.feed(text) + reader.end(finish == "length"):
            if event.thought:
                thoughts += event.text
            elif event.call is None:
                content += event.text
            elif event.name is not None:
                function = {"name": event.name, "arguments": event.text}
                calls.append({"id": new_id(), "type": "function", "function": function})
            else:
                calls[event.call]["function"]["arguments"] += event.text
        message: Json = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
        if thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = calls
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": _finish(finish, bool(calls))}

    def chunks(self, index: int, text: str, delta: Delta, ledger: TokenLedger, offset: int) -> list[Json]:
        """What an answer grew by; a piece of a call or a mark may wait until it is clear that it is one."""
        reader = self._readers.setdefault(index, self._reader())
        events = reader.feed(text)
        finish = finish_of(delta.finish_reason)
        if finish is not None:
            events = joined(events + reader.end(finish == "length"))
        tokens = self._untold.setdefault(index, [])
        tokens += ledger.take(text)
        found: list[Json] = [
            {"index": index, "delta": _grown(event), "logprobs": None, "finish_reason": None} for event in events
        ]
        if finish is not None:
            if self._use is not None or not found:
                found.append({"index": index, "delta": {}, "logprobs": None, "finish_reason": None})
            found[-1]["finish_reason"] = _finish(finish, bool(reader.calls))
        if found and tokens and self.logprobs:
            found[0]["logprobs"] = self.told(tokens, offset)
            self._untold[index] = []
        return found


def _grown(event: Event) -> Json:
    if event.thought:
        return {"reasoning_content": event.text}
    if event.call is None:
        return {"content": event.text}
    if event.name is None:
        return {"tool_calls": [{"index": event.call, "function": {"arguments": event.text}}]}
    function = {"name": event.name, "arguments": event.text}
    return {"tool_calls": [{"index": event.call, "id": new_id(), "type": "function", "function": function}]}


def _finish(reason: str | None, called: bool) -> str | None:
    return "tool_calls" if called and reason == "stop" else reason
