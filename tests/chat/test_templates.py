"""Every chat template of llama.cpp that takes tools: a call that the template itself writes is read back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tilebeam import LM
from tilebeam.chat.answer_parts import Reasoning, Text
from tilebeam.chat.answer_reader import AnswerReader
from tilebeam.chat.chat_template import _run, takes_tools
from tilebeam.chat.thoughts import CHANNELS, Thinking, has_thoughts, is_open, marks_of
from tilebeam.chat.tools import ToolUse, family_of, tools_of
from tilebeam.errors import TilebeamError

SOURCES = Path(__file__).parents[2] / "build" / "ggml-source"
FOLDERS = sorted(SOURCES.glob("llama_cpp_python-*/vendor/llama.cpp/models/templates"))
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in FOLDERS[-1].glob("*.jinja")} if FOLDERS else {}
WITH_TOOLS = sorted(name for name, text in TEMPLATES.items() if takes_tools(text))

# Told in words, as they know no tools, or know them under another name: their calls are JSON.
GENERIC = {
    "HuggingFaceTB-SmolLM3-3B": "its variables are xml_tools and python_tools",
    "fireworks-ai-llama-3-firefunction-v2": "its variable is functions, a text",
    "google-gemma-2-2b-it": "no tools",
    "llama-cpp-rwkv-world": "no tools",
    "microsoft-Phi-3.5-mini-instruct": "no tools",
}
# Models of hundreds of billions of weights, and two that others have taken the place of: their calls stay text.
UNREAD = (
    "Kimi-K",
    "moonshotai-Kimi",
    "MiniMax-M2",
    "MiniMax-M3",
    "deepseek-ai-DeepSeek-V3.2",
    "deepseek-ai-DeepSeek-V4",
)
UNREAD += ("tencent-Hy3", "upstage-Solar", "meetkai-functionary", "CohereForAI-c4ai-command-r-plus")
# Told in words too, but these models write calls of their own all the same.
BOTH = (
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1",
)
# These do not write earlier calls; how the models write them is in their manuals.
_PYTHON = '<|tool_call_start|>[forecast(city={0}, days=3), now(zone="7")]<|tool_call_end|>'
_JSON = (
    '[{{"name": "forecast", "arguments": {{"city": {0}, "days": 3}}}}, {{"name": "now", "arguments": {{"zone": "7"}}}}]'
)
UNWRITTEN = {
    "LFM2-8B-A1B": _PYTHON,
    "LFM2.5-Instruct": _PYTHON,
    "ibm-granite-granite-3.3-2B-Instruct": f"<|tool_call|>{_JSON}",
}
# These write the first call of a message only, or refuse several.
ONE = ("meta-llama-Llama-3", "openai-gpt-oss", "GigaChat3")

FORECAST = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where"},
        "days": {"type": "integer", "description": "how many"},
        "tags": {"type": "array", "items": {"type": "string"}, "description": "words"},
        "rates": {"type": "object", "additionalProperties": {"type": "number"}, "description": "numbers"},
        "wet": {"type": "boolean", "description": "or dry"},
    },
    "required": ["city", "days"],
}
NOW = {"type": "object", "properties": {"zone": {"type": "string", "description": "where"}}}
TOOLS: Any = [
    {"type": "function", "function": {"name": "forecast", "description": "Forecast", "parameters": FORECAST}},
    {"type": "function", "function": {"name": "now", "description": "Time", "parameters": NOW}},
]
CITY = 'Bern, "x" & <3 {5}'
CALLS: list[tuple[str, Any]] = [
    ("forecast", {"city": CITY, "days": 3, "tags": ["x", "y z"], "rates": {"a": 1.5}, "wet": True}),
    ("now", {"zone": "7"}),
]

needs_source = pytest.mark.skipif(not TEMPLATES, reason="llama.cpp's source is not there: make builds it")


def read(template: str, pieces: list[str], opened: bool = False) -> tuple[str, str, list[tuple[str, Any]]]:
    """Thoughts, text and calls."""
    use = ToolUse(family_of(template), tools_of(TOOLS), False, True)
    reader = AnswerReader(use, Thinking(marks_of(template), opened))
    thoughts, text, calls = "", "", list[list[str]]()
    for part in [part for piece in pieces for part in reader.feed(piece)] + reader.end(False):
        if isinstance(part, Reasoning):
            thoughts += part.text
        elif isinstance(part, Text):
            text += part.text
        elif part.name is not None:
            calls.append([part.name, part.arguments])
        else:
            calls[part.call][1] += part.arguments
    return thoughts, text, [(name, json.loads(arguments)) for name, arguments in calls]


def lenient(template: str, messages: Any, prompt: bool, as_text: bool) -> str:
    """What a template that the server's own Jinja refuses makes of messages: as minja, llama.cpp's, does it."""
    import jinja2.ext
    from jinja2.sandbox import SandboxedEnvironment

    def dumped(value: Any, indent: int | None = None) -> str:
        return json.dumps(list(value) if hasattr(value, "__next__") else value, indent=indent, ensure_ascii=False)

    messages = json.loads(json.dumps(messages))
    for call in messages[-1].get("tool_calls", ()) if as_text else ():
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    environment = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
    environment.filters["tojson"] = dumped
    made = environment.from_string(template)
    return made.render(messages=messages, tools=TOOLS, add_generation_prompt=prompt, bos_token="<s>", eos_token="</s>",
                       enable_thinking=True, strftime_now=lambda _: "now")  # fmt: skip


def rendered(template: str, messages: Any, prompt: bool) -> str:
    variables: dict[str, Any] = {"enable_thinking": True, "date_string": "26 Jul 2024", "datetime": "Jul 26 2024"}
    variables |= {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": prompt}
    try:
        return _run("It", template, variables | {"messages": messages, "tools": TOOLS})
    except TilebeamError as error:
        if "SecurityError" in str(error) or "generator" in str(error):  # lists that grow; generators as JSON
            return lenient(template, messages, prompt, False)
        if "can only concatenate str" in str(error):  # arguments as a text
            return lenient(template, messages, prompt, True)
        raise


def answer_of(template: str, calls: list[tuple[str, Any]]) -> tuple[str, bool]:
    """What a template writes for these calls, and whether it begins within thoughts that the prompt opens."""
    made = [
        {"id": f"callabcd{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    asked = [{"role": "user", "content": "Q"}]
    prompt = rendered(template, asked, True)
    whole = rendered(template, [*asked, {"role": "assistant", "content": "", "tool_calls": made}], False)
    same = [a == b for a, b in zip(prompt, whole, strict=False)]
    before = whole[: [*same, False].index(False)]
    if before != prompt:  # the thoughts that it opens are not those that it closes
        before = re.sub(r"<[^<>]*\Z", "", before)
    answer = whole[len(before) :]
    marks = marks_of(template)
    rest = marks.closes in answer and not answer.lstrip().startswith(marks.opens)
    return answer, rest and is_open(prompt, None, marks)


@needs_source
@pytest.mark.parametrize("name", [name for name in WITH_TOOLS if name not in UNWRITTEN and not name.startswith(UNREAD)])
def test_a_call_comes_back(name: str) -> None:
    template = TEMPLATES[name]
    assert family_of(template).name != "json"
    wanted = CALLS[:1] if name.startswith(ONE) else CALLS
    answer, opened = answer_of(template, wanted)
    whole = read(template, [answer], opened)
    assert whole[2] == wanted
    assert "forecast" not in whole[0] + whole[1]
    for size in range(1, 8):
        assert read(template, [answer[i : i + size] for i in range(0, len(answer), size)], opened) == whole
    marks = marks_of(template)
    if marks != CHANNELS and not opened:  # what is only thought of is not called
        thought = f"{marks.opens}I may write {answer.replace(marks.closes, '')}.{marks.closes}"
        for pieces in ([thought], list(thought)):
            thoughts, text, calls = read(template, pieces)
            assert "forecast" in thoughts
            assert (text, calls) == ("", [])


@needs_source
@pytest.mark.parametrize("name", UNWRITTEN)
def test_calls_that_templates_do_not_write(name: str) -> None:
    answer = UNWRITTEN[name].format(json.dumps(CITY))
    wanted = [("forecast", {"city": CITY, "days": 3}), ("now", {"zone": "7"})]
    for size in (1, 2, 3, 5, 7, len(answer)):
        pieces = [answer[i : i + size] for i in range(0, len(answer), size)]
        assert read(TEMPLATES[name], pieces) == ("", "", wanted)


@needs_source
def test_all_others_are_generic_by_name() -> None:
    others = {name: family_of(text).name for name, text in TEMPLATES.items() if name not in WITH_TOOLS}
    assert all(any(name.startswith(unread) for name in WITH_TOOLS) for unread in UNREAD)
    assert others == dict.fromkeys(GENERIC, "json") | dict.fromkeys(BOTH, "deepseek")


@needs_source
@pytest.mark.parametrize(
    "name", sorted(name for name, text in TEMPLATES.items() if has_thoughts(text) and not name.startswith(UNREAD))
)
def test_templates_of_models_that_think(lm: LM, name: str) -> None:
    """Thoughts are found open where the template opens them, and end at a budget with its own marks."""
    try:
        text = rendered(TEMPLATES[name], [{"role": "user", "content": "Q"}], True)
    except Exception:
        pytest.skip("the template needs other variables")
    marks = marks_of(TEMPLATES[name])
    opened = is_open(text, None, marks)
    assert opened == text.rstrip().endswith(marks.opens.rstrip())
    if name.startswith("deepseek-ai-DeepSeek-R1-Distill-Qwen"):
        assert opened
    prompt = text[-200:] if opened else text[-200:] + marks.opens
    output = lm.generate(prompt, thinking_budget=3, thinking_marks=marks, seed=1, max_tokens=40)[0].outputs[0]
    ids = lm.tokenize(marks.closes, add_special=False)
    # A character that has begun ends before.
    assert any(output.token_ids[at : at + len(ids)] == ids for at in range(3, 7))
