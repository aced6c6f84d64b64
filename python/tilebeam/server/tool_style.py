"""How answers with calls of functions are written: OpenAI's tool_calls, whole and streamed."""

from __future__ import annotations

import secrets
import string
from typing import Any

from tilebeam.outputs import Delta
from tilebeam.server.responses import ChatStyle, Json, Shown, TokenLedger, finish_of
from tilebeam.server.tool_calls import CallReader, Event
from tilebeam.server.tools import ToolUse


def new_id() -> str:
    """Of a call. Mistral's templates take nine letters and digits, and nothing else."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class ToolStyle(ChatStyle):
    """/v1/chat/completions where the model may call functions.

    Args:
        use: which ones.
        options: of `Style`.
    """

    def __init__(self, use: ToolUse, *options: Any) -> None:
        super().__init__(*options)
        self._use = use
        self._readers: dict[int, CallReader] = {}
        self._untold: dict[int, list[Shown]] = {}  # tokens of text that is held back

    def _reader(self) -> CallReader:
        return CallReader(self._use.family, self._use.names, self._use.several)

    def opening(self, index: int, echo: object) -> Json | None:  # noqa: ARG002
        """Who speaks."""
        delta = {"role": "assistant", "content": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def whole(self, index: int, text: str, logprobs: Json | None, finish: str | None) -> Json:
        """The assistant's message, with its calls."""
        reader = self._reader()
        content, calls = "", list[Json]()
        for event in reader.feed(text) + reader.end():
            if event.call is None:
                content += event.text
            elif event.name is not None:
                function = {"name": event.name, "arguments": event.text}
                calls.append({"id": new_id(), "type": "function", "function": function})
            else:
                calls[event.call]["function"]["arguments"] += event.text
        message: Json = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": _finish(finish, bool(calls))}

    def chunks(self, index: int, text: str, delta: Delta, ledger: TokenLedger, offset: int) -> list[Json]:
        """What an answer grew by; a piece of a call may wait until it is clear that it is one."""
        reader = self._readers.setdefault(index, self._reader())
        events = reader.feed(text)
        if delta.finish_reason is not None:
            events += reader.end()
        tokens = self._untold.setdefault(index, [])
        tokens += ledger.take(text)
        found: list[Json] = [
            {"index": index, "delta": _grown(event), "logprobs": None, "finish_reason": None} for event in events
        ]
        if delta.finish_reason is not None:
            finish = _finish(finish_of(delta.finish_reason), bool(reader.calls))
            found.append({"index": index, "delta": {}, "logprobs": None, "finish_reason": finish})
        if found and tokens and self.logprobs:
            found[0]["logprobs"] = self.told(tokens, offset)
            self._untold[index] = []
        return found


def _grown(event: Event) -> Json:
    if event.call is None:
        return {"content": event.text}
    if event.name is None:
        return {"tool_calls": [{"index": event.call, "function": {"arguments": event.text}}]}
    function = {"name": event.name, "arguments": event.text}
    return {"tool_calls": [{"index": event.call, "id": new_id(), "type": "function", "function": function}]}


def _finish(reason: str | None, called: bool) -> str | None:
    return "tool_calls" if called and reason == "stop" else reason
