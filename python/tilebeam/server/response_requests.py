"""The bodies of /v1/responses, and the chats that they ask for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tilebeam.server.requests import MAX_TOOLS, ChatRequest, FunctionName, Number, StreamOptions, Strict, Text

_STATELESS = "is not taken: this server keeps no answers; send the whole conversation as input"


class InputPart(Strict):
    """A piece of a message's content."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    # As in an answer that is sent back:
    annotations: list[Any] | None = Field(None, max_length=0)
    logprobs: list[Any] | None = Field(None, max_length=0)


class _Item(Strict):
    id: Text | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageItem(_Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | list[InputPart]
    phase: Literal["commentary", "final_answer"] | None = None

    @property
    def text(self) -> str:
        """The content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class CallItem(_Item):
    """A call of a function that the model wrote."""

    type: Literal["function_call"]
    call_id: Text
    name: FunctionName
    arguments: Text


class ResultItem(_Item):
    """What a function gave."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Text | list[InputPart]


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(Strict):
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


class TextOptions(Strict):
    """How the text is written."""

    format: TextFormat | None = None


class ResponsesRequest(Strict):
    """POST /v1/responses."""

    model: Text | None = None
    input: Text | Annotated[list[MessageItem | CallItem | ResultItem], Field(min_length=1)]
    instructions: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: Number | None = Field(None, ge=0, le=100)
    top_p: Number | None = Field(None, gt=0, le=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # Of OpenAI's API, without effect on the text:
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    include: list[Any] | None = Field(None, max_length=0)
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    previous_response_id: None = None
    conversation: None = None
    # Extensions, as for chats:
    seed: int | None = None
    top_k: int | None = Field(None, ge=0, lt=2**31)
    min_p: Number | None = Field(None, ge=0, lt=1)

    @field_validator("stream", mode="before")
    @classmethod
    def _flag_default(cls, value: object) -> object:
        return False if value is None else value

    @field_validator("previous_response_id", "conversation", mode="before")
    @classmethod
    def _kept(cls, value: object) -> None:
        if value is not None:
            raise ValueError(_STATELESS)

    @model_validator(mode="after")
    def _fits_together(self) -> ResponsesRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options go with stream: true")
        return self

    def chat(self) -> ChatRequest:
        """The same as a request of /v1/chat/completions.

        Raises:
            ValidationError: what does not fit together.
        """
        same = ("model", "temperature", "top_p", "seed", "top_k", "min_p", "stream", "parallel_tool_calls")
        fields: dict[str, Any] = {name: getattr(self, name) for name in same}
        fields["messages"] = self._messages()
        fields["max_completion_tokens"] = self.max_output_tokens
        if self.stream:
            fields["stream_options"] = {"include_usage": True}
        if self.tools is not None:
            fields["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in self.tools
            ]
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        else:
            fields["tool_choice"] = choice
        wanted = self.text.format if self.text is not None else None
        if wanted is not None:
            schema = wanted.model_dump(include={"name", "description", "strict"})
            fields["response_format"] = {"type": wanted.type}
            if wanted.type == "json_schema":
                fields["response_format"]["json_schema"] = schema | {"schema": wanted.schema_ or {}}
        return ChatRequest.model_validate(fields)

    def _messages(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if self.instructions is not None:
            found.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*found, {"role": "user", "content": self.input}]
        for item in self.input:
            if isinstance(item, MessageItem):
                found.append({"role": item.role, "content": item.text})
            elif isinstance(item, ResultItem):
                text = item.output if isinstance(item.output, str) else "".join(part.text for part in item.output)
                found.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
            else:
                if not found or found[-1]["role"] != "assistant":
                    found.append({"role": "assistant", "content": None, "tool_calls": []})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                found[-1].setdefault("tool_calls", []).append(call)
        return found
