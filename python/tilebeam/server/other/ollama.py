"""Ollama's API: /api/chat, /api/generate, /api/tags, /api/show and /api/version. Answers are lines of JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from fastapi import FastAPI, Request
from pydantic import Field, field_validator, model_validator
from starlette.responses import Response

from tilebeam._version import __version__
from tilebeam.chat.answer_parts import Part, calls_in, reasoning_in, text_in
from tilebeam.server.answer_events import Ended, Event, Grown, Json, TokenBytes
from tilebeam.server.chat_forms import ChatForm, FormTurn, answered
from tilebeam.server.errors import ApiError
from tilebeam.server.models import Models
from tilebeam.server.plan import AnswerPlan
from tilebeam.server.requests import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CompletionRequest,
    FunctionName,
    Generation,
    Label,
    Number,
    Strict,
    Text,
    ToolField,
)
from tilebeam.server.service import Service
from tilebeam.server.writing import StreamedAnswer, dumped

# A model's name may have a tag; every file has this one.
_TAG = ":latest"
# Options that the server's own have decided, when it was started.
_DECIDED = ("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "use_mmap", "use_mlock", "numa")


class OllamaOptions(Strict):
    """How to draw. What samples in another way than Tilebeam's is not there, unless it is off."""

    num_predict: int | None = Field(None, ge=-2)
    temperature: Number | None = None
    top_k: int | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    seed: int | None = None
    stop: Text | list[Text] | None = None
    repeat_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    mirostat: Literal[0] | None = None
    typical_p: Literal[1, 1.0] | None = None
    tfs_z: Literal[1, 1.0] | None = None

    @model_validator(mode="before")
    @classmethod
    def _undecided(cls, value: object) -> object:
        return {k: v for k, v in value.items() if k not in _DECIDED} if isinstance(value, dict) else value


class _OllamaForm(ChatForm):
    """What both kinds of requests share."""

    own_names = (
        (r"\bn_predict\b", "options.num_predict"),
        (r"\b(temperature|top_k|top_p|min_p|seed|stop|repeat_penalty|\w+_penalty)\b", r"options.\1"),
        (r"\bjson_schema\b|\bresponse_format\b", "format"),
    )

    model: Text
    stream: bool = True
    options: OllamaOptions = Field(default_factory=OllamaOptions)
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: float | str | None = None  # --idle-unload of the server holds

    @field_validator("model")
    @classmethod
    def _untagged(cls, value: str) -> str:
        return value.removesuffix(_TAG)

    def drawing(self) -> Json:
        """Return the fields of a request of either kind."""
        fields: Json = self.options.model_dump(exclude={"num_predict", "mirostat", "typical_p", "tfs_z"})
        most = self.options.num_predict
        fields |= {"stream": self.stream, "n_predict": None if most is None else max(most, -1)}
        if isinstance(self.format, dict):
            fields["json_schema"] = self.format
        elif self.format:
            fields["response_format"] = {"type": "json_object"}
        return fields

    def fields(self) -> Json:
        """Return the chat's."""
        fields = self.drawing()
        if self.think is True:
            fields["chat_template_kwargs"] = {"enable_thinking": True}
        elif self.think is not None:
            fields["reasoning_effort"] = self.think or "none"
        return fields


class OllamaFunction(Strict):
    """A call in an earlier turn: its function."""

    name: FunctionName
    arguments: dict[str, Any]
    index: int | None = None


class OllamaCall(Strict):
    """A call in an earlier turn."""

    function: OllamaFunction
    type: Literal["function"] | None = None
    id: Text = ""


class OllamaMessage(Strict):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text = ""
    thinking: Text | None = None
    tool_calls: list[OllamaCall] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_name: Label | None = None
    tool_call_id: Label | None = None
    images: list[Any] | None = Field(None, max_length=0)


class OllamaChat(_OllamaForm):
    """POST /api/chat."""

    messages: list[OllamaMessage] = Field(default_factory=list, max_length=MAX_MESSAGES)
    tools: list[ToolField] | None = None

    def fields(self) -> Json:
        """Return the chat's."""
        return super().fields() | {"tools": self.model_dump()["tools"]}

    def turns(self) -> list[FormTurn]:
        """Return the messages."""
        found = []
        for i, message in enumerate(self.messages):
            said = {"role": message.role, "content": message.content, "reasoning_content": message.thinking}
            turn = FormTurn(f"messages[{i}]", said | {"name": message.tool_name, "tool_call_id": message.tool_call_id})
            for j, call in enumerate(message.tool_calls):
                called = {"name": call.function.name, "arguments": json.dumps(call.function.arguments)}
                turn.add_call(f"messages[{i}].tool_calls[{j}].function", called, call.id)
            found.append(turn)
        return found


class OllamaGenerate(_OllamaForm):
    """POST /api/generate: a chat of one message; with `raw` or `suffix` a completion."""

    prompt: Text = ""
    suffix: Text = ""
    system: Text = ""
    raw: bool = False
    images: list[Any] | None = Field(None, max_length=0)

    def turns(self) -> list[FormTurn]:
        """Return the message, behind the system's."""
        system = [FormTurn("system", {"role": "system", "content": self.system})] if self.system else []
        return [*system, FormTurn("prompt", {"role": "user", "content": self.prompt})]

    def asked(self) -> Generation:
        """Return what it asks for."""
        if not (self.raw or self.suffix):
            return self.chat()
        fields = {"n_predict": -1} | {name: value for name, value in self.drawing().items() if value is not None}
        return self.made(CompletionRequest, fields | {"prompt": self.prompt, "suffix": self.suffix or None})


class ShowRequest(Strict):
    """POST /api/show."""

    model: Text
    verbose: bool | None = None


def add_ollama_routes(app: FastAPI, models: Models) -> None:
    """Serve these paths."""

    @app.post("/api/chat", response_model=None)
    async def ollama_chat(body: OllamaChat, request: Request) -> Response | Json:
        """Answer a conversation, in Ollama's form; without messages the model is loaded."""
        if body.messages:
            return await answered(models, body, request, partial(OllamaAnswer, True))
        return await loaded(request, body.model, {"message": {"role": "assistant", "content": ""}})

    @app.post("/api/generate", response_model=None)
    async def ollama_generate(body: OllamaGenerate, request: Request) -> Response | Json:
        """Answer a text, in Ollama's form; without a prompt the model is loaded."""
        if body.prompt or body.suffix:
            return await answered(models, body, request, partial(OllamaAnswer, False), body.asked())
        return await loaded(request, body.model, {"response": ""})

    async def loaded(request: Request, name: str, said: Json) -> Json:
        await models.of(name).run_quick(request, lambda _: None)
        return {"model": name, "created_at": _now(), **said, "done": True, "done_reason": "load"}

    @app.get("/api/tags")
    async def ollama_tags() -> Json:
        """List the models, in Ollama's form."""
        return {"models": [_entry(service) for service in models.services]}

    @app.post("/api/show")
    async def ollama_show(body: ShowRequest, request: Request) -> Json:
        """Tell of a model, in Ollama's form."""
        service = models.of(body.model.removesuffix(_TAG))
        lm = await service.run_quick(request, lambda lm: lm)
        name = lm.info.architecture
        told = {
            "general.architecture": name,
            "general.parameter_count": lm.n_params,
            f"{name}.context_length": lm.n_ctx,
        }
        can = ["completion", "tools"] if lm.info.generates else ["embedding"]
        template = service.settings.chat_template or lm.chat_template or ""
        shown = {"template": template, "parameters": "", "modelfile": "", "capabilities": can}
        return shown | {"details": _entry(service)["details"], "model_info": told}

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
        self._chat = chat
        self._model = plan.model
        self._began = time.monotonic_ns()
        self._calls: list[Part] = []
        self._reason = "stop"

    def whole(self, events: Iterable[Event]) -> Json:
        """Return the one line."""
        parts: list[Part] = []
        answer: Json = {}
        for event in events:
            if isinstance(event, Grown):
                parts += event.parts
                self._reason = "length" if event.finish == "length" else "stop"
            elif isinstance(event, Ended):
                answer = self._line(parts, parts) | self._end(event)
        return answer

    def add(self, event: Event) -> bytes:
        """Return the lines that an event adds; calls are told when all of them are complete."""
        if isinstance(event, Grown):
            self._calls += event.parts
            done = event.finish is not None
            self._reason = "length" if event.finish == "length" else "stop"
            line = self._line(event.parts, self._calls if done else ())
            told = line.get("message", line)
            return b"" if not (told.keys() & {"thinking", "tool_calls"} or text_in(event.parts)) else _written(line)
        return _written(self._line((), ()) | self._end(event)) if isinstance(event, Ended) else b""

    def failed(self, error: ApiError) -> bytes:
        """Return the line that tells of an error."""
        return _written(error.body("/api/"))

    def _line(self, parts: Iterable[Part], calls: Iterable[Part]) -> Json:
        parts, made = list(parts), calls_in(list(calls))
        said: Json = {"content" if self._chat else "response": text_in(parts)}
        if thoughts := reasoning_in(parts):
            said["thinking"] = thoughts
        if made:
            functions = [{"name": call.name, "arguments": json.loads(call.arguments or "{}")} for call in made]
            said["tool_calls"] = [{"function": function} for function in functions]
        head = {"model": self._model, "created_at": _now()}
        return head | ({"message": {"role": "assistant"} | said} if self._chat else said) | {"done": False}

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


def _written(line: Json) -> bytes:
    return dumped(line) + b"\n"


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _entry(service: Service) -> Json:
    """Tell of a model what is known: of one that is not loaded its name."""
    lm = service.host.newest
    family = "" if lm is None else lm.info.architecture
    size = "" if lm is None else f"{lm.n_params / 1e9:.1f}B"
    details = {"parent_model": "", "format": "gguf", "family": family, "families": [family] if family else []}
    details |= {"parameter_size": size, "quantization_level": ""}
    told = {"name": service.name, "model": service.name, "modified_at": _now(), "digest": ""}
    return told | {"size": 0 if lm is None else lm.n_bytes, "details": details}
