"""The bodies of requests: what OpenAI's API has and Tilebeam can do, with its extensions, checked field by field.

Whatever is not listed is refused by name: a parameter that would change the result is never ignored in silence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from tilebeam.chat.tools import Tool
from tilebeam.grammars.gbnf import MAX_LENGTH as MAX_GRAMMAR
from tilebeam.search.search_defaults import BUDGET

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_BIASES = 4096
MAX_CHOICES = 1024
MAX_TOOLS = 128
MAX_MESSAGES = 8192
MAX_DEPTH = 64  # of JSON within a request
MAX_PATTERN = 4096  # characters of a regular expression


def _encodable(value: str) -> str:
    """Return a text that has a UTF-8 form."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("must be text, but holds half of a surrogate pair") from None
    return value


def _no_zero(value: int) -> int:
    """Return a number of tokens that is one, or -1."""
    if value == 0:
        raise ValueError("must be at least 1, or -1: until the context is full")
    return value


def _parsed_schema(value: dict[str, Any] | bool | str) -> dict[str, Any] | bool:
    """Return a schema, which may come as a text."""
    if not isinstance(value, str):
        return value
    try:
        schema = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise ValueError("must be a JSON schema")
    return schema


def _checked_choices(value: list[str]) -> list[str]:
    """Return texts of which the model writes one."""
    if not all(value) or any("\0" in choice for choice in value):
        raise ValueError("a choice must not be empty, nor hold a NUL character")
    return value


Text = Annotated[str, AfterValidator(_encodable)]
# Templates write names and ids as they are: none holds what separates the parts of a prompt.
Label = Annotated[str, Field(pattern=r"^[^\s<>|\\\x00-\x1f\x7f]{0,256}$")]
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")]
Number = Annotated[float, Field(allow_inf_nan=False)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
# What an effort is of the most tokens of thoughts that the server was started with; others are all of it.
_EFFORTS = {"none": 0.0, "minimal": 1 / 16, "low": 1 / 4, "medium": 1 / 2}
MostTokens = Annotated[int, Field(ge=-1), AfterValidator(_no_zero)]
Schema = Annotated[dict[str, Any] | bool | Text, AfterValidator(_parsed_schema)]
Pattern = Annotated[Text, Field(max_length=MAX_PATTERN)]
Grammar = Annotated[Text, Field(max_length=MAX_GRAMMAR)]
Choices = Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES), AfterValidator(_checked_choices)]


def _shallow(value: Any, depth: int = MAX_DEPTH) -> bool:
    """Return whether JSON is nested no deeper than `depth`."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth > 0 and all(_shallow(item, depth - 1) for item in inner)


def _not_deep(value: dict[str, Any]) -> dict[str, Any]:
    if not _shallow(value):
        raise ValueError(f"is nested deeper than {MAX_DEPTH}")
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_not_deep)]


def given(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an object that say something: null is a field that is left out."""
    return {name: value for name, value in fields.items() if value is not None}


class Strict(BaseModel):
    """Unknown fields and values of another type are errors. Clients that write all fields they know write null for
    those that say nothing."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        return given(value) if isinstance(value, dict) else value


class StreamOptions(Strict):
    """How to stream."""

    include_usage: bool = False
    include_obfuscation: bool = False  # OpenAI's clients may send it; nothing is padded here


class JsonSchema(Strict):
    """The schema of `response_format`."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(default_factory=dict, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What the text must look like. `schema` of a json_object is an extension, as llama-server and llama-cpp-python
    take it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _complete(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError('"json_schema" goes with type "json_schema" and only with it')
        if self.schema_ is not None and self.type != "json_object":
            raise ValueError('"schema" by itself goes with type "json_object" and only with it')
        return self


class Search(Strict):
    """Spend more compute: an extension. Further fields are the method's options."""

    model_config = ConfigDict(extra="allow")

    method: Text
    budget: int = Field(BUDGET, ge=1)
    scorer: Text | None = None
    candidates: bool = False
    page: bool = False


class StructuredOutputs(Strict):
    """What the text must look like, as clients of vLLM say it: one of the four."""

    json_: Schema | None = Field(None, alias="json")
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Grammar | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        given = (self.json_, self.regex, self.choice, self.grammar)
        if len(given) - given.count(None) != 1:
            raise ValueError("takes one of json, regex, choice and grammar")
        return self


class Neutral(Strict):
    """Fields that clients send and that change no result."""

    # Of OpenAI's API:
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    # Of llama-server's:
    cache_prompt: bool | None = None  # saves time only; the server's own setting holds
    id_slot: int | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    t_max_prompt_ms: Number | None = None  # llama-server reads a prompt to its end, too
    # Of vLLM's:
    request_id: str | None = None
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None


class Sampling(Strict):
    """How tokens are drawn, as all forms say it but for where they do."""

    temperature: Number | None = Field(default=None, ge=0, le=100)
    top_p: Number | None = Field(default=None, gt=0, le=1)
    seed: int | None = None
    # Extensions, named as llama-server names them:
    top_k: int | None = Field(default=None, ge=0, lt=2**31)
    min_p: Number | None = Field(default=None, ge=0, lt=1)

    def sampling(self) -> dict[str, Any]:
        """Return these fields."""
        return {name: getattr(self, name) for name in Sampling.model_fields}


class Generation(Neutral, Sampling):
    """What both kinds of requests share.

    temperature, top_p, top_k, min_p and repeat_penalty default to what the server was started with; max_tokens too
    (for completions OpenAI's 16).
    """

    model: Text | None = None
    n: int = Field(1, ge=1)
    presence_penalty: Number = Field(0.0, ge=-2, le=2)
    frequency_penalty: Number = Field(0.0, ge=-2, le=2)
    logit_bias: dict[str, Number] | None = None
    max_tokens: MostTokens | None = None
    stop: Text | list[Text] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # Extensions, named as llama-server names them:
    repeat_penalty: Number | None = Field(None, gt=0)
    ignore_eos: bool = False
    grammar: Grammar | None = None
    json_schema: dict[str, Any] | bool | None = None
    # -1: any number. The second name is vLLM's.
    thinking_budget_tokens: int | None = Field(
        None, ge=-1, validation_alias=AliasChoices("thinking_budget_tokens", "thinking_token_budget")
    )
    reasoning_budget_message: Annotated[Text, Field(max_length=MAX_PATTERN)] | None = None
    search: Search | None = None
    # Named as vLLM names them:
    structured_outputs: StructuredOutputs | None = None
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOPS)

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: str | list[str]) -> list[str]:
        stops = [value] if isinstance(value, str) else value
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings, not {len(stops)}")
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        if any(len(s) > 1024 for s in stops):
            raise ValueError("a stop string must not be longer than 1024 characters")
        return stops

    @field_validator("logit_bias")
    @classmethod
    def _biases(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value is not None and len(value) > MAX_BIASES:
            raise ValueError(f"at most {MAX_BIASES} tokens, not {len(value)}")
        for token, bias in (value or {}).items():
            if not token.isascii() or not token.isdecimal() or len(token) > 9:
                raise ValueError(f"keys must be token ids, not {token[:40]!r}")
            if not -100 <= bias <= 100:
                raise ValueError(f"must be between -100 and 100, not {bias:g}")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Generation:
        if len(self.formats) > 1:
            raise ValueError(f"{' and '.join(self.formats)} exclude each other")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options go with stream: true")
        if self.stop_token_ids and self.search is not None:
            raise ValueError("stop_token_ids do not go with search")
        if self.search is not None and self.min_tokens:
            raise ValueError("a search ends its texts itself: no min_tokens")
        if self.search is not None and self.n > 1:
            raise ValueError("a search returns one text: no n; set its budget")
        return self

    @property
    def biases(self) -> dict[int, float] | None:
        """logit_bias by token; OpenAI's -100 bans a token."""
        if not self.logit_bias:
            return None
        return {int(t): -math.inf if b <= -100 else b for t, b in self.logit_bias.items()}

    @property
    def formats(self) -> list[str]:
        """Which fields bind the text; one at most."""
        given = ("grammar", "json_schema", "structured_outputs")
        formatted = self.response_format is not None and self.response_format.type != "text"
        return [*(n for n in given if getattr(self, n) is not None), *(["response_format"] if formatted else [])]

    @property
    def restricted(self) -> bool:
        """Return whether some tokens may not follow some texts."""
        return bool(self.formats or self.logit_bias)

    @property
    def votes_by(self) -> str | None:
        """Return what extractor the form of the text asks for, None: it has none."""
        format_ = self.response_format.type if self.response_format is not None else ""
        structured = self.structured_outputs is not None and self.structured_outputs.json_ is not None
        json_ = structured or self.json_schema is not None or format_ in ("json_object", "json_schema")
        return "json" if json_ else None

    def limit(self, otherwise: int | None) -> int | None:
        """Return the most tokens of a sample; None: until the context is full.

        Args:
            otherwise: where the request does not say.
        """
        given = self.max_tokens
        return otherwise if given is None else None if given < 0 else given

    def thinking_budget(self, most: int | None) -> int | None:
        """Return the most tokens of thoughts; None: any number.

        Args:
            most: what the server was started with, of which an effort is a share.
        """
        told, effort = self.thinking_budget_tokens, getattr(self, "reasoning_effort", None) or ""
        if told is not None:
            return None if told < 0 else told
        return 0 if effort == "none" else None if most is None else int(most * _EFFORTS.get(effort, 1))

    @property
    def samples(self) -> int:
        """Texts to draw for each prompt."""
        return self.search.budget if self.search is not None else self.n


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: Text | list[int] | list[Text] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)


def each_of(given: str | Sequence[int | str | list[int]]) -> list[str | list[int]]:
    """Return the inputs of a field that takes one or several, each a text or token ids."""
    if isinstance(given, str):
        return [given]
    tokens = [item for item in given if isinstance(item, int)]
    return [tokens] if tokens else [item for item in given if not isinstance(item, int)]


class TextPart(Strict):
    """A piece of a message's content."""

    type: Literal["text"]
    text: Text


def joined(content: Any) -> str:
    """Return a message's content, which may come in pieces of any API, as one text; without any an empty one."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


class Function(Strict):
    """A function that the model may call."""

    name: FunctionName
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ToolField(Strict):
    """What the model may use: functions, and nothing else."""

    type: Literal["function"]
    function: Function


class CalledFunction(Strict):
    """A call in an earlier turn."""

    name: FunctionName
    arguments: Text

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, value: str) -> str:
        try:
            found = json.loads(value or "{}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is no JSON: {error}") from None
        if not isinstance(found, dict) or not _shallow(found):
            raise ValueError(f"must be a JSON object, as a text, nested no deeper than {MAX_DEPTH}")
        return value


class ToolCallField(Strict):
    """A call in an earlier turn, with its id."""

    id: Text = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # as in a stream


class NamedFunction(Strict):
    """The function that must be called."""

    name: str


class NamedTool(Strict):
    """A tool_choice of one function."""

    type: Literal["function"]
    function: NamedFunction


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[TextPart] | None = None
    name: Label | None = None
    tool_calls: list[ToolCallField] | None = Field(None, max_length=MAX_TOOLS)
    tool_call_id: Label | None = None
    # As in an answer that is sent back:
    annotations: list[Any] | None = Field(None, max_length=0)
    reasoning_content: Text | None = None

    @model_validator(mode="after")
    def _is_whole(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are the assistant's")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError("tool_call_id goes with role tool")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is required")
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return it as the library takes it."""
        told = self.model_dump(exclude={"annotations", "content"}, exclude_none=True)
        return told | {"content": joined(self.content)}


class ChatRequest(Generation):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    max_completion_tokens: MostTokens | None = None
    reasoning_effort: Effort | None = None
    reasoning_format: Literal["auto", "deepseek", "none"] | None = None
    tools: list[ToolField] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # Accepted as long as they ask for what is done anyway:
    modalities: list[Literal["text"]] | None = None
    # Named as vLLM names them:
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[Label, Any] | None = Field(None, max_length=64)

    @field_validator("tools")
    @classmethod
    def _told_apart(cls, value: list[ToolField] | None) -> list[ToolField] | None:
        names = [tool.function.name for tool in value or ()]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two functions are named {twice[0]!r}")
        return value

    @model_validator(mode="after")
    def _chat_fits_together(self) -> ChatRequest:
        if self.continue_final_message and (len(self.messages) < 2 or self.messages[-1].role != "assistant"):
            raise ValueError("continue_final_message: the last of several messages must be the assistant's")
        if self.add_generation_prompt is not None and self.add_generation_prompt == bool(self.continue_final_message):
            raise ValueError("add_generation_prompt is false with continue_final_message and true without")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs go with logprobs: true")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice goes with tools")
        if self.calls and self.formats:
            raise ValueError(f"{self.formats[0]} with tools: set tool_choice to none")
        if self.calls and self.search is not None and self.search.method == "tir":
            raise ValueError("search.method tir with tools: programs or functions, not both; set tool_choice to none")
        if self.calls and self.continue_final_message:
            raise ValueError("continue_final_message with tools: set tool_choice to none")
        if self.continue_final_message and self.messages[-1].tool_calls:
            raise ValueError("continue_final_message: a message that calls functions cannot be continued")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens are two names of one number, but differ")
        return self

    @property
    def template_variables(self) -> dict[str, Any]:
        """Return what the request sets for its chat template, effort as in llama-server: "none" turns thoughts off."""
        told = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort == "none":
            told.pop("reasoning_effort", None)
            return told | {"enable_thinking": False}
        return told if self.reasoning_effort is None else told | {"reasoning_effort": self.reasoning_effort}

    @property
    def functions(self) -> list[Tool]:
        """The functions, as the library takes them."""
        given = [tool.function for tool in self.tools or ()]
        return [Tool(f.name, f.description or "", f.parameters) for f in given]

    @property
    def calls(self) -> bool:
        """Return whether the model may call functions."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def votes_by(self) -> str | None:
        """See `Generation.votes_by`."""
        return "calls" if self.calls else super().votes_by

    @property
    def restricted(self) -> bool:
        """See `Generation.restricted`."""
        return super().restricted or (self.calls and self.tool_choice not in (None, "auto"))

    def limit(self, otherwise: int | None) -> int | None:
        """See `Generation.limit`."""
        if self.max_completion_tokens is None:
            return super().limit(otherwise)
        return None if self.max_completion_tokens < 0 else self.max_completion_tokens
