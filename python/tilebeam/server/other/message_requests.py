"""The bodies of /v1/messages, in the form of Anthropic's Messages API, and the chats that they ask for."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tilebeam.server.answer_events import Json
from tilebeam.server.chat_forms import ChatForm, FormTurn, function
from tilebeam.server.requests import MAX_MESSAGES, MAX_TOOLS, FunctionName, JsonObject, Sampling, Strict, Text, joined

# What the kinds of a message's pieces hold; a result's content may be left out.
_HELD = {
    "text": {"text"},
    "thinking": {"thinking"},
    "tool_use": {"id", "name", "input"},
    "tool_result": {"tool_use_id", "content"},
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def _pieces(value: object) -> object:
    """Return a content that is a text as its only piece."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _texts(pieces: list[_Piece]) -> list[_Piece]:
    if any(piece.type != "text" for piece in pieces):
        raise ValueError('must be a text or a list of pieces {"type": "text", "text": ..}')
    return pieces


class _Piece(Strict):
    type: Literal["text", "thinking", "tool_use", "tool_result"]
    text: Text = ""
    thinking: Text = ""
    id: Text = ""
    name: FunctionName = "_"
    input: JsonObject = Field(default_factory=dict)
    tool_use_id: Text = ""
    content: Annotated[list[_Piece], BeforeValidator(_pieces), AfterValidator(_texts)] = Field(default_factory=list)
    # Without effect: all prompts are cached, nobody checks thoughts, and a result's text says what went wrong.
    cache_control: dict[str, Any] | None = None
    signature: str | None = None
    is_error: bool | None = None
    citations: list[Any] | None = Field(None, max_length=0)

    @model_validator(mode="after")
    def _fits_its_type(self) -> _Piece:
        held, found = _HELD[self.type], self.model_fields_set & set().union(*_HELD.values())
        if found != held and found != held - {"content"}:
            raise ValueError(f"a piece of type {self.type} has {', '.join(sorted(held))}")
        return self


_Content = Annotated[list[_Piece], BeforeValidator(_pieces)]


class _Turn(Strict):
    role: Literal["user", "assistant", "system"]
    content: Annotated[_Content, Field(min_length=1)]


class _Tool(Strict):
    type: Literal["custom"] | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: dict[str, Any]
    # Without effect:
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None


class _ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class _Thinking(Strict):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=0)
    display: str | None = None


class _Format(Strict):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class _Output(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _Format | None = None


class CountRequest(ChatForm):
    """POST /v1/messages/count_tokens: what the model reads."""

    own_names = (
        (r"\b(tools\[\d+\])\.function\.parameters\b", r"\1.input_schema"),
        (r"\b(tools\[\d+\])\.function\b", r"\1"),
        (r"\bresponse_format(?:\.json_schema)?(\.schema)?\b", r"output_config.format\1"),
        (r"\btool_choice\.function\b", "tool_choice"),
        (r"\b(content\[\d+\])\.arguments\b", r"\1.input"),
        (r"\b(content\[\d+\])\.tool_call_id\b", r"\1.tool_use_id"),
        (r"\bcontinue_final_message\b", "a last message of the assistant's"),
        (r"^stop\b", "stop_sequences"),
        (r"\bset tool_choice to none\b", 'set tool_choice to {"type": "none"}'),
    )

    messages: list[_Turn] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: Annotated[_Content, AfterValidator(_texts)] = Field(default_factory=list)
    tools: list[_Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _Output = Field(default_factory=_Output)
    # Without effect:
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None

    def fields(self) -> Json:
        """Return the chat's."""
        effort = self.output_config.effort
        fields: Json = {"reasoning_effort": "xhigh" if effort == "max" else effort}
        if self.tools:
            fields["tools"] = [function(tool.name, tool.description, tool.input_schema) for tool in self.tools]
        if (choice := self.tool_choice) is not None:
            fields["tool_choice"] = _CHOICES.get(choice.type) or function(choice.name or "")
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if (form := self.output_config.format) is not None:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
        if self.thinking is not None and self.thinking.type == "disabled":
            fields["reasoning_effort"] = "none"  # otherwise the model's and the server's default holds
        elif self.thinking is not None:
            fields["thinking_budget_tokens"] = self.thinking.budget_tokens
        if self.messages[-1].role == "assistant" and self.messages[-1].content[-1].type != "tool_use":
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        return fields

    def turns(self) -> list[FormTurn]:
        """Return the messages: one for each of theirs, and one for each result of a call."""
        found: list[FormTurn] = []
        if said := joined(self.system):
            found.append(FormTurn("system", {"role": "system", "content": said}))
        for i, message in enumerate(self.messages):
            turn: FormTurn | None = None
            for j, piece in enumerate(message.content):
                own = f"messages[{i}].content[{j}]"
                if piece.type == "tool_result":
                    result = {"role": "tool", "tool_call_id": piece.tool_use_id, "content": joined(piece.content)}
                    found.append(FormTurn(own, result))
                    turn = None
                    continue
                if turn is None:
                    turn = FormTurn(f"messages[{i}]", {"role": message.role, "content": "", "reasoning_content": ""})
                    found.append(turn)
                turn.message["content"] += piece.text
                turn.message["reasoning_content"] += piece.thinking
                if piece.type == "tool_use":
                    turn.add_call(own, piece.id, piece.name, json.dumps(piece.input))
        return found


class MessagesRequest(CountRequest, Sampling):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[Text] | None = None
    stream: bool = False
    # Without effect:
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    def fields(self) -> Json:
        """Return the chat's."""
        told = {"max_tokens": self.max_tokens, "stream": self.stream, "stop": self.stop_sequences}
        return super().fields() | self.sampling() | told
