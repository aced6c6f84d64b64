"""Ollama's API: /api/chat, /api/generate, /api/tags, /api/show and /api/version. Answers are lines of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from fastapi import FastAPI, Request
from pydantic import AliasChoices, Field, field_validator, model_validator
from starlette.responses import Response

from tilebeam._version import __version__
from tilebeam.chat.answer_parts import Part, reasoning_in, text_in
from tilebeam.server.answer_events import Ended, Event, Grown, Json, TokenBytes
from tilebeam.server.chat_forms import ChatForm, FormTurn, answered
from tilebeam.server.models import Models
from tilebeam.server.plan import AnswerPlan
from tilebeam.server.requests import ChatRequest, CompletionRequest, JsonObject, Number, Sampling, Strict, Text
from tilebeam.server.service import Service
from tilebeam.server.writing import StreamedAnswer, complete_calls, dumped

if TYPE_CHECKING:
    from tilebeam.model.lm import LM

# A model's name may have a tag; every file has this one.
_TAG = ":latest"
# Options that were decided when the server was started.
_DECIDED = ("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "use_mmap", "use_mlock", "numa")
# Values of keep_alive by which a client says that it needs the model no longer.
_UNWANTED = (0, "0", "0s", "0m")
# What a chat calls a message's fields.
_FIELDS = {"thinking": "reasoning_content", "tool_name": "name"}


class _Options(Sampling):
    num_predict: int | None = None
    stop: Text | list[Text] | None = None
    repeat_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None

    @model_validator(mode="before")
    @classmethod
    def _undecided(cls, value: object) -> object:
        return {k: v for k, v in value.items() if k not in _DECIDED} if isinstance(value, dict) else value


class _OllamaForm(ChatForm):
    own_names = (
        (r"^n_predict\b", "options.num_predict"),
        (r"^(temperature|top_k|top_p|min_p|seed|stop|\w+_penalty)\b", r"options.\1"),
        (r"^json_schema\b|^response_format\b", "format"),
        (r"\breasoning_content\b", "thinking"),
        (r": set tool_choice to none\b", ": leave out one of them"),
    )

    model: Text
    stream: bool = True
    options: _Options = Field(default_factory=_Options)
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: float | str | None = None  # --idle-unload of the server holds

    @field_validator("model")
    @classmethod
    def _untagged(cls, value: str) -> str:
        return value.removesuffix(_TAG)

    def drawing(self) -> Json:
        fields: Json = self.options.model_dump(exclude_none=True)
        if "num_predict" in fields:
            fields["n_predict"] = max(fields.pop("num_predict"), -1)  # -2 fills the context, too
        if isinstance(self.format, dict):
            fields["json_schema"] = self.format
        elif self.format:
            fields["response_format"] = {"type": "json_object"}
        return fields | {"stream": self.stream}

    def fields(self) -> Json:
        # True: the model's and the server's default holds.
        effort = None if self.think in (None, True) else self.think or "none"
        return self.drawing() | {"reasoning_effort": effort}


class OllamaChat(_OllamaForm):
    """POST /api/chat. A chat has the same messages, but for some names and the JSON of arguments."""

    messages: list[JsonObject] = Field(default_factory=list)
    tools: list[JsonObject] | None = None

    def fields(self) -> Json:
        """Return the chat's."""
        return super().fields() | {"tools": self.tools}

    def turns(self) -> list[FormTurn]:
        """Return the messages."""
        turns = [
            {"content": ""} | {_FIELDS.get(k, k): v for k, v in message.items() if v not in (None, [])}
            for message in self.messages
        ]
        for turn in turns:
            if isinstance(calls := turn.get("tool_calls"), list):
                turn["tool_calls"] = [_call(call) for call in calls]
        return [FormTurn(f"messages[{i}]", turn) for i, turn in enumerate(turns)]


def _call(call: Any) -> Any:
    """Return a call with its arguments as a text, and without its number."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
        return call
    told = {name: value for name, value in function.items() if name != "index"}
    return call | {"function": told | {"arguments": json.dumps(function["arguments"])}}


class OllamaGenerate(_OllamaForm):
    """POST /api/generate: a chat of one message; with `raw` or `suffix` a completion."""

    prompt: Text = ""
    suffix: Text | None = None
    system: Text = ""
    raw: bool = False

    def turns(self) -> list[FormTurn]:
        """Return the message, behind the system's."""
        system = [FormTurn("system", {"role": "system", "content": self.system})] if self.system else []
        return [*system, FormTurn("prompt", {"role": "user", "content": self.prompt})]

    def asked(self) -> ChatRequest | CompletionRequest:
        """Return what it asks for."""
        if not (self.raw or self.suffix):
            return self.chat()
        fields = {"n_predict": -1, "prompt": self.prompt, "suffix": self.suffix or None}
        return self.made(CompletionRequest, fields | self.drawing())


class _Show(Strict):
    model: Text = Field(validation_alias=AliasChoices("model", "name"))
    verbose: bool | None = None


def add_ollama_routes(app: FastAPI, models: Models) -> None:
    """Serve these paths."""

    @app.post("/api/chat", response_model=None)
    async def ollama_chat(body: OllamaChat, request: Request) -> Response | Json:
        """Answer a conversation, in Ollama's form; without messages the model is loaded."""
        if body.messages:
            return await answered(models, body, request, partial(OllamaAnswer, True))
        return await loaded(body, request, {"message": {"role": "assistant", "content": ""}})

    @app.post("/api/generate", response_model=None)
    async def ollama_generate(body: OllamaGenerate, request: Request) -> Response | Json:
        """Answer a text, in Ollama's form; without a prompt the model is loaded."""
        if body.prompt or body.suffix:
            return await answered(models, body, request, partial(OllamaAnswer, False))
        return await loaded(body, request, {"response": ""})

    async def loaded(body: _OllamaForm, request: Request, said: Json) -> Json:
        service, unwanted = models.of(body.model), body.keep_alive in _UNWANTED
        if not unwanted:
            await service.run_quick(request, lambda _: None)
        reason = "unload" if unwanted else "load"
        return {"model": body.model, "created_at": _now(), **said, "done": True, "done_reason": reason}

    @app.get("/api/tags")
    async def ollama_tags() -> Json:
        """List the models, in Ollama's form."""
        return {"models": [_entry(service) for service in models.services]}

    @app.post("/api/show")
    async def ollama_show(body: _Show, request: Request) -> Json:
        """Tell of a model, in Ollama's form."""
        service = models.of(body.model.removesuffix(_TAG))

        def shown(lm: LM) -> Json:
            name, own = lm.info.architecture, service.settings.chat_template or lm.chat_template or ""
            sizes = {"general.parameter_count": lm.n_params, f"{name}.context_length": lm.n_ctx}
            can = ["completion", "tools"] if lm.info.generates else ["embedding"]
            told = {"template": own, "parameters": "", "modelfile": "", "capabilities": can}
            return told | {**_entry(service), "model_info": {"general.architecture": name, **sizes}}

        return await service.run_quick(request, shown)

    @app.get("/api/version")
    async def ollama_version() -> Json:
        """Return Tilebeam's version, in Ollama's form."""
        return {"version": __version__}


class OllamaAnswer(StreamedAnswer):
    """Writes an answer, which may be a line for each piece.

    Args:
        chat: it is a message, otherwise a text.
    """

    media_type = "application/x-ndjson"

    def __init__(self, chat: bool, plan: AnswerPlan, _spelling: TokenBytes) -> None:
        self._text = "content" if chat else "response"
        self._model = plan.model
        self._began = time.monotonic_ns()
        self._parts: list[Part] = []
        self._reason = "stop"

    def whole(self, events: Iterable[Event]) -> Json:
        """Return the one line."""
        _, grown, ended = events
        assert isinstance(grown, Grown)
        assert isinstance(ended, Ended)
        return self._line(self._said(grown, grown.parts)) | self._end(ended)

    def add(self, event: Event) -> bytes:
        """Return the line that an event adds; calls are told when all of them are complete."""
        if isinstance(event, Grown):
            self._parts += event.parts
            said = self._said(event, self._parts if event.finish is not None else ())
            return dumped(self._line(said)) + b"\n" if any(said.values()) else b""
        return dumped(self._line({self._text: ""}) | self._end(event)) + b"\n" if isinstance(event, Ended) else b""

    def _said(self, grown: Grown, called: Sequence[Part]) -> Json:
        """Write what an answer grew by, and the calls that these parts make up."""
        self._reason = "length" if grown.finish == "length" else "stop"
        said: Json = {self._text: text_in(grown.parts)}
        if thoughts := reasoning_in(grown.parts):
            said["thinking"] = thoughts
        if calls := [{"name": call.name, "arguments": arguments} for call, arguments in complete_calls(called)]:
            said["tool_calls"] = [{"function": function} for function in calls]
        return said

    def _line(self, said: Json) -> Json:
        told = {"message": {"role": "assistant"} | said} if self._text == "content" else said
        return {"model": self._model, "created_at": _now(), **told, "done": False}

    def _end(self, ended: Ended) -> Json:
        usage = ended.usage
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": time.monotonic_ns() - self._began,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(usage.prefill_seconds * 1e9),
            "eval_count": usage.completion_tokens,
            "eval_duration": int((usage.decode_seconds + usage.sampling_seconds) * 1e9),
        }


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _entry(service: Service) -> Json:
    """Tell of a model what is known: of one that is not loaded its name."""
    lm = service.host.newest
    family, size, params = ("", 0, 0) if lm is None else (lm.info.architecture, lm.n_bytes, lm.n_params)
    told = {"name": service.name, "model": service.name, "modified_at": _now(), "digest": "", "size": size}
    details = {"format": "gguf", "family": family, "parameter_size": f"{params / 1e9:.1f}B" if params else ""}
    return told | {"details": details}
