"""Facts of a text as JSON of a given form: python json_schema.py MODEL."""

import json
import sys

import tilebeam

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 40},
        "year": {"type": "integer", "minimum": 1, "maximum": 2100},
        "kind": {"enum": ["person", "place", "event"]},
    },
    "required": ["name", "year", "kind"],
}
TEXT = "The Battle of Hastings was fought in 1066 near the town of Battle."

with tilebeam.load(sys.argv[1]) as lm:
    messages = [{"role": "user", "content": f"Give name, year and kind of what this text is about, as JSON.\n{TEXT}"}]
    answer = lm.chat(messages, json_schema=SCHEMA, temperature=0, max_tokens=None).outputs[0].text
    print(json.loads(answer))  # the text is valid under the schema: nothing to repair

    label = lm.chat([{"role": "user", "content": f"War or peace?\n{TEXT}"}], regex="war|peace", temperature=0)
    print(label.outputs[0].text)
