"""Frameworks that talk to an OpenAI server, as their users call them, and the way in which coding assistants read
streams of calls. The frameworks are tested where they are installed: their dependencies are too many for the project's
own."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel, Field

pytest.importorskip("openai", reason="the openai client is not installed (extra test)")
pytest.importorskip("httpx", reason="httpx is not installed (extra test)")
pytest.importorskip("fastapi", reason="the server's packages are not installed (extra server)")

from server_kit import HI, Running

FILE = {
    "type": "object",
    "properties": {"path": {"type": "string", "maxLength": 12}, "lines": {"type": "integer", "minimum": 1}},
    "required": ["path", "lines"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "read_file", "description": "Read a file", "parameters": FILE}},
    {"type": "function", "function": {"name": "list_files", "parameters": {"type": "object", "properties": {}}}},
]


class Place(BaseModel):
    """A place."""

    country: str = Field(pattern="^(CH|AT)$")
    people: int = Field(ge=1, le=9)


def needs(package: str, install: str) -> pytest.MarkDecorator:
    """Skips a test where a package is missing, and says what to install."""
    try:
        missing = importlib.util.find_spec(package) is None
    except ModuleNotFoundError:  # what the package is in
        missing = True
    return pytest.mark.skipif(missing, reason=f"{package} is not installed: pip install {install}")


# --- calls put together from a stream, as coding assistants do --------------------------------------------------------


def put_together(chunks: Any) -> tuple[str, list[dict[str, Any]], list[str], Any]:
    """Text, calls, reasons to finish and usage of a stream of one choice: calls are added up by their index alone."""
    text, calls, reasons, usage = "", [], [], None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            if choice.finish_reason:
                reasons.append(choice.finish_reason)
            for part in choice.delta.tool_calls or []:
                if part.index == len(calls):
                    calls.append({"id": part.id, "type": part.type, "function": {"name": "", "arguments": ""}})
                function = calls[part.index]["function"]
                function["name"] += part.function.name or ""
                function["arguments"] += part.function.arguments or ""
    return text, calls, reasons, usage


def test_calls_are_assembled_and_answered(client: Any) -> None:
    """A turn of an agent: calls from a stream, their results sent back, and on."""
    options: Any = {"model": "tiny", "tools": TOOLS, "max_tokens": 300, "stream_options": {"include_usage": True}}
    for seed in range(4):
        chunks = client.chat.completions.create(
            messages=HI, tool_choice="required", parallel_tool_calls=True, seed=seed, stream=True, **options
        )
        text, calls, reasons, usage = put_together(chunks)
        if len(calls) > 1:
            break
    else:
        pytest.fail("no seed gives several calls")
    assert (text, reasons) == ("", ["tool_calls"])
    assert usage.completion_tokens > 0
    assert len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        if call["function"]["name"] == "read_file":
            jsonschema.validate(json.loads(call["function"]["arguments"]), FILE)
        else:
            assert (call["type"], call["function"]["name"]) == ("function", "list_files")
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "one two"} for call in calls]
    talk = [*HI, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    options |= {"max_tokens": 8}
    text, calls, reasons, _ = put_together(
        client.chat.completions.create(messages=talk, stream=True, seed=1, **options)
    )
    assert text
    assert not calls
    assert reasons[0] in ("length", "stop")


# --- LangChain --------------------------------------------------------------------------------------------------------

langchain = needs("langchain_openai", "langchain-openai")


def chat_model(server: Running, **options: Any) -> Any:
    from langchain_openai import ChatOpenAI

    defaults = {"model": "tiny", "api_key": "none", "seed": 1, "max_tokens": 200, "max_retries": 0}
    return ChatOpenAI(base_url=f"{server.url}/v1", **defaults | options)


@langchain
def test_langchain_chats_and_streams(server: Running) -> None:
    model = chat_model(server, max_tokens=12, stream_usage=True)
    talk = [("system", "answer"), ("human", "how many")]
    whole = model.invoke(talk)
    chunks = list(model.stream(talk))
    assert whole.content
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert len(chunks) > 3
    told = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert told[-1]["output_tokens"] == whole.usage_metadata["output_tokens"] == 12
    assert whole.response_metadata["finish_reason"] == "length"
    assert [m.content for m in model.batch([talk, talk])] == [whole.content] * 2


@langchain
def test_langchain_calls_tools(server: Running) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    model = chat_model(server)
    bound = model.bind_tools(TOOLS, tool_choice="any")
    said = bound.invoke("hi")
    assert said.tool_calls
    for call in said.tool_calls:
        if call["name"] == "read_file":
            jsonschema.validate(call["args"], FILE)
    whole = None
    for chunk in bound.stream("hi"):
        whole = chunk if whole is None else whole + chunk
    assert [(c["name"], c["args"]) for c in whole.tool_calls] == [(c["name"], c["args"]) for c in said.tool_calls]
    results = [ToolMessage("noon", tool_call_id=call["id"]) for call in said.tool_calls]
    answer = chat_model(server, max_tokens=6).bind_tools(TOOLS).invoke([HumanMessage("hi"), said, *results])
    assert answer.content
    named = model.bind_tools(TOOLS, tool_choice="read_file", parallel_tool_calls=False).invoke("hi")
    assert [call["name"] for call in named.tool_calls] == ["read_file"]


@langchain
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_structures_answers(server: Running, method: Any) -> None:
    model = chat_model(server, max_tokens=300)
    if method == "json_mode":  # any JSON object; what is in it is up to the model
        found = model.with_structured_output(None, method=method, include_raw=True).invoke("JSON")
        assert found["raw"].content.startswith("{")
        return
    found = model.with_structured_output(Place, method=method).invoke("where")
    assert found.country in ("CH", "AT")
    assert 1 <= found.people <= 9


@langchain
def test_langchain_embeds(server: Running) -> None:
    from langchain_openai import OpenAIEmbeddings

    model = OpenAIEmbeddings(
        model="tiny", base_url=f"{server.url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    one, two = model.embed_documents(["a cat", "a dog"])
    assert len(one) == len(two) == server.lm.n_embd
    assert model.embed_query("a cat") == pytest.approx(one, abs=1e-4)


# --- LlamaIndex -------------------------------------------------------------------------------------------------------

llama_index = needs("llama_index.llms.openai_like", "llama-index-llms-openai-like")


def openai_like(server: Running, **options: Any) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    defaults = {"model": "tiny", "api_key": "none", "max_tokens": 12, "max_retries": 0, "is_chat_model": True}
    more = {"additional_kwargs": {"seed": 1}, "context_window": 1024, "temperature": 0.5}
    return OpenAILike(api_base=f"{server.url}/v1", **defaults | more | options)


@llama_index
def test_llama_index_chats_and_streams(server: Running) -> None:
    from llama_index.core.llms import ChatMessage

    talk = [ChatMessage(role="system", content="answer"), ChatMessage(role="user", content="how many")]
    model = openai_like(server)
    whole = model.chat(talk)
    pieces = list(model.stream_chat(talk))
    assert whole.message.content
    assert pieces[-1].message.content == whole.message.content
    assert "".join(piece.delta or "" for piece in pieces) == whole.message.content


@llama_index
def test_llama_index_completes(server: Running) -> None:
    model = openai_like(server, is_chat_model=False)
    whole = model.complete("how many")
    assert whole.text
    assert "".join(piece.delta or "" for piece in model.stream_complete("how many")) == whole.text


@llama_index
def test_llama_index_calls_tools(server: Running) -> None:
    from llama_index.core.tools import FunctionTool

    def read_file(first: int, lines: int) -> str:
        """Read a file."""
        return f"{first}: {lines}"

    model = openai_like(server, is_function_calling_model=True, max_tokens=300)
    tool = FunctionTool.from_defaults(read_file)
    answer = model.chat_with_tools([tool], user_msg="hi", tool_required=True, allow_parallel_tool_calls=False)
    (call,) = model.get_tool_calls_from_response(answer)
    assert call.tool_name == "read_file"
    assert set(call.tool_kwargs) == {"first", "lines"}


# --- LiteLLM, which aider and others use ------------------------------------------------------------------------------


@needs("litellm", "litellm mcp")
@needs("mcp", "litellm mcp")
def test_litellm_streams_calls(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # prices are not fetched
    import litellm

    options: Any = {
        "model": "openai/tiny",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "messages": HI,
        "seed": 1,
    }
    whole = litellm.completion(**options, max_tokens=8)
    chunks = list(litellm.completion(**options, max_tokens=8, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    chunks = list(litellm.completion(**options, max_tokens=300, tools=TOOLS, tool_choice="required", stream=True))
    built: Any = litellm.stream_chunk_builder(chunks, messages=HI)
    assert built.choices[0].message.tool_calls
    for call in built.choices[0].message.tool_calls:
        json.loads(call.function.arguments)
