"""A model that calls a function and reads its result: python tools.py MODEL."""

import json
import sys

import tilebeam

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 40},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "forecast", "description": "Get the weather of the next days.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]


def forecast(city: str, days: int) -> str:
    """Tell the weather."""
    return f"{city}: rain for {days} days"


with tilebeam.load(sys.argv[1]) as lm:
    messages = [{"role": "user", "content": "Do I need an umbrella in Bern this week?"}]
    # "required" has the model call something; without it, the model decides.
    answer = lm.chat(messages, tools=TOOLS, tool_choice="required", temperature=0, max_tokens=None).outputs[0]
    messages.append(answer.message)
    for call in answer.tool_calls:
        result = forecast(**json.loads(call.arguments))  # valid under the schema
        print(call.name, call.arguments, "->", result)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    for delta in lm.stream_chat(messages, max_tokens=200):
        print(delta.text, end="", flush=True)
    print()
