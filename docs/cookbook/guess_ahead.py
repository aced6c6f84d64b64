"""One text, faster: tokens are guessed ahead and checked in one step. python guess_ahead.py MODEL [DRAFT_MODEL].

Without a draft model they are looked up in prompt and text: good where code is edited or a text is quoted.
"""

import sys

import tilebeam

CODE = """
def area(width, height):
    return width * height
"""
REQUEST = f"Write this again with type hints, and nothing else:{CODE}"

draft = sys.argv[2] if len(sys.argv) > 2 else None
with tilebeam.load(sys.argv[1], draft=draft, lookup=draft is None) as lm:
    output = lm.chat([{"role": "user", "content": REQUEST}], temperature=0, max_tokens=200)
    print(output.outputs[0].text)
    usage = output.usage
    print(f"{usage.completion_tokens} tokens, {usage.accepted_tokens} of {usage.drafted_tokens} guesses were right")
