"""The bodies of /v1/messages, in the form of Anthropic's Messages API, and the chats that they ask for."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from tilebeam.server.answer_events import Json
from tilebeam.server.chat_forms import ChatForm, FormTurn, function
from tilebeam.server.requests import MAX_MESSAGES, MAX_TOOLS, FunctionName, Number, Strict, Text, joined


class _Block(Strict):
    """A piece of a message. All prompts are cached, whatever `cache_control` says."""

    cache_control: dict[str, Any] | None = None


class TextBlock(_Block):
    """Text."""

    type: Literal["text"]
    text: Text
    citations: list[Any] | None = Field(None, max_length=0)


class ThinkingBlock(_Block):
    """Thoughts of an earlier answer."""

    type: Literal["thinking"]
    thinking: Text
    signature: str | None = None


class ToolUseBlock(_Block):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: Text
    name: FunctionName
    input: dict[str, Any]


def _blocks(value: object) -> object:
    """Return a content that is a text as its only piece."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Texts = Annotated[list[TextBlock], BeforeValidator(_blocks)]


class ToolResultBlock(_Block):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Texts | None = None
    is_error: bool | None = None  # the model learns it of the content


AnyBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class TurnMessage(Strict):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[AnyBlock], BeforeValidator(_blocks), Field(min_length=1)]


class ClientTool(_Block):
    """A function that the model may call; the client runs it."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None


class ToolChoiceField(Strict):
    """Whether the model calls functions."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingField(Strict):
    """Whether the model thinks. There is no budget for thoughts."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(Strict):
    """The schema that the text must follow."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputField(Strict):
    """How much the model thinks, and what the text must look like."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


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
        (r"\bset tool_choice to none\b", 'set tool_choice to {"type": "none"}'),
    )

    messages: list[TurnMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: Texts | None = None
    tools: list[ClientTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoiceField | None = None
    thinking: ThinkingField | None = None
    output_config: OutputField | None = None
    # Without effect: what they would save is saved anyway, or they clear what need not be cleared.
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None

    @field_validator("tool_choice")
    @classmethod
    def _named(cls, value: ToolChoiceField | None) -> ToolChoiceField | None:
        if value is not None and (value.type == "tool") != (value.name is not None):
            raise ValueError('name goes with type "tool" and only with it')
        return value

    def fields(self) -> Json:
        """Return the chat's."""
        fields: Json = {}
        if self.tools:
            fields["tools"] = [function(tool.name, tool.description, tool.input_schema) for tool in self.tools]
        if (choice := self.tool_choice) is not None:
            kinds = {"auto": "auto", "any": "required", "none": "none"}
            fields["tool_choice"] = kinds.get(choice.type) or function(choice.name)
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if (output := self.output_config) is not None:
            fields["reasoning_effort"] = "xhigh" if output.effort == "max" else output.effort
            if output.format is not None:
                fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": output.format.schema_}}
        if self.thinking is not None and self.thinking.type == "disabled":
            fields["reasoning_effort"] = "none"
        elif self.thinking is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": True}
        last = self.messages[-1]
        if last.role == "assistant" and not any(isinstance(block, ToolUseBlock) for block in last.content):
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        return fields

    def turns(self) -> list[FormTurn]:
        """Return the messages: one for each of theirs, and one for each result of a call."""
        found: list[FormTurn] = []
        if self.system:
            found.append(FormTurn("system", {"role": "system", "content": joined(self.system)}))
        for i, message in enumerate(self.messages):
            turn: FormTurn | None = None
            for j, block in enumerate(message.content):
                own = f"messages[{i}].content[{j}]"
                if isinstance(block, ToolResultBlock):
                    told = {"role": "tool", "tool_call_id": block.tool_use_id, "content": joined(block.content)}
                    found.append(FormTurn(own, told))
                    turn = None
                    continue
                if turn is None:
                    turn = FormTurn(f"messages[{i}]", {"role": message.role, "content": ""})
                    found.append(turn)
                if isinstance(block, TextBlock):
                    turn.message["content"] += block.text
                elif isinstance(block, ThinkingBlock):
                    turn.message["reasoning_content"] = turn.message.get("reasoning_content", "") + block.thinking
                else:
                    turn.add_call(own, {"name": block.name, "arguments": json.dumps(block.input)}, block.id)
        return found


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[Text] | None = None
    stream: bool = False
    temperature: Number | None = Field(None, ge=0, le=100)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    top_p: Number | None = Field(None, gt=0, le=1)
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    seed: int | None = None  # an extension, as for chats

    def fields(self) -> Json:
        """Return the chat's."""
        same = ("max_tokens", "stream", "temperature", "top_k", "top_p", "seed")
        return super().fields() | {name: getattr(self, name) for name in same} | {"stop": self.stop_sequences}
