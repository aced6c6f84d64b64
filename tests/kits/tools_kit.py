"""Functions that a chat offers, and templates that tell of them, as tests of library and server use them."""

from __future__ import annotations

from typing import Any

WEATHER = {
    "type": "object",
    "properties": {"where": {"$ref": "#/$defs/Place"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["where", "days"],
    "additionalProperties": False,
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"country": {"enum": ["CH", "AT"]}},
            "required": ["country"],
            "additionalProperties": False,
        }
    },
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Forecast", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}
HERMES = (
    "{% if tools %}<s>tools:{% for t in tools %} {{ t | tojson }}{% endfor %}</s>{% endif %}"
    "{% for m in messages %}<s>{{ m.role }}: {% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
MISTRAL = HERMES.replace("<tool_call>", "[TOOL_CALLS][").replace("</tool_call>", "]")
LLAMA = HERMES.replace("<tool_call>", "<|python_tag|>").replace("</tool_call>", "")
# A template that opens thoughts unless it is told not to.
THINKS = (
    "{% for m in messages %}<s>{{ m.role }}: {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>a:"
    "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}{% endif %}"
)
