"""The bodies of /v1/responses, and the chats that they ask for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from tilebeam.server.errors import ApiError, from_validation
from tilebeam.server.requests import (
    MAX_TOOLS,
    ChatRequest,
    Effort,
    FunctionName,
    Neutral,
    Number,
    StreamOptions,
    Strict,
    Text,
    joined,
)

# A chat's fields in errors, and what they are made of.
_IN_MESSAGE = re.compile(r"\bmessages\[(\d+)\]((?:\.\w+(?:\[\d+\])?)*)")
_OWN_NAMES = (
    (r"^messages\b", "input"),
    (r"\bresponse_format\.json_schema\b", "text.format"),
    (r"\bresponse_format\b", "text.format"),
    (r"\b(tools\[\d+\])\.function\b", r"\1"),
    (r"\btool_choice\.function\b", "tool_choice"),
    (r"\bmax_(?:completion_)?tokens\b", "max_output_tokens"),
)

Included = Literal[
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]

_STATELESS = "is not taken: this server keeps no answers; send the whole conversation as input"


class InputPart(Strict):
    """A piece of a message's content."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    # As in an answer that is sent back:
    annotations: list[Any] | None = Field(None, max_length=0)
    logprobs: list[Any] | None = Field(None, max_length=0)


class _InputItem(Strict):
    id: Text | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(_InputItem):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | list[InputPart]
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(_InputItem):
    """A call of a function that the model wrote."""

    type: Literal["function_call"]
    call_id: Text
    name: FunctionName
    arguments: Text


class ResultItem(_InputItem):
    """What a function gave."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Text | list[InputPart]


class ReasoningItem(_InputItem):
    """Thoughts of an earlier answer, which are not read again."""

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: list[Any] | None = None
    encrypted_content: str | None = None


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceFunction(Strict):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class TextFormat(Strict):
    """What the text must look like."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextField(Strict):
    """How the text is written."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # without effect


class ReasoningField(Strict):
    """How much the model thinks: a variable of its chat template. There are no summaries."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


@dataclass
class _Place:
    """Where a message of the chat comes from.

    Attributes:
        own: the field.
        calls: the fields of its calls.
    """

    own: str
    calls: list[str] = dataclass_field(default_factory=list)

    def of(self, part: str) -> str:
        """Return the field that a part of the message is made of."""
        if call := re.match(r"\.tool_calls\[(\d+)\](?:\.function)?", part):
            return self.calls[int(call[1])] + part[call.end() :].replace(".id", ".call_id")
        return self.own + part.replace(".tool_calls", "").replace(".tool_call_id", ".call_id")


class ResponsesRequest(Neutral):
    """POST /v1/responses."""

    model: Text | None = None
    input: Text | Annotated[list[MessageItem | CallItem | ResultItem | ReasoningItem], Field(min_length=1)]
    instructions: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: Number | None = Field(None, ge=0, le=100)
    top_p: Number | None = Field(None, gt=0, le=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    text: TextField | None = None
    reasoning: ReasoningField | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceFunction | None = None
    parallel_tool_calls: bool | None = None
    # Of OpenAI's API, without effect on the text, beside those of `Neutral`:
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    # Of tools that are not there, and thoughts that are not hidden.
    include: list[Included] | None = Field(None, max_length=16)
    previous_response_id: None = None
    conversation: None = None
    # Extensions, as for chats:
    seed: int | None = None
    top_k: int | None = Field(None, ge=0, lt=2**31)
    min_p: Number | None = Field(None, ge=0, lt=1)

    @field_validator("previous_response_id", "conversation", mode="before")
    @classmethod
    def _kept(cls, _: object) -> None:
        raise ValueError(_STATELESS)

    @model_validator(mode="after")
    def _fits_together(self) -> ResponsesRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options go with stream: true")
        return self

    def chat(self) -> ChatRequest:
        """Return the same as a request of /v1/chat/completions.

        Raises:
            ApiError: what does not fit together.
        """
        same = ("model", "temperature", "top_p", "seed", "top_k", "min_p", "stream", "parallel_tool_calls")
        fields: dict[str, Any] = {name: getattr(self, name) for name in same}
        fields["messages"], _ = self._messages()
        fields["max_completion_tokens"] = self.max_output_tokens
        if self.reasoning is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        if self.stream:
            fields["stream_options"] = {"include_usage": True}
        if self.tools is not None:
            fields["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools
            ]
        choice = self.tool_choice
        if isinstance(choice, ToolChoiceFunction):
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        else:
            fields["tool_choice"] = choice
        wanted = self.text.format if self.text is not None else None
        if wanted is not None:
            schema = wanted.model_dump(include={"name", "description", "strict"})
            fields["response_format"] = {"type": wanted.type}
            if wanted.type == "json_schema":
                fields["response_format"]["json_schema"] = schema | {"schema": wanted.schema_ or {}}
        try:
            return ChatRequest.model_validate(fields)
        except ValidationError as error:
            raise self.as_sent(from_validation(error)) from None

    def as_sent(self, error: ApiError) -> ApiError:
        """Return an error of the chat, which names the fields of this request."""
        _, places = self._messages()

        def renamed(text: str) -> str:
            text = _IN_MESSAGE.sub(lambda found: places[int(found[1])].of(found[2]), text)
            for field, own in _OWN_NAMES:
                text = re.sub(field, own, text)
            return text

        param = None if error.param is None else renamed(error.param)
        return ApiError(
            error.status, renamed(error.message), code=error.code, param=param, retry_after=error.retry_after
        )

    def _messages(self) -> tuple[list[dict[str, Any]], list[_Place]]:
        """Return the chat's messages, and where each comes from."""
        found: list[dict[str, Any]] = []
        places: list[_Place] = []
        if self.instructions is not None:
            found.append({"role": "system", "content": self.instructions})
            places.append(_Place("instructions"))
        if isinstance(self.input, str):
            return [*found, {"role": "user", "content": self.input}], [*places, _Place("input")]
        for i, item in enumerate(self.input):
            if isinstance(item, ReasoningItem):
                continue
            if not isinstance(item, CallItem):
                places.append(_Place(f"input[{i}]"))
            if isinstance(item, MessageItem):
                found.append({"role": item.role, "content": joined(item.content)})
            elif isinstance(item, ResultItem):
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": joined(item.output)})
            else:
                if not found or found[-1]["role"] != "assistant":
                    found.append({"role": "assistant", "content": None, "tool_calls": []})
                    places.append(_Place(f"input[{i}]"))
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                found[-1].setdefault("tool_calls", []).append(call)
                places[-1].calls.append(f"input[{i}]")
        return found, places
