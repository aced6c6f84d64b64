"""Talk to a model in the terminal: python chat.py MODEL. An empty line ends the conversation."""

import sys

import tilebeam

# What was said before stays in the KV cache: each turn decodes only what is new.
with tilebeam.load(sys.argv[1]) as lm, lm.keep_prefixes():
    messages = [{"role": "system", "content": "Answer in one or two sentences."}]
    while question := input("> "):
        messages.append({"role": "user", "content": question})
        answer = ""
        for delta in lm.stream(lm.chat_prompt(messages), max_tokens=256, temperature=0.7):
            print(delta.text, end="", flush=True)
            answer += delta.text
        print()
        messages.append({"role": "assistant", "content": answer})
