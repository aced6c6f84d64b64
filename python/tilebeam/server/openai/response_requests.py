"""The bodies of /v1/responses, and the chats that they ask for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from tilebeam.server.answer_events import Json
from tilebeam.server.chat_forms import ChatForm, FormTurn, function
from tilebeam.server.requests import (
    MAX_TOOLS,
    Effort,
    FunctionName,
    JsonSchema,
    NamedFunction,
    Neutral,
    Sampling,
    StreamOptions,
    Strict,
    Text,
    joined,
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


class ToolChoiceFunction(NamedFunction):
    """The function that must be called."""

    type: Literal["function"]


class TextFormat(JsonSchema):
    """What the text must look like."""

    type: Literal["text", "json_object", "json_schema"]


class TextField(Strict):
    """How the text is written."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # without effect


class ReasoningField(Strict):
    """How much the model thinks: a variable of its chat template. There are no summaries."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(ChatForm, Neutral, Sampling):
    """POST /v1/responses."""

    own_names = (
        (r"^messages\b", "input"),
        (r"\bresponse_format\.json_schema\b", "text.format"),
        (r"\bresponse_format\b", "text.format"),
        (r"\b(tools\[\d+\])\.function\b", r"\1"),
        (r"\btool_choice\.function\b", "tool_choice"),
        (r"\bmax_(?:completion_)?tokens\b", "max_output_tokens"),
        (r"\b(input\[\d+\])\.(?:tool_call_)?id\b", r"\1.call_id"),
    )

    input: Text | Annotated[list[MessageItem | CallItem | ResultItem | ReasoningItem], Field(min_length=1)]
    instructions: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1)
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

    @field_validator("previous_response_id", "conversation", mode="before")
    @classmethod
    def _kept(cls, _: object) -> None:
        raise ValueError(_STATELESS)

    def fields(self) -> Json:
        """Return the chat's."""
        fields: Json = self.sampling() | {"stream": self.stream, "parallel_tool_calls": self.parallel_tool_calls}
        fields["max_completion_tokens"] = self.max_output_tokens
        if self.reasoning is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        if self.stream or self.stream_options is not None:  # a chat says that these go together
            fields["stream_options"] = {"include_usage": True}
        if self.tools is not None:
            fields["tools"] = [function(tool.name, tool.description, tool.parameters) for tool in self.tools]
        choice = self.tool_choice
        fields["tool_choice"] = function(choice.name) if isinstance(choice, ToolChoiceFunction) else choice
        wanted = self.text.format if self.text is not None else None
        if wanted is not None:
            fields["response_format"] = {"type": wanted.type}
            if wanted.type == "json_schema":
                fields["response_format"]["json_schema"] = wanted.model_dump(exclude={"type"}, by_alias=True)
        return fields

    def turns(self) -> list[FormTurn]:
        """Return the messages."""
        found: list[FormTurn] = []
        if self.instructions is not None:
            found.append(FormTurn("instructions", {"role": "system", "content": self.instructions}))
        if isinstance(self.input, str):
            return [*found, FormTurn("input", {"role": "user", "content": self.input})]
        for i, item in enumerate(self.input):
            own = f"input[{i}]"
            if isinstance(item, MessageItem):
                found.append(FormTurn(own, {"role": item.role, "content": joined(item.content)}))
            elif isinstance(item, ResultItem):
                result = {"role": "tool", "tool_call_id": item.call_id, "content": joined(item.output)}
                found.append(FormTurn(own, result))
            elif isinstance(item, CallItem):
                if not found or found[-1].message["role"] != "assistant":
                    found.append(FormTurn(own, {"role": "assistant", "content": None}))
                found[-1].add_call(own, item.call_id, item.name, item.arguments)
        return found
